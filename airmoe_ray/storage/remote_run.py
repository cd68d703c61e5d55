"""A run at a URL: what `DIR/` holds, kept where nodes that share no folder find it.

    config.yaml  metrics.jsonl  summary.json          as in a folder
    checkpoint.json  checkpoint-best.json              each names a version, and the size of each of its files
    versions/checkpoint/00007-1f0c…/…                  the files of a checkpoint, under a name that is never used again

A version is complete before the small object that names it is put in place, so a reader finds the old checkpoint or the
new one, never half of either. The version before stays, for those who have just read its name.
"""

import atexit
import json
import os
import shutil
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from airmoe_ray.errors import CheckpointError, UserError
from airmoe_ray.storage.bucket import Bucket
from airmoe_ray.storage.shipped import BEST, LAST

_VERSIONS = "versions"
_PREFIX = "airmoe-run-"  # of local folders
_TRIES = 3  # of a reader who finds that a version has gone while it was read


class RemoteRun:
    """A run at a URL, and which of a local folder's files are there already."""

    def __init__(self, url: str) -> None:
        self.url, self.bucket = url, Bucket(url)
        self._there: dict[str, object] = {}  # what of the local folder was pushed or pulled, by name
        self.version: str | None = None  # of the last checkpoint that was pushed

    @property
    def shown(self) -> str:
        """The URL without what is secret in it."""
        return self.bucket.shown

    def check(self, *, resume: bool) -> None:
        """Find out before anything starts whether a run can be begun, or gone on with, here."""
        self.bucket.check_writable()
        if not resume and self.holds(LAST):
            raise UserError(
                f"{self.shown}: already holds a trained run; add --resume to continue it, or choose another --run"
            )
        if resume and not self.holds(LAST):
            raise UserError(
                f"{self.shown}: no checkpoint to resume from; leave --resume away to start from the beginning"
            )

    def open(self, folder: Path, *, resume: bool, version: str | None = None) -> None:
        """Make a local folder stand in for the run, which begins or, from the newest or a given `version`, goes on."""
        if resume:
            self.pull(folder, version=version)
        else:
            self.begin()

    def holds(self, part: str) -> bool:
        """Whether there is a checkpoint of this name."""
        return bool(self._files_of(part)[1])

    def newest(self, part: str = LAST) -> str | None:
        """The version of a checkpoint that is in place; None where there is none, or one without versions."""
        named = self.bucket.read_json(f"{part}.json")
        return str(named["version"]) if named else None

    def begin(self) -> None:
        """Forget what a run left here that was stopped before its first checkpoint."""
        for name in ("metrics.jsonl", "summary.json", f"{BEST}.json"):
            self.bucket.delete(name)

    # to a local folder and back

    def fetch_config(self, folder: Path) -> Path:
        """The run's configuration, as a local file."""
        content = self.bucket.read("config.yaml")
        if content is None:
            raise UserError(f"{self.shown}: no run to resume here (no config.yaml); leave --resume away to start one")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.yaml").write_bytes(content)
        return folder / "config.yaml"

    def fetch(self, part: str, folder: Path, *, version: str | None = None) -> Path:
        """A checkpoint as a local folder: the newest, or that of a `version`."""
        target = folder / part
        for _ in range(_TRIES):
            prefix, sizes = self._files_of(part, version)
            if not sizes:
                break
            shutil.rmtree(target, ignore_errors=True)
            if self.bucket.download(prefix, sizes, target):
                self._there[part] = _mark(target)
                return target
        raise CheckpointError(f"{self.shown}: holds no whole {part}; train first, or give the run that holds one")

    def pull(self, folder: Path, *, version: str | None = None) -> None:
        """Everything that a resumed run needs: the log, the best checkpoint and the last, or that of a `version`."""
        self.fetch(LAST, folder, version=version)
        if self.holds(BEST):
            self.fetch(BEST, folder)
        self.fetch_log(folder)

    def fetch_log(self, folder: Path) -> None:
        """The log, and the summary where the run is finished, as local files."""
        for name in ("metrics.jsonl", "summary.json"):
            content = self.bucket.read(name)
            if content is not None:
                (folder / name).write_bytes(content)
                self._there[name] = _mark(folder / name)

    def push(self, folder: Path) -> None:
        """Put what is new in the folder: the log first, then the checkpoints, as they came."""
        for path in sorted(folder.rglob("*")):
            name = path.relative_to(folder).as_posix()
            if path.is_file() and not name.startswith((LAST, BEST)) and self._there.get(name) != _mark(path):
                self.bucket.write(name, path.read_bytes())
                self._there[name] = _mark(path)
        if "summary.json" in self._there and not (folder / "summary.json").exists():  # the run goes on
            self.bucket.delete("summary.json")
            del self._there["summary.json"]
        for part in (BEST, LAST):
            if (folder / part).is_dir() and self._there.get(part) != _mark(folder / part):
                version = self._publish(folder / part, part)
                self._there[part] = _mark(folder / part)
                self.version = version if part == LAST else self.version

    def _publish(self, checkpoint: Path, part: str) -> str:
        before = self.newest(part)
        version = f"{_epoch(checkpoint):05d}-{uuid.uuid4().hex[:12]}"
        sizes = self.bucket.upload(checkpoint, f"{_VERSIONS}/{part}/{version}")
        self.bucket.write(f"{part}.json", json.dumps({"version": version, "files": sizes}, indent=1).encode())
        there = {name.partition("/")[0] for name in self.bucket.list(f"{_VERSIONS}/{part}")}
        for old in there - {version, before}:
            self.bucket.remove(f"{_VERSIONS}/{part}/{old}")
        return version

    def _files_of(self, part: str, version: str | None = None) -> tuple[str, dict[str, int]]:
        """Where a checkpoint's files are, and their sizes; nothing where there is none.

        A run folder or a checkpoint that somebody copied here, as it was, will do as well.
        """
        if version is not None:
            prefix = f"{_VERSIONS}/{part}/{version}"
            return prefix, self.bucket.list(prefix)
        named = self.bucket.read_json(f"{part}.json")
        if named:
            return f"{_VERSIONS}/{part}/{named['version']}", named["files"]
        copied = self.bucket.list(part)
        return part, copied if "model.json" in copied else {}


def fetch_model(url: str, *, best: bool | None) -> Path:
    """The checkpoint of a run at a URL, or the checkpoint or exported model that is there itself.

    It is copied to a local folder, which is there until this process ends. `best`: the one that scored best; None takes
    it where there is one.
    """
    run, folder = RemoteRun(url), Path(tempfile.mkdtemp(prefix=_PREFIX))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    if run.bucket.read("model.json") is not None:
        sizes = run.bucket.list()
        if not run.bucket.download("", sizes, folder / "model"):
            raise CheckpointError(f"{run.shown}: changes while it is read; try again")
        return folder / "model"
    if best is None:
        best = run.holds(BEST)
    if best and not run.holds(BEST):
        raise CheckpointError(
            f"{run.shown}: has no best checkpoint, as it was trained without validation; use --checkpoint last"
        )
    return run.fetch(BEST if best else LAST, folder)


@contextmanager
def staged(run: RemoteRun) -> Iterator[Path]:
    """A local folder that stands in for a run at a URL; a user's mistake is told with the URL."""
    with tempfile.TemporaryDirectory(prefix=_PREFIX, ignore_cleanup_errors=True) as folder:
        try:
            yield Path(folder)
        except UserError as error:
            raise type(error)(str(error).replace(folder, run.shown)) from None


def _mark(path: Path) -> object:
    """What changes whenever a file is written or a checkpoint's folder is replaced."""
    about = os.stat(path)
    return (about.st_ino, about.st_mtime_ns, about.st_size)


def _epoch(checkpoint: Path) -> int:
    try:
        return int(json.loads((checkpoint / "trainer" / "state.json").read_text())["epoch"])
    except (OSError, ValueError, KeyError):
        return 0
