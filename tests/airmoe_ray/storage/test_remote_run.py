"""Runs in a bucket: never half a checkpoint, one clear line for what is wrong, and all verbs take the URL."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from airmoe_ray.errors import CheckpointError, UserError
from airmoe_ray.inference.segmenter import Segmenter
from airmoe_ray.storage.bucket import Bucket, is_url
from airmoe_ray.storage.export import export_model
from airmoe_ray.storage.remote_run import RemoteRun
from airmoe_ray.storage.shipped import find_model, state_folder
from airmoe_ray.storage.staged_run import train_staged
from airmoe_ray.training.run import train_run
from tests.airmoe_ray.training.tiny_runs import tiny_config
from tests.object_store import ObjectStore, object_store


@pytest.fixture(scope="module")
def store() -> Iterator[ObjectStore]:
    with pytest.MonkeyPatch.context() as patch, object_store() as found:
        patch.setenv("AWS_ACCESS_KEY_ID", "any")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "any")
        patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        yield found


def write(folder: Path, epoch: int) -> None:
    """A stand-in for a checkpoint of this epoch; every file says so."""
    shutil.rmtree(folder / "checkpoint", ignore_errors=True)
    for name in ("model.json", "experts/expert_00.safetensors", "trainer/state.json"):
        path = folder / "checkpoint" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"epoch": epoch}))


def epochs(checkpoint: Path) -> set[int]:
    return {json.loads(path.read_text())["epoch"] for path in checkpoint.rglob("*") if path.is_file()}


@pytest.mark.parametrize("kind", ["s3", "file", "memory"])
def test_a_reader_finds_the_old_checkpoint_or_the_new_one_wherever_a_writer_is_stopped(
    kind: str, store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = {"s3": store.url("halves"), "file": (tmp_path / "there").as_uri(), "memory": "memory://runs/halves"}[kind]
    whole = Bucket.write
    for stopped_after in range(5):
        writer, left = RemoteRun(url), [1 << 10]

        def limited(self: Bucket, name: str, content: bytes, left: list[int] = left) -> None:
            if left[0] == 0:
                raise KeyboardInterrupt
            left[0] -= 1
            whole(self, name, content)

        monkeypatch.setattr(Bucket, "write", limited)
        write(tmp_path / "run", 2 * stopped_after)
        writer.push(tmp_path / "run")
        write(tmp_path / "run", 2 * stopped_after + 1)
        left[0] = stopped_after
        try:
            writer.push(tmp_path / "run")
        except KeyboardInterrupt:
            expected = 2 * stopped_after
        else:
            expected = 2 * stopped_after + 1
        monkeypatch.undo()
        found = RemoteRun(url).fetch("checkpoint", tmp_path / f"read {stopped_after}")
        assert epochs(found) == {expected}
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "any")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "any")
    assert expected == 2 * stopped_after + 1  # three files and the pointer: the last writer was not stopped


def test_the_version_before_stays_for_those_who_have_just_read_its_name(store: ObjectStore, tmp_path: Path) -> None:
    run = RemoteRun(store.url("kept"))
    versions = []
    for epoch in range(4):
        write(tmp_path, epoch)
        run.push(tmp_path)
        versions.append(run.version)
    assert {name.partition("/")[0] for name in run.bucket.list("versions/checkpoint")} == set(versions[-2:])
    reader = RemoteRun(store.url("kept"))
    assert epochs(reader.fetch("checkpoint", tmp_path / "before", version=versions[-2])) == {2}
    run.push(tmp_path)  # nothing is new
    assert run.version == versions[-1]


def test_a_file_that_is_cut_short_is_no_checkpoint(store: ObjectStore, tmp_path: Path) -> None:
    run = RemoteRun(store.url("cut"))
    write(tmp_path, 1)
    run.push(tmp_path)
    run.bucket.write(f"versions/checkpoint/{run.version}/model.json", b"{")
    with pytest.raises(CheckpointError, match=r"^s3://runs/cut: holds no whole checkpoint; train first"):
        RemoteRun(store.url("cut")).fetch("checkpoint", tmp_path / "read")


def test_mistakes_are_told_in_one_line_each_before_anything_starts(store: ObjectStore) -> None:
    reader, writer = store.make_user("reader", "s3:GetObject", "s3:ListBucket"), store.make_user("writer", "s3:*")
    told = {
        "no permission to write": (store.url("x", user=reader), "ACCESS_DENIED .*; no permission; allow GetObject"),
        "a wrong secret": (
            store.url("x", user=(writer[0], "wrong")),
            "SIGNATURE_DOES_NOT_MATCH .* the secret does n",
        ),
        "an unknown key": (
            store.url("x", user=("nobody", "wrong")),
            "INVALID_ACCESS_KEY_ID .*; the store does not know this key",
        ),
        "no such bucket": (store.url("x", user=writer, bucket="absent"), "NO_SUCH_BUCKET .*; there is no such bucket"),
        "nobody there": (
            "s3://runs/x?endpoint_override=127.0.0.1:9&scheme=http&region=a",
            "cannot be reached",
        ),
        "a secret that is not quoted": ("s3://key:se/cr@et@runs/x", "expected one such as s3://bucket/folder"),
        "a slip in the URL": ("s3://runs/x?endpont=1", "expected one such as s3://bucket/folder"),
        "an unknown kind": ("nowhere://runs/x", "expected one such as s3://bucket/folder"),
    }
    store.check_keys(yes=True)
    try:
        for url, expected in told.values():
            with pytest.raises(UserError, match=expected) as caught:
                RemoteRun(url).check(resume=False)
            assert "\n" not in str(caught.value)
            assert "wrong" not in str(caught.value)
            assert "se/cr" not in str(caught.value)
            assert writer[1] not in str(caught.value)
            assert str(caught.value).startswith(("s3://runs/x: ", "s3://absent/x: ", "nowhere://runs/x: "))
        RemoteRun(store.url("x", user=writer)).check(resume=False)
    finally:
        store.check_keys(yes=False)


def test_a_run_at_a_url_trains_resumes_answers_and_is_exported_like_one_in_a_folder(
    store: ObjectStore, tmp_path: Path
) -> None:
    config, url = tiny_config(tmp_path, **{"train.epochs": 2}), store.url("whole")
    half = config.model_copy(update={"train": config.train.model_copy(update={"epochs": 1})})

    def train(settings, *, resume):
        run = RemoteRun(url)
        run.check(resume=resume)
        return train_staged(
            run, lambda folder, after: train_run(settings, folder, resume=resume, after_epoch=after), resume=resume
        )

    train_run(half, tmp_path / "run")
    train_run(config, tmp_path / "run", resume=True)
    train(half, resume=False)
    with pytest.raises(UserError, match=r"^s3://runs/whole: already holds a trained run; add --resume"):
        train(half, resume=False)
    train(config, resume=True)
    local, remote = find_model(tmp_path / "run"), find_model(url)
    for path in local.checkpoint.rglob("*.safetensors"):
        assert path.read_bytes() == (remote.checkpoint / path.relative_to(local.checkpoint)).read_bytes()
    assert not remote.state.is_absolute()
    assert remote.state == state_folder(url)
    export_model(find_model(url, best=None).checkpoint, tmp_path / "small")
    Bucket(url).upload(tmp_path / "small", "small")
    copied = Segmenter.from_pretrained(store.url("whole/small"))
    assert copied.card.classes == Segmenter.from_pretrained(url).card.classes


def test_a_folder_is_not_taken_for_a_url() -> None:
    assert is_url("s3://runs/a")
    assert not any(map(is_url, ("runs/a", "C:\\runs", "/mnt/a:b", "street", Path("a"))))
