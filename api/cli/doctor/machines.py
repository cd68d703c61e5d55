"""Checks every machine that a cluster file names: enters them at the same time, looks once, and judges what it saw."""

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

from actors.cluster.placement import Node
from airmoe_ray.config import Config
from airmoe_ray.storage.bucket import is_url, shown
from api.cli.doctor import folders, machine_checks
from api.cli.doctor.cluster_file import ClusterFile
from api.cli.doctor.folders import Need, needed
from api.cli.doctor.placement import fit
from api.cli.doctor.results import CheckResult, run_check
from api.cli.doctor.ssh import Login, Machine, enter, look
from api.cli.doctor.storage import judge


@dataclass(frozen=True)
class Visit:
    """What is asked of every machine."""

    file: ClusterFile
    settings: Config | None
    with_dataset: bool
    storage: str | None

    def needs(self, host: str) -> list[Need]:
        """Folders that this machine needs."""
        return needed(
            self.file,
            self.settings,
            is_head=host == self.file.hosts[0],
            with_dataset=self.with_dataset,
            storage=self.storage,
        )

    @property
    def images(self) -> list[str]:
        """Images that containers on the hosts are made of."""
        docker = self.file.tree.get("docker") or {}
        return sorted({docker[key] for key in ("image", "head_image", "worker_image") if docker.get(key)})

    @property
    def urls(self) -> list[str]:
        """Storage that every machine must be able to write to."""
        return [self.storage] if self.storage and is_url(self.storage) else []


def check_machines(
    file: ClusterFile, settings: Config | None, *, with_dataset: bool, storage: str | None = None
) -> list[CheckResult]:
    """Results of all machines, the head's first; at the end, of all of them together: versions, folders, placement."""
    auth = file.tree["auth"]
    key = auth.get("ssh_private_key")
    login = Login(auth["ssh_user"], os.path.expanduser(key) if key else None, auth.get("ssh_proxy_command"))
    asked = Visit(file, settings, with_dataset, storage)
    seen: dict[str, Machine] = {}
    with ThreadPoolExecutor(len(file.hosts)) as pool:
        entered = list(pool.map(lambda host: run_check(f"{host} ssh", lambda: enter(login, host)), file.hosts))
        reachable = [host for host, result in zip(file.hosts, entered, strict=True) if result.ok]
        visited = list(pool.map(lambda host: _visit(asked, login, host, reachable, seen), reachable))
    results = [*entered, *(result for each in visited for result in each)]
    machines = [seen[host] for host in file.hosts if host in seen]
    if len(machines) > 1:
        results.append(run_check("versions", lambda: machine_checks.agree(machines)))
        for need in (need for need in asked.needs(file.hosts[0]) if need.shared and _ready(machines, need)):
            results.append(
                run_check(
                    "shared folder", partial(folders.same, login, [machine.address for machine in machines], need)
                )
            )
    if len(machines) == len(file.hosts) and settings is not None:
        results.append(run_check("placement", lambda: _placement(settings, machines)))
    return results


def _visit(asked: Visit, login: Login, host: str, reachable: list[str], seen: dict[str, Machine]) -> list[CheckResult]:
    """Look at one machine, put it into `seen`, and check it; if looking fails, that is the one result."""
    file, is_head, needs = asked.file, host == asked.file.hosts[0], asked.needs(host)
    peers = [peer for peer in reachable if peer != host and (is_head or peer == file.hosts[0])]

    def hardware() -> str:
        seen[host] = look(
            login,
            host,
            bin=file.bin,
            folders=[need.folder for need in needs],
            peers=peers,
            now=time.time(),
            images=asked.images,
            urls=asked.urls,
        )
        return machine_checks.hardware(seen[host])

    results = [run_check(f"{host} machine", hardware)]
    if host not in seen:
        return results
    machine = seen[host]
    checks: dict[str, Callable[[], str]] = {
        "versions": lambda: machine_checks.versions(machine, file.bin),
        "driver": lambda: machine_checks.driver(machine),
        "token": lambda: machine_checks.same_token(machine, file),
        "network": lambda: machine_checks.network(machine, peers),
        "folders": lambda: folders.check(machine, needs),
    }
    if is_head:
        checks["ports"] = lambda: machine_checks.ports(machine, file)
    if asked.images:
        checks["images"] = lambda: machine_checks.pulls(machine)
    if asked.urls:
        checks["storage"] = lambda: _storage(asked.urls[0], machine)
    return results + [run_check(f"{host} {name}", check) for name, check in checks.items()]


def _ready(machines: list[Machine], need: Need) -> bool:
    """Whether each has said to have the folder, and to be able to write there."""
    return all(need.folder in machine.folders and machine.folders[need.folder].writable for machine in machines)


def _storage(url: str, machine: Machine) -> str:
    if "storage" not in machine.facts:
        return f"{shown(url)}: Ray is not installed there yet, so that nothing can try it; ask again after `ray up`"
    return judge(url, machine.facts["storage"], "there")


def _placement(config: Config, machines: list[Machine]) -> str:
    nodes = [Node(cpus=machine.number("cpus"), gpus=machine.number("gpus")) for machine in machines]
    return fit(config, nodes, f"{len(nodes)} nodes")
