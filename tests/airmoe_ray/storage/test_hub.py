"""Models from the hub: fetched from a stand-in by the real client, checkpoint files only, mistakes in one line."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from airmoe_ray.errors import CheckpointError
from airmoe_ray.storage.hub import fetch_from_hub, is_hub_id
from tests.airmoe_ray.storage.hub_stand_in import hub

FETCH = """
import json, sys
from airmoe_ray.errors import UserError
from airmoe_ray.storage.hub import fetch_from_hub
told = []
for name in sys.argv[1:]:
    try:
        told.append(str(fetch_from_hub(name)))
    except UserError as error:
        told.append(f"error: {error}")
print(json.dumps(told))
"""


def fetch(endpoint: str, home: Path, *names: str) -> list[str]:
    """What the real client says to each name, in a process of its own: it reads its settings as it is imported."""
    environment = {**os.environ, "HF_ENDPOINT": endpoint, "HF_HOME": str(home), "HF_HUB_DISABLE_TELEMETRY": "1"}
    command = [sys.executable, "-c", FETCH, *names]
    run = subprocess.run(command, capture_output=True, text=True, check=True, env=environment, timeout=120)
    return json.loads(run.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def repositories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A repository with a checkpoint and things beside it, and one without a checkpoint."""
    root = tmp_path_factory.mktemp("hub")
    files = ("model.json", "config.yaml", "cloud.safetensors", "CARD.md", "experts/expert_00.safetensors")
    for name in (*files, "evil.pkl", "setup.py", "trainer/state.json", "experts/evil.bin"):
        path = root / "good" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"content of {name}")
    (root / "bare").mkdir()
    (root / "bare" / "README.md").write_text("nothing here")
    return {"someone/street": root / "good", "someone/bare": root / "bare"}


def test_a_model_is_fetched_without_anything_else_of_its_repository(repositories, tmp_path):
    with hub(repositories) as server:
        good, bare, unknown = fetch(server.url, tmp_path, "someone/street", "someone/bare", "runs/quickstart")
        there = {str(path.relative_to(good)) for path in Path(good).rglob("*") if path.is_file()}
        wanted = {"model.json", "config.yaml", "cloud.safetensors", "CARD.md", "experts/expert_00.safetensors"}
        assert there == set(server.fetched) == wanted
        assert (Path(good) / "model.json").read_text() == "content of model.json"
    assert bare == "error: someone/bare: the repository holds no AirMoE checkpoint (no model.json at its top)"
    assert unknown == "error: runs/quickstart: neither a folder here nor a repository of the hub; check the name"
    # nobody answers any more: what was fetched is still there, what was not is told
    again, other = fetch(server.url, tmp_path, "someone/street", "someone/other")
    assert again == good
    assert other.startswith("error: someone/other: not a folder here, and the hub cannot be reached")


def test_without_the_hubs_package_the_line_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(CheckpointError, match=r"someone/street: .*pip install huggingface_hub"):
        fetch_from_hub("someone/street")


@pytest.mark.parametrize("name", ["street", "/srv/run", "a/b/c", "../run", "a b/c", "org/", ""])
def test_paths_and_plain_names_are_no_ids_of_the_hub(name):
    assert not is_hub_id(name)
