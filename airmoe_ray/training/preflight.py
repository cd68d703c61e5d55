"""What can be found wrong with a run before its work starts."""

import shutil
from pathlib import Path
from typing import NamedTuple

from airmoe_ray.config import Config
from airmoe_ray.data import SegmentationDataset, held_out, open_dataset
from airmoe_ray.data.transforms import parse_view
from airmoe_ray.errors import UserError
from airmoe_ray.model.moe import AirMoE
from airmoe_ray.radio.ledger import check_budget
from airmoe_ray.runtime.device import check_device_name, pick_device
from airmoe_ray.storage.remote_run import RemoteRun
from airmoe_ray.storage.shipped import BEST, LAST
from airmoe_ray.training.epoch_log import check_tensorboard
from airmoe_ray.training.run_folder import begin_folder


class Data(NamedTuple):
    """What there is to learn from, and to be scored on."""

    train: SegmentationDataset
    held_out: SegmentationDataset | None


def check_run(config: Config, run: Path | RemoteRun, *, resume: bool) -> Data:
    """Find out within seconds what is wrong with settings, data or folder, before anything is loaded or started.

    Returns the data, which had to be opened for that.
    """
    check_settings(config)
    data = open_data(config)
    if isinstance(run, RemoteRun):
        run.check(resume=resume)
    else:
        begin_folder(run, config, resume=resume)
    return data


def check_settings(config: Config) -> None:
    """Settings that are valid one by one, but not here or not together."""
    check_budget(config)
    for view in config.data.views:
        parse_view(view)
    if config.train.engine == "local":
        pick_device(config.train.device, threads=config.train.threads)
    else:
        check_device_name(config.train.device)
    if config.train.tensorboard:
        check_tensorboard()


def open_data(config: Config) -> Data:
    """The training images, and those held out from them."""
    dataset = open_dataset(config.data, "train")
    return Data(dataset, held_out(config.data, dataset))


def check_space(folder: Path, config: Config, *, feature_dim: int, classes: int) -> None:
    """Whether the checkpoints will fit: the last one with Adam's two moments, the best one without, and each of them
    beside its successor while that is written."""
    there = _size(folder / LAST) + _size(folder / BEST)
    needed = 2 * (3 + 1) * trainable_bytes(config, feature_dim=feature_dim, classes=classes) - there
    free = shutil.disk_usage(next(path for path in (folder, *folder.parents) if path.exists())).free
    if needed > 0.95 * free:
        raise UserError(
            f"{folder}: checkpoints need {needed / 1e6:.0f} MB, {free / 1e6:.0f} MB are free; make room or choose "
            "another --run"
        )


def trainable_bytes(config: Config, *, feature_dim: int, classes: int) -> int:
    """Size of everything that learns, without building all of it."""
    one = config.model_copy(update={"experts": config.experts.model_copy(update={"count": 1})})
    model = AirMoE(one, feature_dim=feature_dim, classes=classes, dilations=(1, 1, 1))
    client = sum(p.numel() for p in model.clients.parameters())
    whole = sum(p.numel() for p in model.parameters())
    return 4 * (whole + (config.experts.count - 1) * client)


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
