"""`airmoe cache`: lists the cached features, and removes some of them."""

import re
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Column, Table

from airmoe_ray.config_file import load_config
from airmoe_ray.errors import UserError
from airmoe_ray.features.cache_folder import Entry, entries, remove
from api.cli.common import ConfigOption, JsonOption, SetOption, print_json, stdout

_SECONDS = {"h": 3600, "d": 86400, "w": 7 * 86400}


def cache(
    config: ConfigOption = None,
    overrides: SetOption = [],  # noqa: B006  typer copies it
    prune: Annotated[bool, typer.Option("--prune", help="Remove what the options below choose.")] = False,
    older_than: Annotated[
        str | None, typer.Option(metavar="AGE", help="Not used for this long, such as 12h, 30d or 2w.")
    ] = None,
    partial: Annotated[
        bool, typer.Option("--partial", help="Not complete, of another version, or left behind by a crash.")
    ] = False,
    everything: Annotated[bool, typer.Option("--all", help="Everything that no running process uses.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    as_json: JsonOption = False,
) -> None:
    """List the cached features in `data.cache_dir`, or remove some of them; what a process uses stays."""
    root = Path(load_config(config, overrides).data.cache_dir).expanduser()
    age_s = _age(older_than)
    if not prune and (age_s is not None or partial or everything or yes):
        raise UserError("--older-than, --partial, --all and --yes choose what --prune removes; add --prune")
    if prune and everything == (partial or age_s is not None):
        raise UserError("--prune wants either --all, or --older-than AGE, --partial or both of these; say which")
    found = entries(root)
    if not prune:
        _show(root, found, as_json)
        return
    chosen = [
        entry
        for entry in found
        if (age_s is None or time.time() - entry.used_at > age_s) and (not partial or entry.state != "complete")
    ]
    if not yes and chosen:
        _confirm(root, chosen)
    _report([(entry, remove(entry.folder)) for entry in chosen], as_json)


def _age(text: str | None) -> float | None:
    if text is None:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([hdw])", text)
    if match is None:
        raise UserError(f"--older-than {text}: expected a number of hours, days or weeks, such as 12h, 30d or 2w")
    return float(match[1]) * _SECONDS[match[2]]


def _confirm(root: Path, chosen: list[Entry]) -> None:
    what = f"{len(chosen)} of the caches in {root}, {_megabytes(sum(entry.bytes for entry in chosen))}"
    if not sys.stdin.isatty():
        raise UserError(f"--prune would remove {what}; nobody is there to ask, so add --yes")
    if not typer.confirm(f"Remove {what}?", err=True):
        raise typer.Exit(1)


def _report(outcome: list[tuple[Entry, bool]], as_json: bool) -> None:
    removed = [entry for entry, gone in outcome if gone]
    kept = [entry for entry, gone in outcome if not gone]
    freed = sum(entry.bytes for entry in removed)
    if as_json:
        print_json({"removed": [_row(e) for e in removed], "in_use": [_row(e) for e in kept], "bytes": freed})
        return
    stdout.print(f"removed {len(removed)}, {_megabytes(freed)} freed", markup=False)
    for entry in kept:
        stdout.print(f"kept {entry.folder}: a running process uses it", markup=False)


def _show(root: Path, found: list[Entry], as_json: bool) -> None:
    if as_json:
        print_json([_row(entry) for entry in found])
        return
    if not found:
        stdout.print(f"{root}: no cached features", markup=False)
        return
    table = Table(Column("dataset", overflow="fold"), box=None)
    for title in ("view", "size", "backbone", "images", "MB", "last used", "state"):
        table.add_column(title, no_wrap=True)
    for entry in found:
        about, done = entry.about, f"{entry.images}"
        facts = ["?"] * 4
        if about is not None:
            dataset = about.dataset if about.root is None else f"{about.dataset} {about.root}"
            facts = [escape(dataset), about.view, f"{about.image_size}", escape(about.backbone)]
            done += "" if entry.state == "complete" else f" of {about.images}"
        used = time.strftime("%Y-%m-%d", time.localtime(entry.used_at))
        state = entry.state + (", in use" if entry.in_use else "")
        table.add_row(*facts, done, f"{entry.bytes / 1e6:.1f}", used, state)
    stdout.print(table)
    stdout.print(f"{len(found)} in {root}, {_megabytes(sum(entry.bytes for entry in found))}", markup=False)


def _row(entry: Entry) -> dict[str, Any]:
    about = entry.about
    return {
        "folder": str(entry.folder),
        "state": entry.state,
        "in_use": entry.in_use,
        "dataset": about and about.dataset,
        "root": about and about.root,
        "view": about and about.view,
        "image_size": about and about.image_size,
        "backbone": about and about.backbone,
        "dtype": about and about.dtype,
        "images": about and about.images,
        "images_done": entry.images,
        "bytes": entry.bytes,
        "used_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(entry.used_at)),
    }


def _megabytes(size: int) -> str:
    return f"{size / 1e6:.1f} MB"
