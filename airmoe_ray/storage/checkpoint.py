"""The checkpoint folder: one file for the cloud, one per client, JSON and safetensors only, written atomically.

    config.yaml  model.json  cloud.safetensors  experts/expert_00.safetensors …
    trainer/optimizer.safetensors  trainer/state.json

A client's file holds its expert, psi and FRL and nothing of anyone else's. The backbone is named with its fingerprint,
not copied. Weights may be stored as float16 (`export.py`); they are computed in float32 all the same.
"""

import json
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from airmoe_ray import __version__
from airmoe_ray.config import Config
from airmoe_ray.config_file import parse_config, read_yaml, to_yaml
from airmoe_ray.data.base import ClassTable
from airmoe_ray.errors import CheckpointError
from airmoe_ray.model.cloud_parts import CloudParts
from airmoe_ray.model.local_clients import LocalClients
from airmoe_ray.model.moe import AirMoE
from airmoe_ray.storage.folder_swap import recover, swap, sync_folder, write_file

FORMAT = 2  # 1 had neither refiner nor `fine_dims`


@dataclass(frozen=True)
class ModelCard:
    """`model.json`: what a server must know before it loads any weight."""

    classes: list[str]
    palette: list[list[int]]
    feature_dim: int
    dilations: list[int]
    backbone_name: str
    backbone_fingerprint: str
    fine_dims: list[int] = field(default_factory=list)  # channels of the finer maps that the refiner sees
    name: str = ""  # of a model that is known by one
    terms: str = ""  # on which the weights may be used, in a sentence; nothing where they carry none
    clients: list[str] = field(default_factory=list)  # what each client knows, in a few words; empty: nobody said
    airmoe_version: str = __version__
    torch_version: str = str(torch.__version__)
    format: int = FORMAT

    @property
    def table(self) -> ClassTable:
        """The classes with their colours."""
        return ClassTable(tuple(self.classes), tuple((red, green, blue) for red, green, blue in self.palette))

    @property
    def dilation_rates(self) -> tuple[int, int, int]:
        """Dilations of the experts' three 3x3 branches."""
        first, second, third = self.dilations
        return first, second, third


@dataclass
class TrainerState:
    """What `--resume` needs besides the weights; random streams are functions of the seed and the epoch."""

    epoch: int  # epochs completed
    step: int
    optimizer: dict[str, Tensor]
    traffic: dict[str, Any] = field(default_factory=dict)  # what crossed so far, `Traffic.stored`


def cloud_tensors(cloud: CloudParts) -> dict[str, Tensor]:
    """The cloud's trainable parts: the query, and its own head, refiner and gate where it has them."""
    tensors = {f"query.{name}": value for name, value in cloud.query.state_dict().items()}
    for part in ("shared", "refiner", "gate"):
        module = getattr(cloud, part)
        if module is not None:
            tensors |= {f"{part}.{name}": value for name, value in module.state_dict().items()}
    return tensors


def expert_tensors(clients: LocalClients, index: int) -> dict[str, Tensor]:
    """Everything the client at `index` of these owns: expert, psi, FRL."""
    count = int(clients.frl.valid_NM[index].sum())
    tensors = {f"expert.{name}": value for name, value in clients.experts[index].state_dict().items()}
    tensors["frl.prototypes"] = clients.frl.prototypes_NMd.detach()[index, :count]
    tensors["frl.importance"] = clients.frl.importance_NM[index, :count]
    return tensors


def save_checkpoint(folder: Path, model: AirMoE, card: ModelCard, state: TrainerState | None = None) -> None:
    """Write a checkpoint beside `folder`, force it to disk, then put it in place; a kill leaves the old or the new."""
    recover(folder)
    fresh = folder.with_name(folder.name + ".partial")
    shutil.rmtree(fresh, ignore_errors=True)
    try:
        _write_all(fresh, model, card, state)
    except OSError as error:
        shutil.rmtree(fresh, ignore_errors=True)
        kept = "the previous checkpoint is untouched" if folder.exists() else "nothing was kept"
        raise CheckpointError(f"{folder}: cannot save the checkpoint ({error.strerror}); {kept}") from None
    swap(fresh, folder)


def load_checkpoint(folder: Path, *, network: bool = False) -> tuple[Config, ModelCard]:
    """Configuration and model card of a checkpoint, checked; one of a single `network` has to be asked for."""
    recover(folder)
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no checkpoint here; train first, or give the run folder that holds one")
    try:
        stored = json.loads((folder / "model.json").read_text())
        if stored["format"] > FORMAT:
            raise CheckpointError(
                f"{folder}: checkpoint format {stored['format']}, this version reads {FORMAT}; update"
            )
        card = ModelCard(**stored)
    except (OSError, json.JSONDecodeError, KeyError, TypeError) as error:
        raise CheckpointError(f"{folder / 'model.json'}: cannot be read ({error}); the checkpoint is broken") from None
    config = parse_config(read_yaml(folder / "config.yaml"))
    if config.model != "airmoe" and not network:
        raise CheckpointError(f"{folder}: is of a single model, {config.model}, without clients; use `airmoe eval`")
    return config, card


def load_weights(folder: Path, model: AirMoE) -> None:
    """Fill a model from its checkpoint; every tensor must be there in the right shape."""
    load_cloud(model.cloud, read_file(folder / "cloud.safetensors"), str(folder / "cloud.safetensors"))
    clients = len(model.clients.experts)
    found = len(list((folder / "experts").glob("expert_*.safetensors")))
    if found != clients:
        raise CheckpointError(
            f"{folder}: holds {found} experts, the configuration asks for {clients}; use the run's own"
        )
    for j in range(clients):
        _assign(expert_tensors(model.clients, j), *_read(expert_file(folder, j)))


def read_file(path: Path) -> bytes:
    """The bytes of one checkpoint file, for whoever loads it elsewhere."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise CheckpointError(f"{path}: missing; the checkpoint is incomplete, copy it again or retrain") from None


def parse_tensors(content: bytes, source: str) -> dict[str, Tensor]:
    """Tensors of a checkpoint file's bytes; `source` names it in errors."""
    try:
        return safetensors.torch.load(content)
    except SafetensorError as error:
        raise CheckpointError(f"{source}: cannot be read ({error}); the checkpoint is broken") from None


def compute_dtype(stored: Tensor) -> torch.dtype:
    """The number format to compute in: the stored one, but float32 where weights are stored in half of that."""
    return torch.float32 if stored.dtype in (torch.float16, torch.bfloat16) else stored.dtype


def load_cloud(cloud: CloudParts, content: bytes, source: str) -> None:
    """Fill the cloud's parts from the bytes of `cloud.safetensors`; a stored refiner may be switched off."""
    stored = parse_tensors(content, source)
    if cloud.refiner is None:
        stored = {name: value for name, value in stored.items() if not name.startswith("refiner.")}
    _assign(cloud_tensors(cloud), stored, source)


def load_client(clients: LocalClients, index: int, content: bytes, source: str) -> None:
    """Fill the client at `index` from the bytes of its own file."""
    _assign(expert_tensors(clients, index), parse_tensors(content, source), source)


def load_trainer_state(folder: Path) -> TrainerState:
    """Epoch, step and optimizer moments of a checkpoint."""
    try:
        state = json.loads((folder / "trainer" / "state.json").read_text())
        epoch, step, traffic = int(state["epoch"]), int(state["step"]), state.get("traffic", {})
    except (OSError, ValueError, KeyError, TypeError):
        raise CheckpointError(f"{folder}: has no trainer state to resume from") from None
    return TrainerState(epoch, step, _read(folder / "trainer" / "optimizer.safetensors")[0], traffic)


def expert_file(folder: Path, client: int) -> Path:
    """Where client j's tensors are."""
    return folder / "experts" / f"expert_{client:02d}.safetensors"


def _write_all(fresh: Path, model: AirMoE, card: ModelCard, state: TrainerState | None) -> None:
    (fresh / "experts").mkdir(parents=True)
    write_file(fresh / "config.yaml", to_yaml(model.config).encode())
    write_file(fresh / "model.json", json.dumps(asdict(card), indent=1).encode())
    write_file(fresh / "cloud.safetensors", serialise(cloud_tensors(model.cloud)))
    for j in range(len(model.clients.experts)):
        write_file(expert_file(fresh, j), serialise(expert_tensors(model.clients, j)))
    if state is not None:
        (fresh / "trainer").mkdir()
        write_file(fresh / "trainer" / "optimizer.safetensors", serialise(state.optimizer))
        told = {"epoch": state.epoch, "step": state.step, "traffic": state.traffic}
        write_file(fresh / "trainer" / "state.json", json.dumps(told).encode())
        sync_folder(fresh / "trainer")
    for place in (fresh / "experts", fresh):
        sync_folder(place)


def serialise(tensors: dict[str, Tensor]) -> bytes:
    """Tensors as the bytes of a checkpoint file."""
    return safetensors.torch.save({name: value.detach().cpu().contiguous().clone() for name, value in tensors.items()})


def _read(path: Path) -> tuple[dict[str, Tensor], str]:
    return parse_tensors(read_file(path), str(path)), str(path)


@torch.no_grad()
def _assign(targets: dict[str, Tensor], stored: dict[str, Tensor], source: str) -> None:
    for name, target in targets.items():
        if name not in stored or stored[name].shape != target.shape:
            shape = tuple(stored[name].shape) if name in stored else "nothing"
            raise CheckpointError(
                f"{source}: {name} is {shape}, this configuration needs {tuple(target.shape)}; "
                "the checkpoint is of another architecture, use the run's own configuration"
            )
        target.copy_(stored[name])
    for name in stored.keys() - targets.keys():
        raise CheckpointError(f"{source}: unexpected {name}; the checkpoint is of another architecture")
