"""Records: what one run of one method gave, as a JSON file that later comparisons take as done.

A record is found by method, seed and the hash of its settings; the commit it was made at is kept with it and named in
tables. Suffixes: S samples, C classes.
"""

import base64
import contextlib
import hashlib
import inspect
import json
import os
import re
import subprocess
import sys
import zlib
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from airmoe_ray.config import Config
from airmoe_ray.errors import UserError
from airmoe_ray.runtime.imports import load_class

# what may differ without the result being another: machine, operator and places
_NOT_HASHED: dict[str, set[str]] = {
    "data": {"root", "cache_dir"},
    "train": {
        "threads",
        "device",
        "engine",
        "tensorboard",
        "group_timeout_s",
        "client_deadline_s",
        "checkpoint_every",
        "check_constraints",
    },
}
FORMAT = 1
_OURS = "airmoe_ray"


def told_settings(config: Config) -> dict[str, Any]:
    """What a configuration sets apart from defaults, the seed, and what does not touch the result."""
    tree = config.model_dump(mode="json", exclude_defaults=True, exclude={"seed", "serve", "cluster"})
    for block, keys in _NOT_HASHED.items():
        if block in tree:
            tree[block] = {key: value for key, value in tree[block].items() if key not in keys}
    for part in tree.get("data", {}).get("parts", ()):
        part.pop("root", None)
    return {key: value for key, value in tree.items() if value != {}}


def settings_hash(config: Config) -> str:
    """Twelve hexadecimal digits; new settings with defaults do not change it, code of one's own does."""
    told = told_settings(config)
    if sources := own_sources(config):
        told["sources"] = sources
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:12]


def own_sources(config: Config) -> dict[str, str]:
    """Hashes of the modules whose classes a configuration names, but for this package's, which the commit names."""
    found = {}
    for key, path in (("routing.rule", config.routing.rule), ("model", config.model)):
        if ":" in path and not path.startswith(f"{_OURS}."):
            module = sys.modules[load_class(path, object, key).__module__]
            with contextlib.suppress(OSError, TypeError):  # made by hand, without a file: then its name has to do
                found[key] = hashlib.sha256(inspect.getsource(module).encode()).hexdigest()[:12]
    return found


@dataclass(frozen=True)
class Record:
    """One method, one seed, one split."""

    method: str
    seed: int
    settings: str  # the hash
    commit: str
    label: str
    group: str
    told: dict[str, Any]  # settings apart from defaults
    held_out: list[str]  # sequences, where whole ones are left out
    data: dict[str, Any]  # name, split, images, train_images, classes; sequences: images in a row of one domain
    size: dict[str, float]  # parameters: trained, active, frozen; flops per image
    seconds: dict[str, float]
    curve: list[dict[str, float]]  # per epoch: miou, mf1 and their ideal ones
    scores: dict[str, dict[str, Any]]  # by channel: ideal, air
    per_image: dict[str, str]  # by channel, packed
    versions: dict[str, str] = field(default_factory=dict)
    prototypes: dict[str, float] = field(default_factory=dict)  # norm: the mean of ||p_jk||, where there are FRLs
    made: str = ""  # when, UTC; empty in older records
    format: int = FORMAT

    @property
    def key(self) -> tuple[str, int, str]:
        """What makes a run the same run."""
        return self.method, self.seed, self.settings

    @property
    def file_name(self) -> str:
        """Readable, unique, and safe in any file system."""
        method = re.sub(r"[^A-Za-z0-9.+-]", "_", self.method)
        return f"{method}.seed{self.seed}.{self.settings}.{self.commit[:8]}.json"

    @property
    def sequences(self) -> list[int]:
        """How many images in a row are of one drive; older records do not tell, and stand for one."""
        return list(self.data.get("sequences") or [self.data["images"]])

    def counts(self, channel: str) -> NDArray[np.int64]:
        """Pixels (S, 3, C) of every image: hit, of the truth, predicted."""
        return unpack(self.per_image[channel])


def pack(counts_S3C: NDArray[np.int64]) -> str:
    """Counts as text: shape, then compressed numbers."""
    shape = "x".join(map(str, counts_S3C.shape))
    packed = zlib.compress(counts_S3C.astype("<i8").astype("<u4").tobytes(), 9)
    return f"{shape}:{base64.b85encode(packed).decode()}"


def unpack(text: str) -> NDArray[np.int64]:
    """What was packed."""
    shape, _, body = text.partition(":")
    numbers = np.frombuffer(zlib.decompress(base64.b85decode(body)), "<u4")
    return numbers.reshape([int(size) for size in shape.split("x")]).astype(np.int64)


def write_record(folder: Path, record: Record) -> Path:
    """One file, whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / record.file_name
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(asdict(record), indent=1) + "\n")
    os.replace(partial, path)
    return path


def read_records(*folders: Path) -> dict[tuple[str, int, str], Record]:
    """All records below some folders by their key; where a run was made several times, the one made last.

    When is what the record says: files get new times whenever a folder is copied or checked out.
    """
    paths = sorted(path for folder in folders if folder.is_dir() for path in folder.rglob("*.seed*.json"))
    records = sorted((read_record(path) for path in paths), key=lambda record: record.made)
    return {record.key: record for record in records}


def read_record(path: Path) -> Record:
    """One record, or one line about what is wrong with it."""
    try:
        stored = json.loads(path.read_text())
        if stored["format"] > FORMAT:
            raise UserError(f"{path}: a record of format {stored['format']}, this version reads {FORMAT}; update")
        return Record(**stored)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path}: not a record of a comparison ({error}); remove it") from None


def current_commit() -> str:
    """The commit of the code that runs, with `+` where files differ from it; `unknown` outside a checkout."""
    try:
        commit, changes = (_git(*arguments) for arguments in (("rev-parse", "HEAD"), ("status", "--porcelain", "-uno")))
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return f"{commit[:8]}{'+' if changes else ''}"


def _git(*arguments: str) -> str:
    where = Path(__file__).parent
    asked = subprocess.run(["git", *arguments], cwd=where, capture_output=True, text=True, check=True, timeout=10)
    return asked.stdout.strip()
