"""Scores after each epoch, from cached features: on the configured channel and on the ideal one.

Suffixes: B inputs, D features, P routed pairs, h w grid.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import interpolate

from airmoe_ray.config import ChannelConfig
from airmoe_ray.data.base import SegmentationDataset, UInt8Array
from airmoe_ray.data.class_map import ClassMap
from airmoe_ray.data.mix import meaning_of
from airmoe_ray.features.backbone import FeatureMaps
from airmoe_ray.features.cache_reader import FeatureCache
from airmoe_ray.inference.masks import best_class
from airmoe_ray.inference.scoreboard import BATCH, PartScores, Scoreboard
from airmoe_ray.model.experts import ExpertOutput
from airmoe_ray.model.local_clients import LocalClients, LocalRound
from airmoe_ray.model.moe import AirMoE, collaborate
from airmoe_ray.model.seam import AirMoEOutput, Clients
from airmoe_ray.runtime.rng import evaluation_id
from airmoe_ray.runtime.workers import OneWorker, Workers, shard

# finds clients and hands them to a question; may ask again where some of them were lost
AskClients = Callable[[Callable[[Clients[Any]], Any]], Any]


class OnceEach:
    """Clients whose experts run once for each routed pair, however many channels their outputs then cross."""

    def __init__(self, clients: LocalClients) -> None:
        self.clients = clients
        self.known: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def begin(self, ids_B: Sequence[int], channel: ChannelConfig) -> LocalRound:
        """Start a round of the same inputs."""
        return LocalRound(self.clients, self.run, ids_B, channel)

    def run(self, features_BDhw: Tensor, owner_P: Tensor, sample_P: Tensor) -> ExpertOutput:
        """Outputs from memory; experts compute what is new."""
        pairs = list(zip(owner_P.tolist(), sample_P.tolist(), strict=True))
        new = [place for place, pair in enumerate(pairs) if pair not in self.known]
        if new or not pairs:
            output = self.clients.run(features_BDhw, owner_P[new], sample_P[new])
            self.known.update(zip((pairs[place] for place in new), zip(*output, strict=True), strict=True))
            if len(new) == len(pairs):
                return output
        logits, psis = zip(*(self.known[pair] for pair in pairs), strict=True)
        return ExpertOutput(torch.stack(logits), torch.stack(psis))


@torch.inference_mode()
def validate(
    model: AirMoE,
    view: FeatureCache,
    dataset: SegmentationDataset,
    workers: Workers | None = None,
    *,
    ask_clients: AskClients | None = None,
) -> dict[str, Any]:
    """The scores of `evaluate` from cached features, at the fitted size, and `miou_ideal`, `mf1_ideal` beside them.

    Workers share each batch; every one returns the scores of all images. Clients that are not in the model are found by
    `ask_clients`, for each batch.
    """
    config, workers = model.config, workers or OneWorker()
    board = Scoreboard(dataset, clients=config.experts.count)
    ideal = PartScores(dataset)
    channels = (config.channel, config.channel.model_copy(update={"kind": "ideal"}))
    model.eval()
    for indices, maps, labels in _batches(view, workers, model.query.linear.weight.device):
        domains_B = torch.tensor([dataset.domain_of(i) for i in indices], device=maps.features_BDhw.device)
        inputs = Inputs(maps, [evaluation_id(i) for i in indices], domains_B)
        ask = partial(through, channels, model, inputs)
        noisy, exact = ask_clients(ask) if ask_clients else ask(OnceEach(model.clients))
        meanings = [meaning_of(dataset, index) for index in indices]
        board.add(noisy, indices, _masks(noisy.logits_BChw, labels, meanings), labels)
        exact_masks = _masks(exact.logits_BChw, labels, meanings)
        for index, mask, label in zip(indices, exact_masks, labels, strict=True):
            ideal.add(index, mask, label)
    board.add_others(workers)
    ideal.add_others(workers)
    exact_scores = ideal.scores()
    return board.result() | {"miou_ideal": exact_scores["miou"], "mf1_ideal": exact_scores["mf1"]}


class Inputs(NamedTuple):
    """A batch as a model sees it."""

    maps: FeatureMaps
    ids_B: Sequence[int]
    domains_B: Tensor | None = None


def through(
    channels: Sequence[ChannelConfig], model: AirMoE, inputs: Inputs, clients: Clients[Any]
) -> list[AirMoEOutput[Any]]:
    """The same inputs through each of the channels."""
    config, features_BDhw = model.config, inputs.maps.features_BDhw
    common: dict[str, Any] = {
        "routing_config": config.routing,
        "seed": config.seed,
        "shared": model.shared,
        "refine": model.cloud.refine(inputs.maps.fine),
        "gate": model.gate,
        "domains_B": inputs.domains_B,
    }
    query_dist_Bd = model.query(features_BDhw)
    return [
        collaborate(query_dist_Bd, features_BDhw, inputs.ids_B, clients, channel=channel, **common)
        for channel in channels
    ]


def _batches(
    view: FeatureCache, workers: Workers, device: torch.device
) -> Iterator[tuple[list[int], FeatureMaps, list[UInt8Array]]]:
    """This worker's part of batches of one shape; it may be empty."""
    size = BATCH * workers.size
    for shape in range(len(view.grids)):
        members = np.flatnonzero(view.shape_of == shape).tolist()
        for whole in (members[start : start + size] for start in range(0, len(members), size)):
            own = list(shard(whole, workers))
            rows = [(view.get(i), view.get_fine(i)) for i in own or whole[:1]]
            stacks = zip(*((features, *fine) for (features, _), fine in rows), strict=True)
            maps = [torch.from_numpy(np.stack(stack)).to(device, torch.float32)[: len(own)] for stack in stacks]
            yield own, FeatureMaps(maps[0], tuple(maps[1:])), [label for (_, label), _ in rows[: len(own)]]


def _masks(
    logits_BChw: Tensor, labels: Sequence[UInt8Array], meanings: Sequence[ClassMap | None]
) -> list[NDArray[np.integer]]:
    """Class ids at the labels' size, of the classes that each image's labels tell apart."""
    if not labels:
        return []
    logits_BCHW = interpolate(logits_BChw, size=labels[0].shape, mode="bilinear", align_corners=False)
    if logits_BCHW.is_cuda and not any(meanings):
        return list(logits_BCHW.argmax(dim=1).cpu().numpy())
    pairs = zip(logits_BCHW.cpu().numpy(), meanings, strict=True)
    return [best_class(logits if meaning is None else meaning.merge(logits))[0] for logits, meaning in pairs]
