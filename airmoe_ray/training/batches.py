"""The order in which a run takes its steps, and what each class of its images weighs."""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from airmoe_ray.config import Config
from airmoe_ray.data.base import IGNORE, ClassTable
from airmoe_ray.errors import DataError
from airmoe_ray.features.sources import Source
from airmoe_ray.runtime.rng import generator, training_id
from airmoe_ray.runtime.workers import OneWorker, Workers, shard
from airmoe_ray.training.pixel_losses import Labelling
from airmoe_ray.training.trainer import Batch


class Schedule:
    """Which samples make up each batch of each epoch: a function of (seed, epoch) alone."""

    def __init__(
        self,
        source: Source,
        config: Config,
        workers: Workers | None = None,
        *,
        parts_S: NDArray[np.int64] | None = None,
        shares: Sequence[float] = (1.0,),
        domains_S: NDArray[np.int64] | None = None,
    ) -> None:
        """`parts_S` is the part of a mix that each sample belongs to, `shares` how much of each an epoch visits."""
        self.source, self.config, self.workers = source, config, workers or OneWorker()
        self.parts_S = np.zeros(len(source.shape_of), dtype=np.int64) if parts_S is None else parts_S
        self.shares, self.domains_S = shares, domains_S

    def steps_per_epoch(self) -> int:
        """Batches per epoch; the last one of each image shape may be smaller."""
        return len(self._order(0))

    def batches(self, epoch: int, *, device: torch.device) -> Iterator[Batch]:
        """This worker's parts of the batches of one epoch."""
        order = self._order(epoch)
        own = [shard(whole, self.workers) for whole in order]
        fetched = self.source.batches(epoch, [mine or whole[:1] for mine, whole in zip(own, order, strict=True)])
        for indices, (features, labels, fine) in zip(own, fetched, strict=True):
            part = slice(len(indices))  # nothing, where there are fewer samples than workers
            yield Batch(
                features[part].to(device),
                labels[part].to(device),
                [training_id(epoch, i) for i in indices],
                tuple(map_BDyx[part].to(device) for map_BDyx in fine),
                None if self.domains_S is None else torch.from_numpy(self.domains_S[indices]).to(device),
            )

    def _order(self, epoch: int) -> list[list[int]]:
        rng, size = generator(self.config.seed, "order", epoch), self.config.train.batch_size
        order = rng.permutation(len(self.source.shape_of))
        batches: list[list[int]] = []
        for shape in range(len(self.source.grids)):
            members = self._visited(order[self.source.shape_of[order] == shape]).tolist()
            batches += [members[start : start + size] for start in range(0, len(members), size)]
        return [batches[i] for i in rng.permutation(len(batches))]

    def _visited(self, members: NDArray[np.int64]) -> NDArray[np.int64]:
        """Of the samples of one shape, in random order, those that are visited: as many of each part in every epoch."""
        kept = np.ones(len(members), dtype=bool)
        for part, share in enumerate(self.shares):
            own = np.flatnonzero(self.parts_S[members] == part)
            kept[own[max(round(share * len(own)), 1) :]] = False
        return members[kept]


def labelling_of(source: Source, classes: ClassTable, balance: float) -> Labelling:
    """What labels mean, and their weights: (frequency ^ -balance), scaled to mean 1 over the pixels."""
    if balance == 0:
        return Labelling(unions=classes.unions)
    labels = len(classes.names) + len(classes.unions)
    counts = np.zeros(labels)
    for index in range(len(source.shape_of)):
        label = source.plain(index)[1]
        counts += np.bincount(label[label != IGNORE], minlength=labels)[:labels]
    if not counts.any():
        raise DataError("every pixel of the training images is void; check the label files, the classes file and `map`")
    share = counts / counts.sum()
    weight = np.where(share > 0, np.maximum(share, 1e-6), 1.0) ** -balance
    return Labelling(torch.tensor(weight / (weight * share).sum(), dtype=torch.float32), classes.unions)
