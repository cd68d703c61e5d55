"""An environment beside ours for a peer: what it needs comes first, and behind that what is installed here."""

import site
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

from airmoe_ray.errors import UserError
from api.bench.figures import Note

_PLACE = Path(".airmoe") / "peers"


def python_with(name: str, requirements: list[str], *, check: str, note: Note, place: Path = _PLACE) -> Path:
    """The Python of an environment with these requirements; made the first time. `check` is code that must run in it.

    What is installed here is seen through it (torch is not downloaded twice), but its own versions take precedence.
    """
    folder = (place / name).absolute()
    python = folder / "bin" / "python"
    if not _runs(python, check):
        note(f"installing {', '.join(requirements)} into {folder} (a few minutes the first time)")
        venv.create(folder, with_pip=True, clear=True)
        _share(python)
        command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *requirements]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode or not _runs(python, check):
            last = (done.stderr.strip().splitlines() or ["it does not import"])[-1]
            raise UserError(f"{name}: {', '.join(requirements)} cannot be installed ({last}); install it into {folder}")
    return python


def _runs(python: Path, code: str) -> bool:
    return (
        python.exists() and not subprocess.run([str(python), "-c", code], capture_output=True, check=False).returncode
    )


def _share(python: Path) -> None:
    """Let another environment see our packages, those in development too, behind its own."""
    query = "import sysconfig; print(sysconfig.get_path('purelib'))"
    theirs = subprocess.run([str(python), "-c", query], capture_output=True, text=True, check=True).stdout.strip()
    ours = dict.fromkeys(
        [sysconfig.get_path("purelib"), *(site.getsitepackages() if sys.prefix != sys.base_prefix else [])]
    )
    lines = [f"import site; site.addsitedir({folder!r})" for folder in ours]
    (Path(theirs) / "shared.pth").write_text("\n".join(lines) + "\n")
