"""The admin token and the file in which `airmoe scale` finds it; imports nothing heavy, so that this starts at once."""

import json
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from airmoe_ray.config import Config
from airmoe_ray.errors import UserError


@contextmanager
def admin_token(state: Path, config: Config, host: str, port: int) -> Iterator[str]:
    """Give the admin token; while it is in use, a file that only the owner can read holds it and the address."""
    token = config.serve.admin_token or secrets.token_urlsafe(32)
    state.mkdir(parents=True, exist_ok=True)
    path = state / f"server-{port}.json"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.fchmod(descriptor, 0o600)  # also where an old file was there
    with os.fdopen(descriptor, "w") as file:
        json.dump({"host": host, "port": port, "admin_token": token, "pid": os.getpid()}, file)
    try:
        yield token
    finally:
        path.unlink(missing_ok=True)


def read_admin_token(state: Path, port: int) -> str:
    """Read the admin token of the server on this port that keeps its files in this folder."""
    path = state / f"server-{port}.json"
    try:
        return str(json.loads(path.read_text())["admin_token"])
    except (OSError, ValueError, KeyError):
        raise UserError(
            f"{path}: no server of this run is known on port {port}; give --run and --url of the running one, or "
            "--admin-token"
        ) from None
