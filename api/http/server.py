"""Starts the system and a listening server, and ends both."""

import asyncio
import logging
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import uvicorn

from actors.cluster.connection import cluster
from actors.cluster.connection import nodes as joined
from actors.serving.supervisor import Supervisor
from actors.serving.system import System
from airmoe_ray.config import Config
from airmoe_ray.errors import UserError
from api.http.admin import admin_token
from api.http.app import create_app
from api.http.middleware.front_door import is_loopback
from api.http.service import Service

log = logging.getLogger("airmoe")
Progress = Callable[[int, int], None]
_DRAIN_S = 20  # how long open requests may take after SIGTERM


def check_bind(config: Config, host: str, port: int) -> None:
    """Refuse what would be unsafe or cannot work, before anything starts."""
    if not is_loopback(host) and not config.serve.api_keys:
        raise UserError(
            f"--host {host}: reachable from other machines, and no key is set; put one into AIRMOE_API_KEY, or bind to "
            "127.0.0.1"
        )
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except OSError as error:
        reason = error.strerror or str(error)
        raise UserError(f"{host}:{port} cannot be used ({reason}); give another one with --port or --host") from None


def serve(
    system: System,
    state: Path,
    host: str,
    port: int,
    *,
    address: str | None = None,
    nodes: int = 1,
    progress: Progress | None = None,
    announce: Callable[[], None] = lambda: None,
) -> None:
    """Serve until SIGINT or SIGTERM; blocks. `state` is the folder for the server's own files.

    `nodes`: how many must have joined before experts are placed, so that they are spread over all of them.
    """
    torch.set_num_threads(1)  # masks are made on threads beside each other; the cores belong to the actors
    with cluster(address):
        # Ray's own handler prints a stack trace; uvicorn drains first, then raises the signal again for this one
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        try:
            _await_nodes(nodes, system.config.cluster.start_deadline_s)
            # a cluster of our own never grows; one that was joined may have an autoscaler
            hosts = system.start(progress, wait_s=system.config.cluster.autoscale_wait_s if address else 0.0)
            with admin_token(state, system.config, host, port) as token:
                announce()
                with asyncio.Runner(loop_factory=uvicorn.Config("").get_loop_factory()) as loop:  # uvloop, where it is
                    loop.run(_serve(system, hosts, token, host, port))
        finally:
            system.stop()


def _await_nodes(wanted: int, deadline_s: float) -> None:
    """Wait until this many nodes have joined; at the deadline, warn and go on with those that have."""
    until = time.monotonic() + deadline_s
    while (here := len(joined())) < wanted:
        if time.monotonic() > until:
            log.warning("%d of %d nodes have joined within %g s; going on with these", here, wanted, deadline_s)
            return
        time.sleep(0.5)


async def _serve(system: System, hosts: dict, token: str, host: str, port: int) -> None:  # type: ignore[type-arg]
    service = Service(system, Supervisor(system, hosts))
    settings = uvicorn.Config(
        create_app(service, admin_token=token, host=host),
        host=host,
        port=port,
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=_DRAIN_S,
        timeout_keep_alive=30,
    )
    await uvicorn.Server(settings).serve()


def set_up_logging() -> None:
    """Send warnings of our own to stderr, one line each."""
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)
