"""Folders written beside their place and then put there: a kill leaves the old one or the new one, never half."""

import os
import shutil
from pathlib import Path


def write_file(path: Path, content: bytes) -> None:
    """Write a file and force it to disk."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Force the names in a folder to disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def swap(fresh: Path, folder: Path) -> None:
    """Put `fresh` in the place of `folder` by two renames; between them `recover` knows what to do."""
    ready, old = folder.with_name(folder.name + ".ready"), folder.with_name(folder.name + ".old")
    fresh.rename(ready)
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    ready.rename(folder)
    sync_folder(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def recover(folder: Path) -> None:
    """Finish a swap that a kill cut short: the complete new checkpoint is waiting beside the empty place."""
    ready = folder.with_name(folder.name + ".ready")
    if ready.exists():
        if not folder.exists():
            ready.rename(folder)
        else:
            shutil.rmtree(ready)
