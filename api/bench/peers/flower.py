"""A federated epoch of ours against FedAvg of the same model as a Flower simulation: time, and what crosses.

Both see the same images in as many steps: FedAvg's clients take a tenth of every batch each and train the whole model,
which is then averaged; ours train one expert each, together, and the cloud's parts at the cloud.
"""

import json
import os
import statistics
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from actors.cluster.connection import cluster
from actors.training.federated import FederatedTrainer
from airmoe_ray.config import Config
from airmoe_ray.config_file import load_config
from airmoe_ray.model.moe import AirMoE
from airmoe_ray.radio.ledger import Traffic
from airmoe_ray.runtime.progress import Silent
from airmoe_ray.storage.checkpoint import ModelCard
from airmoe_ray.training.pixel_losses import Labelling
from airmoe_ray.training.run import Run, open_run, train_epoch
from airmoe_ray.training.trainer import Learning
from api.bench.figures import Figure, Note, by_turns, ratio
from api.bench.peers.venvs import python_with

_NEEDS = ["flwr[simulation]==1.41.*"]  # brings the Ray it wants, 2.55
_STEPS, _BATCH, _ROUNDS = 4, 20, 3


def flower_figures(run: str | Path, folder: Path, *, rounds: int, seconds: float, note: Note) -> dict[str, Figure]:
    """`peer_flower`: seconds per epoch of ours over Flower's, quickstart's model, 10 clients, 80 drawings."""
    python = python_with("flower", _NEEDS, check="import flwr.simulation, ray", note=note)
    images = [f"data.train_count={_STEPS * _BATCH}", "data.val_count=5", f"train.batch_size={_BATCH}"]
    config = load_config("quickstart", [*images, f"data.cache_dir={folder}/cache", "train.warm_start.enabled=false"])
    return {"peer_flower": compare(config, python, folder, rounds=rounds, note=note)}


def compare(config: Config, python: Path, folder: Path, *, rounds: int, note: Note) -> Figure:
    """Both by turns; a turn of Flower's is a simulation of some rounds, the first of which does not count."""
    traffic: list[Traffic] = []

    def federation(model: AirMoE, card: ModelCard, total_steps: int, labelling: Labelling) -> Learning:
        trainer = FederatedTrainer(model, config, card, total_steps=total_steps, labelling=labelling, report=Silent())
        traffic.append(trainer.traffic)
        return trainer

    with cluster():
        ours = open_run(config, folder / "ours", resume=False, report=Silent(), federation=federation)
        try:
            ours = replace(ours, validation=None)
            store(ours, folder / "flower")
            train_epoch(ours, 0, Silent())
            before = Traffic.from_stored(traffic[0].stored())
            train_epoch(ours, 0, Silent())
            crossed = _crossed(before, traffic[0])
            note("peer_flower: a federated epoch by turns with a Flower simulation")
            pairs = by_turns(lambda: _epoch_s(ours), lambda: flower_s(python, folder / "flower"), rounds)
        finally:
            ours.trainer.close()
    theirs = json.loads((folder / "flower" / "times.json").read_text())["model_bits"] * config.experts.count
    detail = {
        "ours_s": round(statistics.median(pair[0] for pair in pairs), 2),
        "flower_s": round(statistics.median(pair[1] for pair in pairs), 2),
        "ours_per_epoch": crossed,
        "flower_per_epoch": {"uplink_MB": theirs / 8e6, "downlink_MB": theirs / 8e6, "channel_uses": 0},
    }
    return ratio(pairs, target=1.0, better="lower", **detail)


def store(run: Run, folder: Path) -> None:
    """Put the same batches and the shape of the model where the other process finds them."""
    folder.mkdir(parents=True, exist_ok=True)
    batches = [(b.features_BDhw, b.labels_BHW, b.ids_B) for b in run.schedule.batches(0, device=run.device)]
    shape: dict[str, Any] = {
        "feature_dim": run.card.feature_dim,
        "classes": len(run.card.classes),
        "dilations": run.card.dilation_rates,
    }
    torch.save({"batches": batches, "shape": shape}, folder / "data.pt")
    (folder / "config.json").write_text(run.config.model_dump_json())


def flower_s(python: Path, folder: Path) -> float:
    """Median seconds of a round, the first apart."""
    # its Ray is its own: ours must not be found by it
    around = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
    (folder / "times.json").unlink(missing_ok=True)
    command = [str(python), "-m", "api.bench.peers.flower_app", str(folder), str(_ROUNDS)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=around)
    if done.returncode or not (folder / "times.json").exists():
        raise RuntimeError(f"the Flower simulation failed: {done.stderr[-500:]}")
    seconds = json.loads((folder / "times.json").read_text())["seconds"]
    return statistics.median(seconds[1:])


def _epoch_s(run: Run) -> float:
    begun = time.perf_counter()
    train_epoch(run, 0, Silent())
    return time.perf_counter() - begun


def _crossed(before: Traffic, after: Traffic) -> dict[str, float]:
    """What one epoch sent, digitally and over the air."""
    links = {
        f"{link}_MB": round((sum(getattr(after, link).values()) - sum(getattr(before, link).values())) / 8e6, 4)
        for link in ("uplink", "downlink")
    }
    return {**links, "channel_uses": after.channel_uses - before.channel_uses}
