"""Keys and tokens stay with the front end: nothing that is sent to an actor holds one, nor what Ray keeps of us."""

import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ray import cloudpickle

from actors.cluster.placement import Node
from actors.rounds.calls import Pinned
from actors.serving import system as system_module
from actors.serving.system import System
from actors.training import client_pool as pool_module
from actors.training.client_pool import ClientPool
from actors.training.feature_pool import WorkerCalls
from actors.training.progress_relay import RelayCalls
from actors.training.ray_train import _Job
from airmoe_ray.config import Config
from tests.actors.conftest import tiny, write_checkpoint

KEY, TOKEN = "key-of-the-front-end", "token-of-the-front-end"
GUARDED: dict[str, Any] = {"api_keys": ["another", KEY], "admin_token": TOKEN, "renew_frl": True}


class StartedError(Exception):
    """All actors were made."""


class Recorder:
    """In place of any actor class, handle and method: keeps what it is called with, as it would travel."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []

    def options(self, **_: Any) -> "Recorder":
        return self

    def remote(self, *arguments: Any) -> "Recorder":
        self.sent.append(cloudpickle.dumps(arguments))
        return self

    def __getattr__(self, name: str) -> "Recorder":
        return self


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    """Takes the place of the cluster; the wait for the first answers ends at once."""

    def started(*_: Any, **__: Any) -> None:
        raise StartedError

    recorder = Recorder()
    for module in (system_module, pool_module):
        monkeypatch.setattr(module, "nodes", lambda: [Node(cpus=8, gpus=0, resources=frozenset())])
        monkeypatch.setattr(module, "ChannelActor", recorder)
    monkeypatch.setattr(system_module, "reserve", lambda *_, **__: None)
    monkeypatch.setattr(system_module, "_await_all", started)
    monkeypatch.setattr(pool_module.ClientPool, "_await_all", started)
    monkeypatch.setattr(Pinned, "put", classmethod(lambda cls, content: cls(content)))
    return recorder


def assert_silent(sent: list[bytes], config: Config) -> None:
    """Something was sent, a configuration among it, and no secret in any of it."""
    assert any(b"ServeConfig" in content for content in sent)
    assert [content for content in sent if KEY.encode() in content or TOKEN.encode() in content] == []
    assert config.serve.api_keys[1] == KEY  # the front end itself still has them
    assert config.serve.admin_token == TOKEN


def test_no_actor_of_a_served_system_gets_a_secret(recorder: Recorder, tmp_path: Path) -> None:
    config = tiny(serve=GUARDED)
    checkpoint = write_checkpoint(tmp_path / "checkpoint", config)
    system = System(checkpoint, config, expert_actor=recorder, cloud_actor=recorder)  # type: ignore[arg-type]
    with pytest.raises(StartedError):
        system.start()
    assert len(recorder.sent) >= 2 + 4  # cloud, channel, hosts
    assert_silent(recorder.sent, config)
    stored = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    assert len(stored) > 5
    assert_silent(stored + recorder.sent, config)


def test_no_learning_client_gets_a_secret(recorder: Recorder, tmp_path: Path) -> None:
    config = tiny(serve=GUARDED)
    files = dict.fromkeys(range(config.experts.count), (b"weights", b"moments"))
    with pytest.raises(StartedError):
        ClientPool(config, None, files, None, learner=recorder, channel=recorder)  # type: ignore[arg-type]
    assert len(recorder.sent) >= 1 + 4
    assert_silent(recorder.sent, config)


def test_no_trainer_and_no_feature_worker_gets_a_secret(recorder: Recorder, tmp_path: Path) -> None:
    config = tiny(serve=GUARDED)
    WorkerCalls.start(recorder, config, tmp_path, None)  # type: ignore[arg-type]
    job = _Job(config, tmp_path, False, RelayCalls(None), "id", 1, tmp_path, None)
    assert_silent([*recorder.sent, pickle.dumps(job)], config)


def test_rays_list_of_jobs_names_the_command_without_its_options(tmp_path: Path) -> None:
    script = tmp_path / "airmoe"
    script.write_text(
        "from ray._private import state\n"
        "from actors.cluster.connection import cluster\n"
        "with cluster(cpus=1):\n"
        "    print([job['Entrypoint'] for job in state.jobs()])\n"
    )
    command = [sys.executable, str(script), "serve", "--key", KEY, "--set", f"serve.admin_token={TOKEN}"]
    told = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout
    assert told.splitlines()[-1] == "['airmoe serve']"
