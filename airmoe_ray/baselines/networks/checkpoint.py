"""A network by its dotted path, and its checkpoint: config.yaml, model.json, network.safetensors, trainer/."""

import json
import shutil
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor, nn

from airmoe_ray.config import Config
from airmoe_ray.config_file import to_yaml
from airmoe_ray.data.base import ClassTable
from airmoe_ray.errors import CheckpointError, UserError
from airmoe_ray.runtime.imports import load_class
from airmoe_ray.runtime.rng import derive_key
from airmoe_ray.storage.checkpoint import ModelCard, TrainerState, load_checkpoint, parse_tensors, read_file, serialise
from airmoe_ray.storage.folder_swap import recover, swap, sync_folder, write_file

_WEIGHTS = "network.safetensors"


def build_network(config: Config, classes: int) -> nn.Module:
    """A new network; its initial weights follow from the seed, and torch's own stream stays where it was."""
    kind = load_class(config.model, nn.Module, "model")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_key(config.seed, "init/network") & (2**63 - 1))
        try:
            return kind(classes)
        except TypeError as error:
            raise UserError(f"model = {config.model}: cannot be made as {kind.__name__}(classes) ({error})") from None


def network_card(config: Config, classes: ClassTable) -> ModelCard:
    """`model.json`: classes and colours; there is no backbone."""
    return ModelCard(
        classes=list(classes.names),
        palette=[list(colour) for colour in classes.palette],
        feature_dim=0,
        dilations=[1, 1, 1],
        backbone_name="none",
        backbone_fingerprint="",
        name=config.model,
    )


def save_network(folder: Path, network: nn.Module, config: Config, card: ModelCard, state: TrainerState) -> None:
    """Write a checkpoint beside `folder`, then put it in place; a kill leaves the old or the new."""
    recover(folder)
    fresh = folder.with_name(folder.name + ".partial")
    shutil.rmtree(fresh, ignore_errors=True)
    (fresh / "trainer").mkdir(parents=True)
    write_file(fresh / "config.yaml", to_yaml(config).encode())
    write_file(fresh / "model.json", json.dumps(asdict(card), indent=1).encode())
    write_file(fresh / _WEIGHTS, serialise(network.state_dict()))
    write_file(fresh / "trainer" / "optimizer.safetensors", serialise(state.optimizer))
    told = {"epoch": state.epoch, "step": state.step, "traffic": {}}
    write_file(fresh / "trainer" / "state.json", json.dumps(told).encode())
    for place in (fresh / "trainer", fresh):
        sync_folder(place)
    swap(fresh, folder)


def load_network(folder: Path) -> tuple[Config, ModelCard, nn.Module]:
    """Configuration, card and trained network of a checkpoint."""
    config, card = load_checkpoint(folder, network=True)
    network = build_network(config, len(card.classes))
    fill_network(folder, network)
    return config, card, network


def fill_network(folder: Path, network: nn.Module) -> None:
    """Weights from a checkpoint; every tensor must be there in the right shape."""
    stored: dict[str, Tensor] = parse_tensors(read_file(folder / _WEIGHTS), str(folder / _WEIGHTS))
    try:
        network.load_state_dict(stored)
    except RuntimeError as error:
        reason = str(error).splitlines()[-1].strip()
        raise CheckpointError(f"{folder / _WEIGHTS}: is of another network ({reason})") from None
