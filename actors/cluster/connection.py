"""Connects to a Ray cluster: one of our own on loopback, or one that is already running."""

import contextlib
import itertools
import logging
import os
import secrets
import signal
import socket
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil  # comes with ray
import ray
from ray._private import ray_constants
from ray._private import utils as ray_utils
from ray._private.state import available_resources_per_node
from ray._private.utils import read_ray_address
from ray._raylet import AuthenticationTokenLoader, Config, GcsClient  # type: ignore[attr-defined]
from ray.exceptions import AuthenticationError, RayError

from actors.cluster.placement import Node
from actors.errors import ClusterError

_STORE_BYTES = 1 << 30  # object store of a cluster of our own: a few batches of features
_CONNECT_S = 5.0
_KEYS = ("AIRMOE_API_KEY", "AIRMOE_ADMIN_TOKEN")  # of the front end; whoever connects has read them before
_NO_PLACES = {"CPU", "GPU", "memory", "object_store_memory", "node:__internal_head__"}  # nothing to pin a client to


@contextlib.contextmanager
def cluster(address: str | None = None, *, cpus: int | None = None, gpus: int | None = None) -> Iterator[None]:
    """Connect for the duration of the block: to `address` (`auto`, `host:port`), or to a cluster started here.

    A cluster of our own listens on loopback only, asks for a token, and ends with the block.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        with _our_sigterm(), _our_keys(), _our_name():
            if address is None:
                _start(cpus, gpus)
            else:
                _attach(address)
        yield
    finally:
        workers = _workers() if address is None else []
        ray.shutdown()
        _, alive = psutil.wait_procs(workers, timeout=_CONNECT_S)
        for process in alive:  # an actor busy with its own threads may outlive its raylet
            with contextlib.suppress(psutil.Error):
                process.kill()


@contextlib.contextmanager
def _our_sigterm() -> Iterator[None]:
    """Keep a handler of ours: Ray puts its own in place, which ends the process with a stack trace."""
    ours = signal.getsignal(signal.SIGTERM)
    yield
    if callable(ours) and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, ours)


@contextlib.contextmanager
def _our_keys() -> Iterator[None]:
    """Keep keys out of the environment meanwhile: the processes that Ray starts inherit it, and actors theirs."""
    ours = {name: os.environ.pop(name) for name in _KEYS if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(ours)


@contextlib.contextmanager
def _our_name() -> Iterator[None]:
    """Give Ray program and verb for its list of jobs, which every node keeps; it takes the whole line, keys and all."""
    name, theirs = _program(sys.argv), ray_utils.get_entrypoint_name
    ray_utils.get_entrypoint_name = lambda: name
    try:
        yield
    finally:
        ray_utils.get_entrypoint_name = theirs


def _program(arguments: Sequence[str]) -> str:
    verbs = itertools.takewhile(str.isalpha, arguments[1:2])
    return " ".join([Path(arguments[0]).name, *verbs]) if arguments else "unknown"


def nodes() -> list[Node]:
    """What every node that is alive has."""
    free = available_resources_per_node()  # type: ignore[no-untyped-call]
    return [_node(node, free.get(node["NodeID"], {})) for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]


def _node(node: dict[str, Any], free: dict[str, float]) -> Node:
    found = node["Resources"]
    return Node(
        cpus=found.get("CPU", 0.0),
        gpus=found.get("GPU", 0.0),
        resources=frozenset(found.keys() - _NO_PLACES),
        labels=dict(node.get("Labels") or {}),
        free_cpus=free.get("CPU", 0.0),
        free_gpus=free.get("GPU", 0.0),
    )


def node_ip() -> str:
    """Address of the node this process runs on."""
    return str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]


def _start(cpus: int | None, gpus: int | None) -> None:
    if not {"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"} & os.environ.keys():
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    os.environ.setdefault("RAY_worker_niceness", "0")  # actors are the work here, not the background
    # an image goes with the call instead of through the object store, which saves it two milliseconds
    os.environ.setdefault("RAY_max_direct_call_object_size", "1000000")
    # nobody looks at Ray's own dashboard here, and its bookkeeping takes time from every call
    os.environ.setdefault("RAY_task_events_report_interval_ms", "0")
    os.environ.setdefault("RAY_enable_metrics_collection", "0")
    # a call to a dead actor fails at once; Ray would wait one to two seconds for the reason of its death
    os.environ.setdefault("RAY_timeout_ms_task_wait_for_death_info", "0")
    _read_environment(loopback=True)
    before = set(psutil.Process().children())
    try:
        ray.init(
            address="local",
            num_cpus=cpus,
            num_gpus=gpus,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            object_store_memory=_STORE_BYTES,
        )
    except BaseException as error:
        _end(set(psutil.Process().children()) - before)
        if not isinstance(error, Exception):
            raise
        reason = (str(error) or type(error).__name__).splitlines()[0][:160]
        raise ClusterError(
            f"no Ray cluster could be started here ({reason}); the machine may be short of memory or CPU"
        ) from error


def _workers() -> list[psutil.Process]:
    """Processes of the actors of a cluster started here: what its raylet has started."""
    with contextlib.suppress(psutil.Error):
        raylets = [child for child in psutil.Process().children() if child.name() == "raylet"]
        return [process for raylet in raylets for process in _tree(raylet)]
    return []


def _end(children: set[psutil.Process]) -> None:
    """End half a cluster: a raylet that is killed while it starts would leave its agents behind for good."""
    found: set[psutil.Process] = set()
    while new := {p for child in children for p in [child, *_tree(child)]} - found:
        for process in new:
            with contextlib.suppress(psutil.Error):
                process.suspend()  # so that nobody starts more while we look
        found |= new
    for process in found:
        with contextlib.suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(children, timeout=_CONNECT_S)


def _tree(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children(recursive=True)
    except psutil.Error:
        return []


def _attach(address: str) -> None:
    if address.startswith("ray://"):
        raise ClusterError(
            f"--address {address}: client mode is too slow for tensors; run this on a node of the cluster with "
            "--address auto"
        )
    found = address if address != "auto" else os.environ.get("RAY_ADDRESS") or read_ray_address()
    if not found:
        raise ClusterError(
            "--address auto: no Ray cluster runs on this machine; start one with `ray start --head`, or leave "
            "--address out"
        )
    _check_reachable(found)
    _read_environment(loopback=found.startswith(("127.", "localhost:")))
    try:
        _check_token(found)
        ray.init(address=found, log_to_driver=False, logging_level=logging.ERROR)
    except AuthenticationError:
        raise ClusterError(
            f"--address {address}: the cluster refuses our token; put the cluster's own into RAY_AUTH_TOKEN or "
            "~/.ray/auth_token (`ray get-auth-token` prints it on the head node)"
        ) from None
    except (ConnectionError, RuntimeError, TimeoutError, RayError) as error:
        reason = str(error).splitlines()[0][:160]
        raise ClusterError(
            f"--address {address}: no Ray cluster to join ({reason}); start one with `ray start --head`, or leave "
            "--address out"
        ) from None


def _check_token(address: str) -> None:
    """Make a first call, which refuses a wrong token at once; ray.init would try for 20 s and then not say so."""
    outcome: list[BaseException | None] = []

    def call() -> None:
        try:
            GcsClient(address=address)
            outcome.append(None)
        except Exception as error:
            outcome.append(error)

    thread = threading.Thread(target=call, daemon=True)  # to a port that only listens it would go on for minutes
    thread.start()
    thread.join(2 * _CONNECT_S)
    if not outcome:
        raise TimeoutError("what listens there does not speak Ray's protocol")
    if outcome[0] is not None:
        raise outcome[0]


def _read_environment(*, loopback: bool) -> None:
    """Make Ray read the environment again, as it did when it was imported, with a token switched on if there is one."""
    if {"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"} & os.environ.keys() or Path("~/.ray/auth_token").expanduser().exists():
        os.environ.setdefault("RAY_AUTH_MODE", "token")
    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()
    # the switch that makes Ray live on 127.0.0.1; otherwise it takes that for this machine's outward address
    ray_constants.ENABLE_RAY_CLUSTER = not loopback


def _check_reachable(address: str) -> None:
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 1 << 16:
        raise ClusterError(f"--address {address}: expected auto or host:port, such as 10.0.0.1:6379")
    try:
        socket.create_connection((host, int(port)), timeout=_CONNECT_S).close()
    except OSError as error:
        reason = error.strerror or str(error)
        raise ClusterError(
            f"--address {address}: nothing answers there ({reason}); check the head node's address and that its port "
            "is open, or leave --address out to start a cluster here"
        ) from None
