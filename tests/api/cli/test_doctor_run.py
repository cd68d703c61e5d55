"""Where the run that a cluster file serves may be: sent, at a URL, shipped, or in a folder that nodes mount."""

from pathlib import Path

import pytest

from airmoe_ray.storage.remote_run import RemoteRun
from api.cli.doctor.cluster import check_cluster
from api.cli.doctor.results import CheckResult
from tests.object_store import object_store

AWS = Path(__file__).parents[3] / "cluster.yaml"
SENT = "  ~/airmoe/run/checkpoint: runs/quickstart/checkpoint\n"


def checked(folder: Path, run: str, config: str | None = None) -> CheckResult:
    """What doctor says of the run of the shipped file, which serves another one and sends none."""
    text = AWS.read_text()
    assert SENT in text
    (folder / "cluster.yaml").write_text(text.replace(SENT, "").replace("--run ~/airmoe/run", f"--run {run}"))
    return next(result for result in check_cluster(folder / "cluster.yaml", config, ()) if result.check == "run")


def test_a_run_in_a_bucket_is_read_there(run_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "any")
    with object_store() as store:
        RemoteRun(store.url("served")).push(run_folder)
        found = checked(tmp_path, f'"{store.url("served")}"')
        assert (found.ok, found.message) == (True, "s3://runs/served: 4 experts")
        nothing = checked(tmp_path, f'"{store.url("nothing")}"')
        assert (nothing.ok, "s3://runs/nothing: holds no whole checkpoint" in nothing.message) == (False, True)


def test_a_run_in_a_folder_that_nodes_mount_is_left_to_the_head(tmp_path: Path) -> None:
    found = checked(tmp_path, "/shared/runs/camvid")
    assert found.ok
    assert found.message.startswith("/shared/runs/camvid: in /shared, which nodes mount; the head looks for it")
    assert checked(tmp_path, "/shared/runs/camvid", "quickstart").message == "quickstart: 10 experts"


def test_a_shipped_model_is_known_by_its_name(tmp_path: Path) -> None:
    assert checked(tmp_path, "street").message == "street: 10 experts"


def test_a_folder_that_no_node_would_have_is_told(tmp_path: Path) -> None:
    for run in ("~/airmoe/run", "/sharedelsewhere/runs"):
        found = checked(tmp_path, run)
        assert (found.ok, "no file_mounts for" in found.message) == (False, True)
