"""`airmoe doctor`: checks what a run needs, and says what to do about each failure."""

import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from actors.cluster.placement import Node
from airmoe_ray.config import Config
from airmoe_ray.config_file import load_config
from airmoe_ray.errors import UserError
from airmoe_ray.radio.ledger import check_budget
from airmoe_ray.storage.bucket import is_url
from api.cli.common import DEFAULT_PORT, ConfigOption, JsonOption, SetOption
from api.cli.doctor.placement import fit
from api.cli.doctor.results import print_results, run_check
from api.cli.doctor.storage import writable_from_here


def doctor(
    config: ConfigOption = None,
    overrides: SetOption = [],  # noqa: B006  typer copies it
    cluster: Annotated[
        Path | None, typer.Option(help="Check this file for `ray up`, or for KubeRay, and the hosts it names instead.")
    ] = None,
    storage: Annotated[
        str | None,
        typer.Option(help="Folder or URL (s3://bucket/runs) for runs: tried from here, and from every host."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Check Python, torch, Ray, GPUs, the backbone, the dataset, disk and port; exit code 1 if one needs attention.

    With --cluster: the cluster file, its images, ssh, versions, drivers, token, ports and folders of every host.
    Settings are those of the run which the file serves; with --config, its dataset must be on every host too.
    """
    if cluster is not None:
        from api.cli.doctor.cluster import check_cluster

        print_results(check_cluster(cluster, config, overrides, storage=storage), as_json=as_json)
        return
    settings = load_config(config, overrides)
    checks: dict[str, Callable[[], str]] = {
        "python": _python,
        "torch": _torch,
        "ray": _ray,
        "placement": lambda: _placement(settings),
        "backbone": lambda: _backbone(settings),
        "dataset": lambda: _dataset(settings),
        "routing budget": lambda: _budget(settings),
        "cache folder": lambda: _cache(settings),
        "port": lambda: _port(settings),
    }
    if storage is not None:
        checks["storage"] = lambda: _storage(storage)
    print_results([run_check(name, check) for name, check in checks.items()], as_json=as_json)


def _python() -> str:
    return ".".join(map(str, sys.version_info[:3]))  # an older one could not have installed the package


def _torch() -> str:
    import torch

    import airmoe_ray.runtime.torchvision_import  # noqa: F401

    gpus = torch.cuda.device_count()
    hardware = ", ".join(torch.cuda.get_device_name(i) for i in range(gpus)) if gpus else f"CPU, {os.cpu_count()} cores"
    return f"{torch.__version__} on {hardware}"


def _ray() -> str:
    import ray

    memory = shutil.disk_usage("/dev/shm" if os.path.isdir("/dev/shm") else "/tmp")
    if memory.free < 1 << 30:
        raise UserError(
            f"{memory.free / 1e9:.1f} GB of shared memory are free, Ray's object store wants 1; enlarge /dev/shm "
            "(docker: --shm-size=2g)"
        )
    return f"{ray.__version__}, {memory.free / 1e9:.0f} GB of shared memory"


def _placement(config: Config) -> str:
    import torch

    here = Node(cpus=float(os.cpu_count() or 1), gpus=float(torch.cuda.device_count()))
    return fit(config, [here], "this machine")


def _port(config: Config) -> str:
    from api.http.server import check_bind

    check_bind(config, "127.0.0.1", DEFAULT_PORT)
    return f"{DEFAULT_PORT} is free"


def _backbone(config: Config) -> str:
    from airmoe_ray.features.backbone import load_backbone

    backbone = load_backbone(config.backbone)
    return f"{backbone.name}: {backbone.dim} features every {backbone.stride} pixels"


def _dataset(config: Config) -> str:
    from airmoe_ray.data import held_out, open_dataset

    train = open_dataset(config.data, "train")
    train[0]  # decodes one image and its label
    val = held_out(config.data, train)
    held = "none held out for validation" if val is None else f"{len(val)} for validation"
    return f"{config.data.name}: {len(train)} training images, {held}, {len(train.classes.names)} classes"


def _budget(config: Config) -> str:
    check_budget(config)
    return "C_route within C_max" if config.routing.budget_bits else "no budget set"


def _cache(config: Config) -> str:
    return _room(config.data.cache_dir, "set data.cache_dir to a folder of yours")


def _storage(place: str) -> str:
    return writable_from_here(place) if is_url(place) else _room(place, "choose a folder of yours")


def _room(place: str, advice: str) -> str:
    folder = Path(place).expanduser()
    existing = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    if not os.access(existing, os.W_OK):
        raise UserError(f"{existing}: not writable; {advice}")
    return f"{folder}: {shutil.disk_usage(existing).free / 1e9:.0f} GB free"
