"""`airmoe eval` and `airmoe serve` of a run in a bucket, as people type them."""

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from airmoe_ray.storage.remote_run import RemoteRun
from tests.airmoe_ray.training.tiny_runs import airmoe
from tests.api.http.images import photo, saved
from tests.api.support import EXPERTS, Server
from tests.object_store import object_store

FEW = ("--split", "val", "--set", "data.val_count=4", "--json")
SECRET = "not-to-be-seen"


@pytest.fixture(scope="module")
def url(run_folder: Path) -> Iterator[str]:
    """The run in a bucket; the URL carries a key and its secret, as some people's do."""
    with object_store() as store:
        url = store.url("little", user=("someone", SECRET))
        RemoteRun(url).push(run_folder)
        yield url


def test_eval_scores_a_run_in_a_bucket_as_it_scores_the_folder(url: str, run_folder: Path, tmp_path: Path) -> None:
    there, here = (airmoe("eval", "--run", run, *FEW, cwd=tmp_path) for run in (url, run_folder))
    assert there.code == 0, there.err
    assert json.loads(there.out)["miou"] == json.loads(here.out)["miou"]
    assert SECRET not in there.err


def test_a_bucket_that_holds_no_run_is_one_line_of_both_verbs(url: str, tmp_path: Path) -> None:
    for verb in ("eval", "serve"):
        told = airmoe(verb, "--run", url.replace("/little", "/nothing"), cwd=tmp_path)
        assert (told.code, told.out) == (2, "")
        assert told.err == (
            "airmoe: s3://runs/nothing: holds no whole checkpoint; train first, or give the run that holds one\n"
        )


def test_serve_answers_from_a_run_in_a_bucket_and_shows_no_secret(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # it keeps its state where it is started
    server = Server(tmp_path, "--run", url)
    try:
        server.wait_until_ready()
        answer = httpx.post(f"{server.url}/segment", files={"file": saved(photo(64, 64))}, timeout=60)
        assert answer.status_code == 200, answer.text
        assert len(answer.json()["routing"]["experts"]) == EXPERTS
        assert httpx.get(f"{server.url}/config").status_code == 200
        told = server.log.read_text()
        assert f"serving s3://runs/little on {server.url}" in told
        assert SECRET not in told
    finally:
        code, left = server.stop()
    assert code == 0
    assert not left
