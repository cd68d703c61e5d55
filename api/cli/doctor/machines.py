"""Checks every machine that a cluster file names: enters them at the same time, looks once, and judges what it saw."""

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from actors.cluster.placement import Node
from airmoe_ray.config import Config
from api.cli.doctor import machine_checks
from api.cli.doctor.cluster_file import ClusterFile
from api.cli.doctor.placement import fit
from api.cli.doctor.results import CheckResult, run_check
from api.cli.doctor.ssh import Login, Machine, enter, look


def check_machines(file: ClusterFile, settings: Config | None, *, with_dataset: bool) -> list[CheckResult]:
    """Results of all machines, the head's first; at the end, whether the experts fit on all of them together."""
    auth = file.tree["auth"]
    key = auth.get("ssh_private_key")
    login = Login(auth["ssh_user"], os.path.expanduser(key) if key else None, auth.get("ssh_proxy_command"))
    seen: dict[str, Machine] = {}

    def visit(host: str) -> list[CheckResult]:
        folders = _folders_needed(file, settings, is_head=host == file.hosts[0], with_dataset=with_dataset)
        return _visit(file, login, host, reachable, folders, seen)

    with ThreadPoolExecutor(len(file.hosts)) as pool:
        entered = list(pool.map(lambda host: run_check(f"{host} ssh", lambda: enter(login, host)), file.hosts))
        reachable = [host for host, result in zip(file.hosts, entered, strict=True) if result.ok]
        visited = list(pool.map(visit, reachable))
    results = [*entered, *(result for each in visited for result in each)]
    if len(seen) == len(file.hosts) and settings is not None:
        results.append(run_check("placement", lambda: _placement(settings, list(seen.values()))))
    return results


def _visit(
    file: ClusterFile,
    login: Login,
    host: str,
    reachable: list[str],
    folders: dict[str, str],
    seen: dict[str, Machine],
) -> list[CheckResult]:
    """Look at one machine, put it into `seen`, and check it; if looking fails, that is the one result."""
    is_head = host == file.hosts[0]
    peers = [peer for peer in reachable if peer != host and (is_head or peer == file.hosts[0])]

    def hardware() -> str:
        seen[host] = look(login, host, bin=file.bin, folders=list(folders), peers=peers, now=time.time())
        return machine_checks.hardware(seen[host])

    results = [run_check(f"{host} machine", hardware)]
    if host not in seen:
        return results
    machine = seen[host]
    checks: dict[str, Callable[[], str]] = {
        "versions": lambda: machine_checks.versions(machine, file.bin),
        "token": lambda: machine_checks.same_token(machine, file),
        "network": lambda: machine_checks.network(machine, peers),
    }
    if is_head:
        checks["ports"] = lambda: machine_checks.ports(machine, file)
    if folders:
        checks["folders"] = lambda: machine_checks.folders(machine, folders)
    return results + [run_check(f"{host} {name}", check) for name, check in checks.items()]


def _folders_needed(file: ClusterFile, settings: Config | None, *, is_head: bool, with_dataset: bool) -> dict[str, str]:
    """Folders that a machine needs and `ray up` does not bring, each with the reason."""
    needed: dict[str, str] = {}
    if is_head:
        checkpoint = f"{file.served.run}/checkpoint"
        if checkpoint not in file.mounts:
            needed[checkpoint] = "the front end serves it; mount it with file_mounts, or copy it to the head"
    if settings is not None and (storage := settings.cluster.storage):
        needed[storage] = "cluster.storage; mount it on every host"
    if settings is not None and with_dataset and (root := settings.data.root):
        needed[str(root)] = "data.root; mount it on every host"
    return needed


def _placement(config: Config, machines: list[Machine]) -> str:
    nodes = [Node(cpus=machine.number("cpus"), gpus=machine.number("gpus")) for machine in machines]
    return fit(config, nodes, f"{len(nodes)} nodes")
