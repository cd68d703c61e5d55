"""`airmoe status`: the experts of a running server."""

import itertools
from collections.abc import Iterable
from typing import Any

from rich.table import Table

from api.cli.common import JsonOption, print_json, stdout
from api.cli.remote.connection import HERE, KeyOption, UrlOption, call_json

_MOST_ROWS = 50  # of a table of experts; beyond it, neighbours in one actor share a row


def status(url: UrlOption = HERE, key: KeyOption = None, as_json: JsonOption = False) -> None:
    """Experts of a running server: what they know, node, GPUs, state, version, load, restarts, replicas."""
    body = call_json("GET", f"{url}/experts", key, has="experts")
    if as_json:
        print_json(body)
    else:
        print_experts(body["experts"])


def print_experts(experts: list[dict[str, Any]]) -> None:
    """Print a table of experts, as `/experts` lists them."""
    table = Table("expert", "state", "node", "GPUs", "version", "load", "restarts", "replicas")
    rows = [[e] for e in experts] if len(experts) <= _MOST_ROWS else _alike(experts)
    for row in rows:
        first, last = row[0], row[-1]
        name = str(first["id"]) if len(row) == 1 else f"{first['id']}-{last['id']}"
        gpus = ",".join(first["gpu_ids"]) or "-"
        load = f"{sum(e['load_ratio'] for e in row) / len(row):.2f}"
        versions, restarts, replicas = (_range(e[key] for e in row) for key in ("version", "restarts", "replicas"))
        table.add_row(name, first["state"], str(first["node"]), gpus, versions, load, restarts, replicas)
    stdout.print(table)
    processes = {e["pid"] for e in experts} - {None}
    if len(processes) < len(experts):
        stdout.print(f"{len(experts)} experts in {len(processes)} actors", highlight=False)
    if known := [f"{e['id']} {e['knows']}" for e in experts[:_MOST_ROWS] if e.get("knows")]:
        # below, not beside: with words in it the table would not fit 80 columns
        stdout.print(f"What they know: {', '.join(known)}", highlight=False, markup=False)


def _alike(experts: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Group neighbours that are in the same actor and state."""
    return [list(row) for _, row in itertools.groupby(experts, lambda e: (e["pid"], e["node"], e["state"]))]


def _range(values: Iterable[int]) -> str:
    found = sorted(values)
    low, high = found[0], found[-1]
    return str(low) if low == high else f"{low}-{high}"
