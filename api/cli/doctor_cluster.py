"""`airmoe doctor --cluster FILE`: a cluster file, what it sends, and every host it names, before `ray up` is called."""

import importlib.util
import math
import os
import shutil
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from airmoe_ray.config import Config
from airmoe_ray.errors import UserError
from api.cli import cluster_checks
from api.cli.cluster_file import TOKEN, ClusterFile, check_schema, examples_left, read_documents
from api.cli.cluster_host import Login, Look, enter, look
from api.cli.findings import Finding, examine


def examine_cluster(path: Path, config: str | None, overrides: Sequence[str]) -> list[Finding]:
    """All findings; what cannot be looked at because something else failed is left out."""
    try:
        documents = read_documents(path)
        if "apiVersion" in documents[0]:
            from api.cli.cluster_manifest import examine_manifest

            return examine_manifest(path, documents)
        file = check_schema(path, documents[0])
    except UserError as error:
        return [Finding("file", False, str(error))]
    findings = [
        Finding("file", True, f"{path}: provider {file.provider}, as Ray's schema wants it"),
        examine("addresses", lambda: _addresses(file)),
        examine("tools", lambda: _tools(file)),
        examine("token", lambda: _token(file)),
        examine("sent files", lambda: _sent(file)),
    ]
    settings: list[Config] = []
    findings.append(examine("run", lambda: _run(file, config, overrides, settings)))
    if not findings[1].ok:
        return findings  # nobody lives at the example's addresses
    if file.provider == "local":
        return findings + _hosts(file, settings, with_dataset=config is not None)
    return findings + _cloud(file, settings)


# here


def _addresses(file: ClusterFile) -> str:
    if left := examples_left(file.tree):
        raise UserError(f"{', '.join(left)}: still the example's; put in your own")
    return f"{len(file.hosts)} hosts" if file.hosts else "none of the example's are left"


def _tools(file: ClusterFile) -> str:
    if missing := [tool for tool in ("ssh", "rsync") if shutil.which(tool) is None]:
        raise UserError(
            f"{' and '.join(missing)} not found here; `ray up` calls them: install openssh-client and rsync"
        )
    key = (file.tree.get("auth") or {}).get("ssh_private_key")
    if key and not Path(key).expanduser().is_file():
        raise UserError(
            f"auth.ssh_private_key {key}: no such file; `ssh-keygen` makes one, `ssh-copy-id` brings it over"
        )
    if file.provider == "local" and "RAY_TMPDIR" in os.environ:
        raise UserError("RAY_TMPDIR is set: the head would look for the cluster's state elsewhere; unset it")
    return "ssh and rsync are here"


def _token(file: ClusterFile) -> str:
    path = file.mounts.get(TOKEN)
    if path is None:
        raise UserError(f"file_mounts has no {TOKEN}: hosts could not join; mount the token")
    _read_secret(path)
    return f"{path} is there, for you alone"


def _read_secret(path: Path) -> str:
    recipe = f"mkdir -p {path.parent}; (umask 077; openssl rand -hex 32 > {path})"
    try:
        secret = path.read_text().strip()
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; make one: {recipe}") from None
    if len(secret) < 16:
        raise UserError(f"{path}: {len(secret)} characters are too few for a secret; {recipe}")
    if path.stat().st_mode & 0o077:
        raise UserError(f"{path}: others may read it (mode {path.stat().st_mode & 0o777:o}); chmod 600 {path}")
    return secret


def _sent(file: ClusterFile) -> str:
    for there, here in file.mounts.items():
        if there.endswith("api_key"):
            _read_secret(here)
        if not here.exists():
            hint = "make wheel" if here.name == "dist" else f"make it, or change file_mounts['{there}']"
            raise UserError(f"{here}: not here, and {there} on the hosts is to come from it; {hint}")
        if here.name == "dist" and len(list(here.glob("*.whl"))) != 1:
            raise UserError(f"{here}: holds {len(list(here.glob('*.whl')))} wheels, expected one; make wheel")
    return f"{len(file.mounts)} files and folders"


def _run(file: ClusterFile, config: str | None, overrides: Sequence[str], found: list[Config]) -> str:
    """The run that will be served: from its own folder here, or from --config where the hosts have it already."""
    from airmoe_ray.checkpoint import load_checkpoint
    from airmoe_ray.config_file import load_config, parse_config

    served = file.served
    here = next((path for there, path in file.mounts.items() if there == f"{served.run}/checkpoint"), None)
    if here is None and config is None:
        raise UserError(
            f"no file_mounts for {served.run}/checkpoint, which the front end serves; mount it, or give --config where "
            "the head has it already"
        )
    wishes = [*served.overrides, *overrides]
    if config is not None:
        found.append(load_config(config, wishes))
        return f"{config}: {found[0].experts.count} experts"
    assert here is not None
    stored, _ = load_checkpoint(here)
    found.append(parse_config(stored.model_dump(mode="json"), wishes))
    return f"{here}: {found[0].experts.count} experts"


# there


def _hosts(file: ClusterFile, settings: list[Config], *, with_dataset: bool) -> list[Finding]:
    auth = file.tree["auth"]
    key = auth.get("ssh_private_key")
    login = Login(auth["ssh_user"], os.path.expanduser(key) if key else None, auth.get("ssh_proxy_command"))
    with ThreadPoolExecutor(len(file.hosts)) as pool:
        entered = list(pool.map(lambda host: examine(f"{host} ssh", lambda: enter(login, host)), file.hosts))
        open_hosts = [host for host, finding in zip(file.hosts, entered, strict=True) if finding.ok]
        seen: dict[str, Look] = {}
        looked = list(
            pool.map(lambda host: _visit(file, login, host, open_hosts, settings, with_dataset, seen), open_hosts)
        )
    findings = [*entered, *(finding for each in looked for finding in each)]
    if len(seen) == len(file.hosts) and settings:
        findings.append(examine("placement", lambda: _placement(settings[0], list(seen.values()))))
    return findings


def _visit(
    file: ClusterFile,
    login: Login,
    host: str,
    peers: list[str],
    settings: list[Config],
    with_dataset: bool,
    seen: dict[str, Look],
) -> list[Finding]:
    is_head = host == file.hosts[0]
    folders = _folders_wanted(file, settings, is_head=is_head, with_dataset=with_dataset)
    others = [peer for peer in peers if peer != host and (is_head or peer == file.hosts[0])]

    def visit() -> str:
        seen[host] = look(login, host, bin=file.bin, folders=list(folders), peers=others, now=time.time())
        return cluster_checks.machine(seen[host])

    findings = [examine(f"{host} machine", visit)]
    if host in seen:
        told = seen[host]
        checks: dict[str, Callable[[], str]] = {
            "versions": lambda: cluster_checks.versions(told, file.bin),
            "token": lambda: cluster_checks.same_token(told, file),
            "network": lambda: cluster_checks.network(told, others),
        }
        if is_head:
            checks["ports"] = lambda: cluster_checks.ports(told, file)
        if folders:
            checks["folders"] = lambda: cluster_checks.folders(told, folders)
        findings += [examine(f"{host} {name}", check) for name, check in checks.items()]
    return findings


def _folders_wanted(file: ClusterFile, settings: list[Config], *, is_head: bool, with_dataset: bool) -> dict[str, str]:
    """Folder -> why this host needs it, where `ray up` does not bring it."""
    wanted: dict[str, str] = {}
    if is_head:
        checkpoint = f"{file.served.run}/checkpoint"
        if checkpoint not in file.mounts:
            wanted[checkpoint] = "the front end serves it; mount it with file_mounts, or copy it to the head"
    if settings and (storage := settings[0].cluster.storage):
        wanted[storage] = "cluster.storage; mount it on every host"
    if settings and with_dataset and (root := settings[0].data.root):
        wanted[str(root)] = "data.root; mount it on every host"
    return wanted


def _placement(config: Config, told: list[Look]) -> str:
    from actors.placement import Node, plan

    return _shares(config, [Node(cpus=each.number("cpus"), gpus=each.number("gpus")) for each in told], plan)


def _shares(config: Config, nodes: list, plan: Callable) -> str:  # type: ignore[type-arg]
    shares = plan(config.cluster, config.experts.count, nodes)
    gpu = f"{shares.gpus_per_expert:g} GPU each" if shares.gpus_per_expert else "on the CPU"
    return f"{config.experts.count} experts {gpu} fit on {len(nodes)} nodes"


# in a cloud


def _cloud(file: ClusterFile, settings: list[Config]) -> list[Finding]:
    findings = []
    if file.provider == "aws":
        findings.append(examine("credentials", _aws))
    if settings:
        findings.append(examine("placement", lambda: _node_types(file, settings[0])))
    findings.append(
        Finding("nodes", True, "made by `ray up`: versions, token, ports and folders on them can be checked only then")
    )
    return findings


def _aws() -> str:
    if importlib.util.find_spec("boto3") is None:
        raise UserError("boto3 is not installed; Ray speaks to AWS through it: pip install boto3")
    import boto3  # type: ignore[import-not-found,unused-ignore]

    credentials = boto3.Session().get_credentials()
    if credentials is None:
        raise UserError("no AWS credentials found; `aws configure`, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY")
    return f"found ({credentials.method})"


def _node_types(file: ClusterFile, config: Config) -> str:
    """Whether the cluster, fully grown, holds the experts."""
    from actors.placement import Node, plan

    nodes = []
    for name, kind in file.tree["available_node_types"].items():
        count = (
            1 if name == file.tree["head_node_type"] else int(kind.get("max_workers", file.tree.get("max_workers", 0)))
        )
        offers = kind.get("resources") or {}
        nodes += [Node(cpus=float(offers.get("CPU", 1)), gpus=float(offers.get("GPU", 0)))] * min(count, math.ceil(1e3))
    return _shares(config, nodes, plan)
