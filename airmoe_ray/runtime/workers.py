"""Several workers that train one model on one batch: what is summed, and in which order things are put together.

Every worker takes a contiguous part of each global batch. Losses are divided by global counts, so that gradients add
up (rather than average) to those of one worker with the whole batch.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

T = TypeVar("T")


class Workers(Protocol):
    """The workers, seen from one of them."""

    rank: int
    size: int

    def total(self, value: Tensor) -> Tensor:
        """Sum over workers, without gradient."""
        ...

    def concatenated(self, rows: Tensor) -> Tensor:
        """Rows of all workers in order of rank, without gradient; workers may hold different numbers of rows."""
        ...

    def add_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Gradients become their sums over workers; one that no worker has stays None."""
        ...

    def follow_first(self, tensors: Iterable[Tensor]) -> None:
        """Everybody's tensors become those of worker 0, in place."""
        ...

    def wait(self) -> None:
        """Until every worker has come to this point."""
        ...


class OneWorker:
    """One worker."""

    rank, size = 0, 1

    def total(self, value: Tensor) -> Tensor:
        """Return the value, without gradient."""
        return value.detach()

    def concatenated(self, rows: Tensor) -> Tensor:
        """Return the rows, without gradient."""
        return rows.detach()

    def add_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Nothing to add."""

    def follow_first(self, tensors: Iterable[Tensor]) -> None:
        """Do nothing: there is no other worker."""

    def wait(self) -> None:
        """Return at once: there is nobody to wait for."""


class ProcessGroup:
    """The default process group of torch.distributed."""

    def __init__(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def total(self, value: Tensor) -> Tensor:
        """All-reduce."""
        summed = value.detach().clone()
        dist.all_reduce(summed)
        return summed

    def concatenated(self, rows: Tensor) -> Tensor:
        """All-gather, padded to the longest: collectives want equal shapes."""
        counts = [torch.zeros(1, dtype=torch.int64, device=rows.device) for _ in range(self.size)]
        dist.all_gather(counts, torch.tensor([len(rows)], device=rows.device))
        longest = max(int(count) for count in counts)
        padded = rows.new_zeros((longest, *rows.shape[1:]))
        padded[: len(rows)] = rows.detach()
        parts = [torch.empty_like(padded) for _ in range(self.size)]
        dist.all_gather(parts, padded)
        return torch.cat([part[: int(count)] for part, count in zip(parts, counts, strict=True)])

    def add_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """One all-reduce of everything, with a flag per parameter: an expert nobody used must not move."""
        known = list(parameters)
        flat = torch.cat(
            [(p.new_zeros(p.numel()) if p.grad is None else p.grad.reshape(-1)) for p in known]
            + [known[0].new_tensor([p.grad is not None for p in known])]
        )
        dist.all_reduce(flat)
        *parts, used = flat.split([*(p.numel() for p in known), len(known)])
        for parameter, part, count in zip(known, parts, used.tolist(), strict=True):
            parameter.grad = part.view_as(parameter) if count else None

    def follow_first(self, tensors: Iterable[Tensor]) -> None:
        """Broadcast."""
        for tensor in tensors:
            dist.broadcast(tensor.detach(), src=0)

    def wait(self) -> None:
        """Barrier."""
        dist.barrier()


@contextmanager
def first_then_others(workers: Workers) -> Iterator[None]:
    """Worker 0 goes through the block alone; the others follow and find its work done (a cache on disk, a folder)."""
    if workers.rank != 0:
        workers.wait()
    yield
    if workers.rank == 0:
        workers.wait()


def shard(items: Sequence[T], workers: Workers) -> Sequence[T]:
    """The contiguous part of a batch that belongs to this worker; sizes differ by at most one."""
    base, extra = divmod(len(items), workers.size)
    start = workers.rank * base + min(workers.rank, extra)
    return items[start : start + base + (workers.rank < extra)]
