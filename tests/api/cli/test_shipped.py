"""The model in the box, as `airmoe serve` without `--run` finds it: a stand-in in a copy of the package."""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from airmoe_ray.storage.export import export_model
from tests.api.http.server_requests import PHOTO
from tests.api.support import AIRMOE, ROOT, airmoe, free_port, wait_for

TERMS = "For research, not for commercial use."


@pytest.fixture(scope="module")
def package(run_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for PYTHONPATH whose airmoe_ray ships a small `street`; everything else in it is the real one."""
    place = tmp_path_factory.mktemp("installed")
    (place / "airmoe_ray").mkdir()
    for entry in (ROOT / "airmoe_ray").iterdir():
        if entry.name not in ("shipped", "__pycache__"):
            (place / "airmoe_ray" / entry.name).symlink_to(entry)
    export_model(run_folder / "checkpoint", place / "airmoe_ray" / "shipped" / "street", name="street", terms=TERMS)
    return place


@pytest.fixture
def run_in(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., subprocess.CompletedProcess]:
    """`airmoe` of that installation, in a working folder of its own."""
    monkeypatch.chdir(tmp_path)
    return lambda *arguments: airmoe(*arguments, PYTHONPATH=f"{package}{os.pathsep}{ROOT}")


@pytest.fixture
def box(package: Path, tmp_path: Path) -> Iterator[tuple[str, Path, Path]]:
    """A server without `--run`: its address, log and working folder."""
    port, log = free_port(), tmp_path / "log"
    environment = {**os.environ, "PYTHONPATH": f"{package}{os.pathsep}{ROOT}"}
    with log.open("wb") as file:
        command = [AIRMOE, "serve", "--port", str(port)]
        process = subprocess.Popen(command, stdout=file, stderr=file, cwd=tmp_path, env=environment)
    yield f"http://127.0.0.1:{port}", log, tmp_path
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0, log.read_text()


def test_serving_without_a_run_serves_the_box_and_writes_only_into_the_working_folder(box, package):
    url, log, here = box
    before = {path: path.stat().st_mtime_ns for path in (package / "airmoe_ray" / "shipped").rglob("*")}

    def answer() -> httpx.Response | None:
        try:
            found = httpx.post(f"{url}/segment", files={"file": PHOTO}, timeout=30)
            return found if found.is_success else None
        except httpx.TransportError:
            return None

    begun = time.monotonic()
    assert wait_for(answer, timeout_s=150), log.read_text()
    seconds = time.monotonic() - begun
    waiting = max(os.getloadavg()[0] / (os.cpu_count() or 1), 1.0)  # for each core: others may be at work here, too
    print(f"first answer after {seconds:.1f} s, {waiting:.1f} at work for each core")
    assert seconds < 90 * waiting  # 45 are meant, on two cores that do nothing else
    lines = log.read_text().splitlines()
    assert f"terms of the weights: {TERMS}" in lines
    assert [line for line in lines if line.startswith(f"serving street on {url}")]
    port = url.rpartition(":")[2]
    assert [path.name for path in (here / ".airmoe" / "state" / "street").iterdir()] == [f"server-{port}.json"]
    environment = {"PYTHONPATH": f"{package}{os.pathsep}{ROOT}"}
    scaled = subprocess.run(
        [AIRMOE, "scale", "--experts", "3", "--url", url], cwd=here, env={**os.environ, **environment}, check=False
    )
    assert scaled.returncode == 0  # the token was found by the same name
    assert {path: path.stat().st_mtime_ns for path in (package / "airmoe_ray" / "shipped").rglob("*")} == before


@pytest.mark.parametrize("verb", ["serve", "eval", "bench", "export --out small"])
def test_every_verb_knows_shipped_names_and_tells_unknown_ones_in_one_line(run_in, verb):
    result = run_in(*verb.split(), "--run", "stret")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == "airmoe: stret: neither a run folder nor a shipped model; did you mean street?\n"


def test_a_shipped_model_can_be_exported_again_bit_for_bit(run_in, package, tmp_path):
    result = run_in("export", "--run", "street", "--out", "again")
    assert result.returncode == 0, result.stderr
    for path in (package / "airmoe_ray" / "shipped" / "street").rglob("*.safetensors"):
        assert (tmp_path / "again" / path.relative_to(package / "airmoe_ray" / "shipped" / "street")).read_bytes() == (
            path.read_bytes()
        )
    assert TERMS.rstrip(".") in (tmp_path / "again" / "CARD.md").read_text()
