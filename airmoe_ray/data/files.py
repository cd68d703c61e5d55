"""What the file-based datasets share: finding image/label pairs, decoding them, mapping ids to classes."""

import hashlib
import os
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

from airmoe_ray.data.base import IGNORE, ClassTable, Sample, UInt8Array
from airmoe_ray.errors import ConfigError, DataError, MissingFolderError

SPLITS = ("train", "val", "test", "all")
IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".tif", ".tiff")

# `index`: an 8-bit greyscale or palette PNG whose values are the ids. `red`: CARLA's cameras write the id there.
Channel = Literal["index", "red"]

_DECODE_ERRORS = (OSError, SyntaxError, ValueError, EOFError, struct.error, Image.DecompressionBombError)
_UNKNOWN = -1


@dataclass(frozen=True)
class Pair:
    """An image file and its label file."""

    image: Path
    label: Path
    name: str  # unique within the dataset
    domain: str
    sequence: str  # frames of one video look alike, so a held-out block is cut per sequence


class PairDataset:
    """A `SegmentationDataset` over image/label files; a reader's own work is to find the pairs and name the ids."""

    def __init__(
        self,
        root: Path,
        pairs: list[Pair],
        *,
        split: str,
        val_fraction: float,
        classes: ClassTable,
        ids: Mapping[int, int],
        channel: Channel = "index",
        advice: str | None = None,
    ) -> None:
        """`ids` maps every id that a label file may hold to its class, or to IGNORE; `advice` is about other ids."""
        _check_pairs(root, pairs, split)
        self.classes = classes
        self.domains = tuple(sorted({pair.domain for pair in pairs}))
        self._root = root
        self.pairs = pairs
        self._settings: tuple[object, ...] = (type(self).__name__, split, val_fraction, classes.names, channel)
        self._table = id_table(ids)
        self._channel, self._advice = channel, advice
        index = {domain: i for i, domain in enumerate(self.domains)}
        self._domain_of = [index[pair.domain] for pair in pairs]

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> Sample:
        pair = self.pairs[index]
        image = read_rgb(pair.image)
        label = self.read_label(pair.label)
        if image.shape[:2] != label.shape:
            (h, w), (label_h, label_w) = image.shape[:2], label.shape
            raise DataError(
                f"{pair.label}: label is {label_w}x{label_h} but image {pair.image.name} is {w}x{h};"
                " both must have the same size, so label this very image"
            )
        return Sample(image=image, label=label, domain=self._domain_of[index], name=pair.name)

    def read_label(self, path: Path) -> UInt8Array:
        """Class ids of a label file."""
        return map_ids(read_ids(path, channel=self._channel), self._table, path=path, advice=self._advice)

    def domain_of(self, index: int) -> int:
        return self._domain_of[index]

    def fingerprint(self) -> str:
        digest = hashlib.sha256(repr(self._settings).encode())
        for pair in self.pairs:
            for path in (pair.image, pair.label):
                stat = path.stat()
                line = f"{path.relative_to(self._root).as_posix()}|{stat.st_size}|{stat.st_mtime_ns}|{pair.domain}\n"
                digest.update(line.encode())
        return digest.hexdigest()


def check_split(split: str, val_fraction: float) -> None:
    """ConfigError unless both are what every reader accepts."""
    if split not in SPLITS:
        raise ConfigError(f"split {split!r}: expected one of {', '.join(SPLITS)}")
    if not 0 <= val_fraction < 1:
        raise ConfigError(f"val_fraction {val_fraction}: expected at least 0 and below 1; 0.2 holds out a fifth")


def require_folder(folder: Path, *, expected: str) -> Path:
    """The folder itself; DataError that says what was `expected` in it when there is none."""
    if not folder.is_dir():
        raise MissingFolderError(
            f"{folder}: no such folder; expected {expected} there: check data.root or fetch the dataset"
        )
    return folder


def list_images(folder: Path) -> list[Path]:
    """Image files at any depth, in name order; hidden ones (`._x.jpg` of macOS archives) are not images."""
    found = (p for p in _files_below(folder) if p.suffix.lower() in IMAGE_SUFFIXES and not p.name.startswith("."))
    return sorted(found, key=lambda path: path.relative_to(folder).parts)


def _files_below(folder: Path, above: tuple[str, ...] = ()) -> Iterator[Path]:
    """Files at any depth, also behind links to folders: a link to a folder that it lies in is not gone into again."""
    here = os.path.realpath(folder)
    if here in above:
        return
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir():
                yield from _files_below(folder / entry.name, (*above, here))
            else:
                yield folder / entry.name


def pair_folders(
    images: Path, labels: Path, *, domain: Callable[[Path], str] | None = None, prefix: tuple[str, ...] = ()
) -> list[Pair]:
    """Pairs `images/**/x.jpg` with `labels/**/x.png`.

    The domain, which is also the sequence, is the first sub-folder unless `domain` derives it from the image path.
    `prefix` keeps names apart when several such folders make one dataset.
    """
    require_folder(images, expected="the images")
    require_folder(labels, expected=f"the PNG labels of the images in {images}")
    pairs = []
    for image in list_images(images):
        inner = image.relative_to(images).parent
        where = domain(image) if domain else (*inner.parts, "all")[0]
        name = "_".join((*prefix, *inner.parts, image.stem))
        pairs.append(Pair(image, labels / inner / f"{image.stem}.png", name, domain=where, sequence=where))
    return pairs


def split_folder(root: Path, split: str, *, expected: str) -> Path:
    """`root/split`; sets cut in two call the second part `val` or `test`, so either stands in for the other."""
    other = {"val": "test", "test": "val"}.get(split, split)
    if not (root / split).is_dir() and (root / other).is_dir():
        return root / other
    return require_folder(root / split, expected=expected)


def hold_out(pairs: Iterable[Pair], *, split: str, val_fraction: float) -> list[Pair]:
    """The split of a set that has none of its own; without a `val_fraction` every split is the whole set.

    Neighbouring video frames are near copies, so random frames would leak from training into validation. The end of
    each sequence is held out instead: one block, hence one seam per sequence.
    """
    sequences: dict[str, list[Pair]] = {}
    for pair in pairs:
        sequences.setdefault(pair.sequence, []).append(pair)
    if split == "all" or val_fraction == 0:
        return [pair for frames in sequences.values() for pair in frames]
    kept: list[Pair] = []
    for frames in sequences.values():
        # At least one frame on each side of the seam; a sequence of a single frame is all training.
        held = min(max(round(val_fraction * len(frames)), 1), len(frames) - 1)
        seam = len(frames) - held
        kept += frames[:seam] if split == "train" else frames[seam:]
    return kept


def id_table(ids: Mapping[int, int]) -> NDArray[np.int16]:
    """Lookup table over all 8-bit ids; ids that the dataset does not define are marked, not guessed."""
    table = np.full(256, _UNKNOWN, dtype=np.int16)
    table[list(ids)] = list(ids.values())
    return table


def class_ids(classes: int) -> dict[int, int]:
    """Labels that hold class ids already: 0..C-1, and IGNORE."""
    return {**{i: i for i in range(classes)}, IGNORE: IGNORE}


def map_ids(ids: UInt8Array, table: NDArray[np.int16], *, path: Path, advice: str | None = None) -> UInt8Array:
    """Class of every pixel by `table`.

    `path` is the label file, for the message about ids that it should not hold, `advice` what to do about those.
    """
    label = table[ids]
    if (label == _UNKNOWN).any():
        found = _ranges(np.unique(ids[label == _UNKNOWN]).tolist())
        allowed = _ranges(np.flatnonzero(table != _UNKNOWN).tolist())
        raise DataError(
            f"{path}: label ids {found} are unknown, expected {allowed};"
            f" {advice or 'check that the label belongs to this dataset and holds ids, not colours'}"
        )
    return label.astype(np.uint8)


def read_rgb(path: Path) -> UInt8Array:
    """(H, W, 3) pixels."""
    image = decode(path, "an image")
    if image.mode.startswith(("I", "F")):  # converting would clip at 255 and so look almost right
        raise DataError(f"{path}: image of mode {image.mode}, expected 8 bits per channel; convert it first")
    return np.array(image.convert("RGB"))


def read_ids(path: Path, *, channel: Channel = "index") -> UInt8Array:
    """(H, W) ids as stored in the label file."""
    image = decode(path, "a label")
    modes = ("L", "P") if channel == "index" else ("L", "P", "RGB", "RGBA")
    if image.mode not in modes:
        raise DataError(
            f"{path}: label of mode {image.mode}, expected {' or '.join(modes)} (8 bits per pixel);"
            " save the class ids as an 8-bit greyscale PNG"
        )
    pixels: UInt8Array = np.array(image)
    return pixels if pixels.ndim == 2 else pixels[..., 0]


def decode(path: Path, what: str) -> Image.Image:
    """The decoded picture, upright: a camera's EXIF orientation is applied."""
    try:
        with Image.open(path) as file:
            return ImageOps.exif_transpose(file)
    except _DECODE_ERRORS as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise DataError(f"{path}: cannot be read as {what} ({reason}); replace the file") from error


def _check_pairs(root: Path, pairs: list[Pair], split: str) -> None:
    if not pairs:
        raise DataError(
            f"{root}: split {split!r} has no images, expected {' '.join(IMAGE_SUFFIXES)} files;"
            " check data.root and data.val_fraction"
        )
    missing = [pair for pair in pairs if not pair.label.is_file()]
    if missing:
        raise DataError(
            f"{missing[0].label}: missing; expected the label of {missing[0].image} there"
            f" ({len(missing)} of {len(pairs)} images have none): add it or remove the image"
        )
    seen: dict[str, Path] = {}
    for pair in pairs:
        if pair.name in seen:
            raise DataError(f"{pair.image}: same name {pair.name!r} as {seen[pair.name]}; rename or remove one of them")
        seen[pair.name] = pair.image


def _ranges(ids: list[int]) -> str:
    """`0..11, 255` for 0, 1, ..., 11, 255."""
    runs: list[list[int]] = []
    for i in ids:
        if runs and i == runs[-1][-1] + 1:
            runs[-1].append(i)
        else:
            runs.append([i])
    return ", ".join(f"{run[0]}..{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
