"""What a run says about itself: a line per epoch, and curves for TensorBoard."""

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from airmoe_ray.errors import UserError

_BLOCKS = "▁▂▃▄▅▆▇█"
_MOST_BLOCKS = 32  # experts; beyond it a line would not fit the terminal


def describe(row: dict[str, Any], epochs: int, eta_s: float = 0.0) -> str:
    """The line of one epoch: loss terms, scores, load of the experts, speed, and the time that is left."""
    parts = [
        f"epoch {row['epoch']:>3}/{epochs}",
        f"loss {row['loss']:.3f} (ce {row['ce']:.3f}, lb {row['lb']:.3f}, align {row['align']:.3f}{_own(row)})",
        f"mIoU {row['miou']:5.1f} (ideal {row['miou_ideal']:.1f})" if "miou" in row else "",
        f"load {load_blocks(row['load'])}" if "load" in row else "shared expert",
        f"{row['images_per_s']:.1f} images/s",
        _traffic(row["traffic"]) if "traffic" in row else "",
        f"ETA {clock(eta_s)}" if eta_s else "",
    ]
    return "  ".join(part for part in parts if part)


def _own(row: dict[str, Any]) -> str:
    """The terms that only some runs have: the cloud's own head, the IoU loss."""
    return "".join(f", {name} {row[name]:.3f}" for name in ("shared", "iou") if row.get(name))


def describe_saving(row: dict[str, Any], loop_s: float) -> str:
    """What the cache is worth, after the first epoch; `loop_s` is the backbone's time per image of the epoch."""
    cached = row["seconds"]
    online = cached + row["images_per_s"] * cached * loop_s
    return (
        f"an epoch takes {cached:.3g} s from the cache; with the backbone in the loop it would take about "
        f"{online:.3g} s ({online / cached:.1f} times as long)"
    )


def _traffic(traffic: dict[str, float]) -> str:
    kinds = ("uplink_bits", "downlink_bits", "fedavg_uplink_bits", "raw_features_uplink_bits")
    up, down, fedavg, raw = (traffic[key] / 8e3 for key in kinds)
    return f"per image {up:.1f} kB up (FedAvg {fedavg:.0f}, raw features {raw:.0f}), {down:.0f} kB down"


def load_blocks(load_N: Sequence[float]) -> str:
    """One block per expert: a low one is an idle expert, the fourth its fair share, a full one twice that or more."""
    if len(load_N) > _MOST_BLOCKS:
        return f"{min(load_N):.2f}-{max(load_N):.2f}"
    highest = len(_BLOCKS) - 1
    return "".join(_BLOCKS[min(int(load * highest / 2), highest)] for load in load_N)


def clock(seconds: float) -> str:
    """1:02:03, or 2:03 below an hour."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def check_tensorboard() -> None:
    """TensorBoard is an extra: say so before the work starts."""
    if importlib.util.find_spec("tensorboard") is None:
        raise UserError(
            "train.tensorboard = true: the package tensorboard is not installed; "
            "`pip install 'airmoe-ray[tensorboard]'`, or set train.tensorboard=false"
        )


class TensorBoard:
    """Curves of the numbers in `metrics.jsonl`, one point per epoch."""

    def __init__(self, folder: Path, *, epochs_done: int) -> None:
        from torch.utils.tensorboard import SummaryWriter  # late: only where the extra is installed

        # points of epochs that a resumed run will take again are hidden
        self.writer = SummaryWriter(str(folder), purge_step=epochs_done + 1)

    def add(self, row: dict[str, Any]) -> None:
        """One epoch, on disk when this returns."""
        points = {f"load/{j}": load for j, load in enumerate(row.get("load", []))}
        points |= {name: value for name, value in row.items() if isinstance(value, float)}
        for name, value in points.items():
            self.writer.add_scalar(name, value, row["epoch"])
        self.writer.flush()
