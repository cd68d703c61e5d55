"""A client's FRL on disk: an append-only journal of renewals, compacted into snapshots.

A record is what a renewal needs and nothing else: the attention and psi of the inputs that activated the client (A), in
input order. Replaying it repeats the very arithmetic of Eq. (11)-(12), so a client killed at any moment comes back bit
for bit. A record is forced to disk before the answer that caused it leaves.

    header   magic, format, fingerprint of the client's checkpoint file
    record   length, CRC-32, then: version, A, M, d, kind, tickets (A), alpha (A, M), psi (A, d), little-endian

The kind is that of the numbers, in capitals where tickets precede them: those of the requests it was done for, so that
none is renewed for twice.
"""

import errno
import fcntl
import hashlib
import json
import logging
import os
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import safetensors.numpy
from numpy.typing import NDArray
from safetensors import SafetensorError

from actors.errors import ClusterError

log = logging.getLogger("airmoe")
Array = NDArray[Any]

_MAGIC = b"AMFRL\x00\x00\x01"
_FRAME = struct.Struct("<II")  # length, CRC-32
_BODY = struct.Struct("<QIIIc")  # version, A, M, d, number format
_FORMATS: dict[bytes, np.dtype[np.floating]] = {b"f": np.dtype("<f4"), b"d": np.dtype("<f8")}


@dataclass(frozen=True)
class Renewal:
    """One batch's renewal of one client."""

    version: int  # of the FRL after it
    alpha_AM: Array
    psi_Ad: Array
    tickets: tuple[int, ...] = ()  # of the requests that the inputs belong to; none: not known


@dataclass(frozen=True)
class Snapshot:
    """A whole FRL after `version` renewals."""

    version: int
    prototypes_Md: Array
    importance_M: Array
    tickets: tuple[int, ...] = ()  # the last requests that it was renewed for

    def to_bytes(self, fingerprint: bytes) -> bytes:
        """The snapshot as a safetensors file that names the checkpoint it belongs to."""
        tensors = {"prototypes": self.prototypes_Md, "importance": self.importance_M}
        facts = {"version": str(self.version), "checkpoint": fingerprint.hex(), "tickets": json.dumps(self.tickets)}
        return safetensors.numpy.save(tensors, facts)


class Journal:
    """The journal and snapshot of one client in `folder`, made for one checkpoint file (`fingerprint`)."""

    def __init__(self, folder: Path, client: int, *, fingerprint: bytes, compact_bytes: int = 1 << 20) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        name = f"expert_{client:02d}-{fingerprint.hex()[:12]}"  # those of another checkpoint are other files
        self.path = folder / f"{name}.journal"
        self.snapshot_path = folder / f"{name}.snapshot.safetensors"
        self.fingerprint, self.compact_bytes = fingerprint, compact_bytes
        self._header = _MAGIC + fingerprint
        self._end = 0  # of the last whole record; 0: there is no file before the first renewal
        self._kept = 0  # bytes that could not be compacted

    def load(self) -> tuple[Snapshot | None, list[Renewal]]:
        """The last snapshot and the renewals after it; what cannot be read is set aside."""
        try:
            snapshot = self._load_snapshot()
        except (ValueError, KeyError, AttributeError, SafetensorError):
            self._set_aside(self.snapshot_path)
            self._set_aside(self.path)  # records after a snapshot mean nothing without it
            return None, []
        content = self.path.read_bytes() if self.path.exists() else b""
        if content[: len(self._header)] != self._header:
            self._set_aside(self.path)
            return snapshot, []
        base = snapshot.version if snapshot else 0
        renewals, end = [], len(self._header)
        for renewal, stop in _records(content, end):
            end = stop
            if renewal.version > base:
                renewals.append(renewal)
        os.truncate(self.path, end)  # a record cut short by a kill was never answered
        self._end = end
        return snapshot, renewals

    def append(self, renewal: Renewal) -> None:
        """Write one record and force it to disk."""
        if not self._end:
            self._start()
        record = _record(renewal)
        file = os.open(self.path, os.O_WRONLY)  # not kept open: a host may hold more clients than it may hold files
        try:
            os.lseek(file, self._end, os.SEEK_SET)
            if os.write(file, record) < len(record):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fdatasync(file)
            self._end += len(record)
        except OSError:  # half a record would hide every later one
            os.ftruncate(file, self._end)
            raise
        finally:
            os.close(file)

    @property
    def full(self) -> bool:
        """Whether it is time for a snapshot."""
        return self._end > self._kept + self.compact_bytes

    def compact(self, snapshot: Snapshot) -> bytes:
        """Put a snapshot in place, then start an empty journal. A kill in between leaves records that `load` skips.

        Where that fails the journal goes on as it is, and is full again after as many bytes more.
        """
        self._kept = self._end
        content = snapshot.to_bytes(self.fingerprint)
        fresh = self.snapshot_path.with_suffix(".partial")
        with fresh.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        _rename(fresh, self.snapshot_path)
        self._start()
        self._kept = 0
        return content

    def _start(self) -> None:
        fresh = self.path.with_suffix(".new")
        with fresh.open("wb") as file:
            file.write(self._header)
            file.flush()
            os.fsync(file.fileno())
        _rename(fresh, self.path)
        self._end = len(self._header)

    def _load_snapshot(self) -> Snapshot | None:
        if not self.snapshot_path.exists():
            return None
        return parse_snapshot(self.snapshot_path.read_bytes(), self.fingerprint)

    def _set_aside(self, path: Path) -> None:
        if path.exists():
            log.warning("%s cannot be read; it is kept as .damaged, and the FRL starts from its checkpoint", path)
            _rename(path, path.with_suffix(".damaged"))


def only_server(folder: Path, checkpoint: bytes) -> IO[bytes]:
    """Lock a checkpoint's journals while the file is open: two servers would overwrite each other's renewals."""
    name = hashlib.blake2b(checkpoint, digest_size=6).hexdigest()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / f"server-{name}.lock").open("ab")
    except OSError as error:
        raise ClusterError(f"{folder}: cannot be written ({error.strerror}); FRLs are to be kept there") from None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise ClusterError(
            f"{folder}: another server renews these FRLs; stop it, or set serve.renew_frl=false for this one"
        ) from None
    except OSError:  # a file system without locks: nobody can tell
        pass
    return file


def parse_snapshot(content: bytes, fingerprint: bytes) -> Snapshot | None:
    """A snapshot from its bytes; None where it belongs to another checkpoint."""
    size = int.from_bytes(content[:8], "little")
    facts = json.loads(content[8 : 8 + size]).get("__metadata__", {})
    if facts.get("checkpoint") != fingerprint.hex():
        return None
    tensors = safetensors.numpy.load(content)
    tickets = tuple(json.loads(facts.get("tickets", "[]")))
    return Snapshot(int(facts["version"]), tensors["prototypes"], tensors["importance"], tickets)


def _rename(path: Path, to: Path) -> None:
    """Rename a file for good: the new name is on disk before this returns."""
    path.rename(to)
    folder = os.open(to.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _record(renewal: Renewal) -> bytes:
    kind = b"d" if renewal.alpha_AM.dtype == np.float64 else b"f"
    rows, m = renewal.alpha_AM.shape
    written = kind.upper() if renewal.tickets else kind
    body = _BODY.pack(renewal.version, rows, m, renewal.psi_Ad.shape[1], written)
    body += np.asarray(renewal.tickets, dtype="<u8").tobytes()
    body += renewal.alpha_AM.astype(_FORMATS[kind]).tobytes() + renewal.psi_Ad.astype(_FORMATS[kind]).tobytes()
    return _FRAME.pack(len(body), zlib.crc32(body)) + body


def _records(content: bytes, start: int) -> Iterator[tuple[Renewal, int]]:
    """Whole records and where each ends; stops at the first torn one."""
    while start + _FRAME.size <= len(content):
        length, checksum = _FRAME.unpack_from(content, start)
        end = start + _FRAME.size + length
        body = content[start + _FRAME.size : end]
        if not _BODY.size <= length == len(body) or zlib.crc32(body) != checksum:
            return
        version, rows, m, d, kind = _BODY.unpack_from(body)
        known = rows if kind.isupper() else 0
        tickets = tuple(np.frombuffer(body, dtype="<u8", offset=_BODY.size, count=known).tolist())
        numbers = np.frombuffer(body, dtype=_FORMATS[kind.lower()], offset=_BODY.size + 8 * known)
        alpha_AM, psi_Ad = numbers[: rows * m].reshape(rows, m), numbers[rows * m :].reshape(rows, d)
        yield Renewal(version, alpha_AM, psi_Ad, tickets), end
        start = end
