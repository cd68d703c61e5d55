"""The tests as other machines would run them, in short: `make test-anywhere`.

Other instruction sets with one thread and two (rounding differs, laws and choices must not), a user that is not root in
a folder with a space in its path, and other Pythons: those given as arguments, in which the project is installed.
"""

import itertools
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[1]
NUMERIC = ("tests/airmoe_ray",)
EVERYWHERE = (
    "tests/airmoe_ray",
    "tests/actors/serving/test_service.py",
    "tests/api/cli",
    "tests/api/http/test_errors.py",
)
LIMIT_S = 1800
NOBODY = 65534
# torch's and oneDNN's names of an instruction set, and what /proc/cpuinfo calls it
INSTRUCTION_SETS = (
    ("default", "SSE41", "sse4_1"),
    ("avx2", "AVX2", "avx2"),
    ("avx512", "AVX512_CORE", "avx512bw"),
)
THREADS = (1, 2)
# a process that starts another: an interpreter below a closed home can be begun by root, but not by its own children
CAN_RUN = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import sys'], check=True)"


@dataclass(frozen=True)
class Run:
    """One run of pytest; `lacking` says why this machine cannot have it."""

    name: str
    tests: Sequence[str] = ()
    environment: dict[str, str] = field(default_factory=dict)
    python: Path = Path(sys.executable)
    prefix: Sequence[str] = ()
    folder: Path = ROOT
    lacking: str = ""

    def passes(self) -> bool:
        """Say which environment this is, run, say how it ended."""
        print(f"\n== {self.name}", *(f"{key}={value}" for key, value in self.environment.items()), flush=True)
        pytest = ("-m", "pytest", "-n", "2", "--dist", "loadfile", "--no-loadscope-reorder", "-p", "no:cacheprovider")
        command = [*self.prefix, str(self.python), *pytest, *self.tests]
        begun = time.monotonic()
        try:
            code = subprocess.run(
                command, cwd=self.folder, env=os.environ | self.environment, timeout=LIMIT_S, check=False
            ).returncode
        except subprocess.TimeoutExpired:
            code = f"none within {LIMIT_S} s"
        print(f"== {self.name}: exit code {code} after {time.monotonic() - begun:.0f} s", flush=True)
        return code == 0


def on_instruction_sets() -> list[Run]:
    """Torch and oneDNN as they would be on an older or newer CPU, each with one thread and with two."""
    known = Path("/proc/cpuinfo").read_text().split() if Path("/proc/cpuinfo").exists() else []
    runs = []
    for (aten, onednn, flag), threads in itertools.product(INSTRUCTION_SETS, THREADS):
        environment = {
            "ATEN_CPU_CAPABILITY": aten,
            "ONEDNN_MAX_CPU_ISA": onednn,
            "AIRMOE_TEST_THREADS": str(threads),
            "OMP_WAIT_POLICY": "PASSIVE",  # as many processes as cores, so a thread that spins takes a core from others
        }
        lacking = "" if flag in known else f"this CPU has no {flag}"
        runs.append(Run(f"instruction set {aten}, threads: {threads}", NUMERIC, environment, lacking=lacking))
    return runs


def as_another_user(place: Path) -> Run:
    """A copy of the tree in a folder with a space, for a user who is not root."""
    name = "a user that is not root, in a folder with a space"
    home = place / "a folder"
    tree = home / "airmoe"
    left_out = shutil.ignore_patterns(".git", ".venv", "runs", "build", "dist", "*.egg-info", ".*cache*", "__pycache__")
    shutil.copytree(ROOT, tree, ignore=left_out)
    environment = {"PYTHONPATH": str(tree), "HOME": str(home)}
    environment["AIRMOE_CAMVID"] = os.environ.get("AIRMOE_CAMVID", str(ROOT.parent / "shared" / "data" / "camvid"))
    if os.getuid() != 0:
        return Run(name, EVERYWHERE, environment, folder=tree)
    if not shutil.which("setpriv"):
        return Run(name, lacking="this is root, and there is no setpriv to become somebody else")
    become = ("setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups")
    python = own_interpreter(home, become)
    if python is None:
        return Run(
            name, lacking=f"nobody but root can run Python {sys.version_info.major}.{sys.version_info.minor} here"
        )
    place.chmod(0o755)
    for path in (home, *home.rglob("*")):
        os.chown(path, NOBODY, NOBODY, follow_symlinks=False)
    return Run(name, EVERYWHERE, environment, python=python, prefix=become, folder=tree)


def own_interpreter(home: Path, become: Sequence[str]) -> Path | None:
    """A virtual environment over our packages, of an interpreter that the other user can run; None: there is none."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    for base in (Path(sys.executable).resolve(), Path("/usr/bin", version)):
        if (
            not base.exists()
            or subprocess.run([*become, base, "-c", CAN_RUN], capture_output=True, check=False).returncode
        ):
            continue
        subprocess.run([base, "-m", "venv", "--without-pip", home / "venv"], check=True)
        python = home / "venv" / "bin" / "python"
        packages = home / "venv" / "lib" / version / "site-packages"
        (packages / "ours.pth").write_text("\n".join(path for path in sys.path if path.endswith("site-packages")))
        script = python.with_name("airmoe")
        script.write_text(
            f"#!/bin/sh\nexec {shlex.quote(str(python))} -c 'from api.cli.main import run; run()' \"$@\"\n"
        )
        script.chmod(0o755)
        return python
    return None


def on_other_pythons(pythons: Sequence[str]) -> list[Run]:
    """Whole interpreters; installing the project into one takes minutes and is not done here."""
    if not pythons:
        return [
            Run("another Python", lacking="none was given; PYTHONS='DIR/bin/python' names some with the project in")
        ]
    return [Run(f"Python {python}", EVERYWHERE, python=Path(python)) for python in pythons]


def main(pythons: Sequence[str]) -> int:
    """All runs that this machine can have; 1 where one is red."""
    failed: list[str] = []
    with tempfile.TemporaryDirectory() as place:
        for run in (*on_instruction_sets(), as_another_user(Path(place)), *on_other_pythons(pythons)):
            if run.lacking:
                print(f"\n== {run.name}: SKIPPED, {run.lacking}", flush=True)
            elif not run.passes():
                failed.append(run.name)
    print("\nred: " + ", ".join(failed) if failed else "\nall green")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
