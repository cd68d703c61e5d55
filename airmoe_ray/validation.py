"""Scores after each epoch, from cached features: on the configured channel and on the ideal one.

Suffixes: B inputs, D features, P routed pairs, h w grid.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import interpolate

from airmoe_ray.clients import LocalClients
from airmoe_ray.config import ChannelConfig
from airmoe_ray.data.base import SegmentationDataset, UInt8Array
from airmoe_ray.evaluation import BATCH, Scoreboard
from airmoe_ray.experts import ExpertOutput
from airmoe_ray.feature_cache import FeatureCache
from airmoe_ray.inference import best_class
from airmoe_ray.metrics import ConfusionMatrix
from airmoe_ray.moe import AirMoE, AirMoEOutput, Clients, collaborate
from airmoe_ray.rng import evaluation_id
from airmoe_ray.world import Alone, World, shard

# finds clients and hands them to a question; may ask again where some of them were lost
Answer = Callable[[Callable[[Clients[Any]], Any]], Any]


class OnceEach(LocalClients):
    """Clients whose experts run once for each routed pair, however many channels their outputs then cross."""

    def __init__(self, clients: LocalClients) -> None:
        nn.Module.__init__(self)
        self.config, self.experts, self.frl = clients.config, clients.experts, clients.frl
        self.known: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def run(self, features_BDhw: Tensor, owner_P: Tensor, sample_P: Tensor) -> ExpertOutput:
        """Outputs from memory; experts compute what is new."""
        pairs = list(zip(owner_P.tolist(), sample_P.tolist(), strict=True))
        new = [place for place, pair in enumerate(pairs) if pair not in self.known]
        if new or not pairs:
            output = super().run(features_BDhw, owner_P[new], sample_P[new])
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
    world: World | None = None,
    *,
    answer: Answer | None = None,
) -> dict[str, Any]:
    """The scores of `evaluate` from cached features, at the fitted size, and `miou_ideal` beside them.

    Workers share each batch; every one returns the scores of all images. Clients that are not in the model are found by
    `answer`, for each batch.
    """
    config, world = model.config, world or Alone()
    board = Scoreboard(dataset, clients=config.experts.count)
    ideal = ConfusionMatrix(len(dataset.classes.names))
    channels = (config.channel, config.channel.model_copy(update={"kind": "ideal"}))
    model.eval()
    for indices, features_BDhw, labels in _batches(view, world, model.query.linear.weight.device):
        ask = partial(_through, channels, model, features_BDhw, [evaluation_id(i) for i in indices])
        noisy, exact = answer(ask) if answer else ask(OnceEach(model.clients))
        board.add(noisy, indices, _masks(noisy.logits_BChw, labels), labels)
        for label, mask in zip(labels, _masks(exact.logits_BChw, labels), strict=True):
            ideal.add(label, mask)
    board.add_others(world)
    ideal.add_others(world)
    return board.result() | {"miou_ideal": ideal.scores()["miou"]}


def _through(
    channels: Sequence[ChannelConfig],
    model: AirMoE,
    features_BDhw: Tensor,
    ids_B: Sequence[int],
    clients: Clients[Any],
) -> list[AirMoEOutput[Any]]:
    """The same inputs through each of the channels."""
    config, query_dist_Bd = model.config, model.query(features_BDhw)
    common: dict[str, Any] = {"routing_config": config.routing, "seed": config.seed, "shared": model.shared}
    return [
        collaborate(query_dist_Bd, features_BDhw, ids_B, clients, channel=channel, **common) for channel in channels
    ]


def _batches(
    view: FeatureCache, world: World, device: torch.device
) -> Iterator[tuple[list[int], Tensor, list[UInt8Array]]]:
    """This worker's part of batches of one shape; it may be empty."""
    size = BATCH * world.size
    for shape in range(len(view.grids)):
        members = np.flatnonzero(view.shape_of == shape).tolist()
        for whole in (members[start : start + size] for start in range(0, len(members), size)):
            own = list(shard(whole, world))
            rows = [view.get(i) for i in own or whole[:1]]
            features_BDhw = torch.from_numpy(np.stack([row[0] for row in rows])).to(device, torch.float32)
            yield own, features_BDhw[: len(own)], [row[1] for row in rows[: len(own)]]


def _masks(logits_BChw: Tensor, labels: Sequence[UInt8Array]) -> list[NDArray[np.integer]]:
    """Class ids at the labels' size."""
    if not labels:
        return []
    logits_BCHW = interpolate(logits_BChw, size=labels[0].shape, mode="bilinear", align_corners=False)
    if logits_BCHW.is_cuda:
        return list(logits_BCHW.argmax(dim=1).cpu().numpy())
    return [best_class(logits_CHW)[0] for logits_CHW in logits_BCHW.numpy()]
