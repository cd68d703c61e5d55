"""A folder of cached features: what lies in it, who works in it, and how it goes away.

    DIR/KEY/about.json    what these are the features of, for people
    DIR/KEY/lock          locked by whoever uses the folder; its time is that of the last use
    DIR/KEY/000012.bin    a chunk of images; it appears whole, by a rename
    DIR/KEY/000012.part   a chunk that somebody works on, locked for as long as that process lives

The cache is complete when all chunks are there. Locks are the kernel's (flock): they end with their process, however
that ends. Needs neither torch nor a backbone.
"""

import fcntl
import json
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Literal

from airmoe_ray.errors import UserError

CHUNK = 32  # images; fixed, so that who builds a chunk, and with how many others, never shows in its bytes
_ABOUT, _LOCK = "about.json", "lock"
_NAME = re.compile(r"[0-9a-f]{16}(\.\w+)?")  # with a suffix: left behind by a process that died


@dataclass(frozen=True)
class About:
    """What the features of one folder are: the facts that people ask for."""

    dataset: str
    root: str | None
    images: int
    view: str
    image_size: int
    backbone: str
    dtype: str
    dim: int
    stride: int
    fine: list[list[int]] = field(default_factory=list)  # [channels, stride] of each finer map, for a refiner

    @property
    def chunks(self) -> int:
        """Files that make the cache complete."""
        return -(-self.images // CHUNK)

    def chunk_indices(self, chunk: int) -> range:
        """Images of a chunk."""
        return range(chunk * CHUNK, min((chunk + 1) * CHUNK, self.images))


@dataclass(frozen=True)
class Entry:
    """One folder, as `airmoe cache` shows it."""

    folder: Path
    state: Literal["complete", "partial", "unknown"]  # unknown: of another version, or left behind
    about: About | None
    images: int  # whose features are there
    bytes: int
    used_at: float  # seconds since 1970
    in_use: bool


def chunk_file(folder: Path, chunk: int) -> Path:
    """Where a chunk is, or will be."""
    return folder / f"{chunk:06d}.bin"


def hold(folder: Path) -> IO[bytes]:
    """Make the folder if need be, and keep it from being pruned until the returned file is closed."""
    while True:
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            with suppress(FileExistsError):
                os.mkdir(folder)
            file = _open_lock(folder / _LOCK)
        except FileNotFoundError:  # pruned in between
            continue
        except OSError as error:
            raise UserError(
                f"data.cache_dir: {folder.parent} cannot be used ({error.strerror}); set it to a folder of yours"
            ) from None
        _flock(file, fcntl.LOCK_SH)
        if _is_at(file, folder / _LOCK):
            with suppress(OSError):  # somebody else's cache, good enough to read
                os.utime(folder / _LOCK)
            return file
        file.close()


def write_about(folder: Path, about: About) -> None:
    """Write once; appears whole."""
    if not (folder / _ABOUT).exists():
        draft = folder / f"{_ABOUT}.{uuid.uuid4().hex}"
        draft.write_text(json.dumps(asdict(about), indent=1))
        os.replace(draft, folder / _ABOUT)


@contextmanager
def claim(path: Path, *, done: Callable[[], bool]) -> Iterator[IO[bytes] | None]:
    """A file to write a chunk into, which becomes `path` at the end; None where another has it in hand, or `done`."""
    part = path.with_suffix(".part")
    with part.open("ab") as file:  # appending: what another is writing must not be cut off
        if not _flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB) or not _is_at(file, part):
            yield None
        elif done():  # asked only now that nobody else can be about to do it
            part.unlink()
            yield None
        else:
            file.truncate(0)  # of somebody who died over it
            try:
                yield file
                file.flush()
                os.fsync(file.fileno())
                os.replace(part, path)
            except BaseException:
                part.unlink(missing_ok=True)
                raise


def entries(root: Path) -> list[Entry]:
    """All caches below `root`, last used first; anything else there is not ours to show or remove."""
    if not root.is_dir():
        return []
    found = [_entry(path) for path in root.iterdir() if _NAME.fullmatch(path.name) and path.is_dir()]
    return sorted((entry for entry in found if entry), key=lambda entry: -entry.used_at)


def remove(folder: Path) -> bool:
    """Delete a folder; False where a process uses it."""
    with suppress(FileNotFoundError), _open_lock(folder / _LOCK) as file:
        if not _flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB):
            return False
        # out of the way first: who comes now makes a new folder instead of using one that is going away
        doomed = folder.with_name(f"{folder.name.split('.')[0]}.{uuid.uuid4().hex}")
        os.rename(folder, doomed)
        shutil.rmtree(doomed)
    return True


def _entry(folder: Path) -> Entry | None:
    about = None
    with suppress(OSError, ValueError, TypeError):
        about = About(**json.loads((folder / _ABOUT).read_text()))
    try:
        files = {path.name: path.stat() for path in folder.iterdir()}
        used_at = (files[_LOCK] if _LOCK in files else folder.stat()).st_mtime
    except FileNotFoundError:  # pruned while we look
        return None
    size, images = sum(stat.st_size for stat in files.values()), 0
    if about is None or "." in folder.name:
        return Entry(folder, "unknown", about, 0, size, used_at, _LOCK in files and _in_use(folder))
    for chunk in range(about.chunks):
        if chunk_file(folder, chunk).name in files:
            images += len(about.chunk_indices(chunk))
    state: Literal["complete", "partial"] = "complete" if images == about.images else "partial"
    return Entry(folder, state, about, images, size, used_at, _in_use(folder))


def _in_use(folder: Path) -> bool:
    with suppress(OSError), (folder / _LOCK).open("rb") as file:
        return not _flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return False


def _open_lock(path: Path) -> IO[bytes]:
    try:
        return path.open("ab")
    except OSError:
        if not path.exists():
            raise
        return path.open("rb")


def _flock(file: IO[bytes], how: int) -> bool:
    try:
        fcntl.flock(file, how)
    except BlockingIOError:
        return False
    except OSError as error:
        place = Path(file.name).parent.parent
        raise UserError(
            f"data.cache_dir: {place} is on a file system without locks ({error.strerror}); use another one"
        ) from None
    return True


def _is_at(file: IO[bytes], path: Path) -> bool:
    """Whether an open file is still the one at its path."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False
