"""A folder at a URL (`s3://`, `gs://`, whatever pyarrow or fsspec reach), and words for what goes wrong there.

Objects are put whole: nobody ever reads half of one. Credentials are those of the machine (environment, profile, role);
what a URL carries of them is never shown.
"""

import json
import re
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from airmoe_ray.errors import UserError

_URL = re.compile(r"[a-z][a-z0-9+.-]+://.+", re.IGNORECASE)
_TRANSFERS = 4  # files under way at once
_IN_PLACE = ("local", "hdfs")  # file systems on which a file grows before a reader's eyes
_MEANINGS = (
    (("NETWORK_CONNECTION", "resolve", "connect", "UNAVAILABLE", "timed out", "TIMEOUT", "no answer within"),
     "cannot be reached; check address and network"),
    (("INVALID_ACCESS_KEY", "TOKEN", "UNRECOGNIZED_CLIENT", "UNAUTHENTICATED"), "the store does not know this key"),
    (("SIGNATURE",), "the secret does not belong to the key"),
    (("NO_SUCH_BUCKET", "NOT_FOUND", "does not exist"), "there is no such bucket; make it, or correct the name"),
    (("ACCESS_DENIED", "FORBIDDEN", "PERMISSION", "HTTP status 403"),
     "no permission; allow GetObject, PutObject and DeleteObject"),
    (("ModuleNotFoundError", "ImportError", "No module named", "Install "), "the library for it is missing"),
    (("unexpected query parameter", "cannot parse uri", "protocol not known", "ArrowInvalid"),
     "not a URL that pyarrow or fsspec can open; expected one such as s3://bucket/folder"),
)  # fmt: skip


def is_url(name: object) -> bool:
    """Whether a place is given as a URL rather than as a folder."""
    return isinstance(name, str) and _URL.fullmatch(name) is not None


def shown(name: str) -> str:
    """A URL without what it may carry of secrets; any other name as it is."""
    return re.sub(r"://.*@", "://", name.partition("?")[0]).rstrip("/") if is_url(name) else name


def meaning_of(error: str) -> str | None:
    """What the words of an object store or of its library mean, and what to do; None where nobody knows."""
    error = error.lower()
    return next((text for marks, text in _MEANINGS if any(mark.lower() in error for mark in marks)), None)


class Bucket:
    """Objects below one URL, by their names relative to it."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.shown = shown(url)
        with self._told("cannot be opened"):
            self.files, root = _open(url)
        self.root = root.rstrip("/")

    def path(self, name: str) -> str:
        """An object's path, as the file system wants it."""
        return f"{self.root}/{name}" if name else self.root

    def read(self, name: str) -> bytes | None:
        """An object's bytes; None where there is none."""
        with self._told(f"cannot read {name}"):
            try:
                with self.files.open_input_stream(self.path(name)) as stream:
                    return bytes(stream.read())
            except FileNotFoundError:
                return None

    def write(self, name: str, content: bytes) -> None:
        """Put an object, whole."""
        with self._told(f"cannot write {name}"):
            if self.files.type_name not in _IN_PLACE:
                return self._put(name, content)
            partial = f"{name}.{uuid.uuid4().hex}.partial"
            self._put(partial, content)
            self.files.move(self.path(partial), self.path(name))

    def read_json(self, name: str) -> Any:
        """What a JSON object holds; None where there is none, or it is broken."""
        content = self.read(name)
        try:
            return None if content is None else json.loads(content)
        except ValueError:
            return None

    def list(self, folder: str = "") -> dict[str, int]:
        """Sizes of all objects below a folder, by their names relative to it [bytes]."""
        from pyarrow.fs import FileSelector, FileType

        base = self.path(folder)
        with self._told("cannot be listed"):
            found = self.files.get_file_info(FileSelector(base, allow_not_found=True, recursive=True))
        start = len(base.strip("/")) + 1
        return {info.path.strip("/")[start:]: info.size for info in found if info.type == FileType.File}

    def upload(self, folder: Path, name: str) -> dict[str, int]:
        """Put all files of a local folder below `name`; their sizes."""
        files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
        names = [path.relative_to(folder).as_posix() for path in files]
        _at_once(lambda path, relative: self.write(f"{name}/{relative}", path.read_bytes()), files, names)
        return {relative: path.stat().st_size for path, relative in zip(files, names, strict=True)}

    def download(self, name: str, sizes: dict[str, int], folder: Path) -> bool:
        """Fetch the files of `name` into a local folder; False where one is gone or has another size."""
        places = [(folder / relative).resolve() for relative in sizes]
        if not all(place.is_relative_to(folder.resolve()) for place in places):
            raise UserError(f"{self.shown}/{name}: names files outside itself; it was not written by airmoe")

        def fetch(relative: str, place: Path) -> bool:
            content = self.read(f"{name}/{relative}" if name else relative)
            if content is None or len(content) != sizes[relative]:
                return False
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(content)
            return True

        return all(_at_once(fetch, list(sizes), places))

    def delete(self, name: str) -> None:
        """Delete an object, if it is there."""
        with self._told(f"cannot delete {name}"), suppress(FileNotFoundError):
            self.files.delete_file(self.path(name))

    def remove(self, folder: str) -> None:
        """Delete everything below a folder."""
        with self._told(f"cannot delete {folder}"), suppress(FileNotFoundError):
            self.files.delete_dir(self.path(folder))

    def check_writable(self) -> None:
        """UserError unless an object can be written, read again and deleted."""
        name = f".writable-{uuid.uuid4().hex}"
        self.write(name, b"airmoe")
        if self.read(name) != b"airmoe":
            raise UserError(
                f"{self.shown}: what is written there cannot be read again; give the key permission to read"
            )
        self.delete(name)

    def _put(self, name: str, content: bytes) -> None:
        try:
            self._stream(name, content)
        except FileNotFoundError:  # a file system with folders
            if self.files.type_name in ("s3", "gcs", "abfs"):
                raise
            self.files.create_dir(self.path(name).rpartition("/")[0], recursive=True)
            self._stream(name, content)

    def _stream(self, name: str, content: bytes) -> None:
        with self.files.open_output_stream(self.path(name)) as stream:
            stream.write(content)

    @contextmanager
    def _told(self, what: str) -> Iterator[None]:
        """Turn whatever a file system raises into a line with the reason and what to do."""
        try:
            yield
        except UserError:
            raise
        except Exception as error:  # pyarrow raises OSError, fsspec whatever its makers' libraries do
            text = str(error).replace(self._url, self.shown).strip() or type(error).__name__
            meaning = meaning_of(_reason(text)) or "check the URL and its permissions"
            raise UserError(f"{self.shown}: {what} ({_reason(text)}); {meaning}") from None


def _open(url: str) -> tuple[Any, str]:
    """The file system of a URL and the path in it: pyarrow's own where it has one, else fsspec's."""
    from pyarrow import ArrowInvalid  # here and not above: it takes a tenth of a second, and most runs are folders
    from pyarrow.fs import FileSystem, FSSpecHandler, PyFileSystem

    try:
        files, path = FileSystem.from_uri(url)
        return files, path
    except ArrowInvalid as error:
        if "Unrecognized filesystem" not in str(error):
            raise
    import fsspec

    files, path = fsspec.core.url_to_fs(url)
    return PyFileSystem(FSSpecHandler(files)), path


def _at_once(work: Callable[..., Any], *arguments: Any) -> list[Any]:
    with ThreadPoolExecutor(_TRANSFERS) as pool:
        return list(pool.map(work, *arguments))


def _reason(text: str) -> str:
    """The part of an error that says something: `ACCESS_DENIED during PutObject operation`."""
    text = text.splitlines()[0]
    aws = re.search(r"AWS Error (\w+ during \w+ operation)", text)
    return aws[1] if aws else text[:160]
