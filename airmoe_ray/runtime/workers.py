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

from airmoe_ray.runtime.gradients import backward_together

T = TypeVar("T")


class Workers(Protocol):
    """The workers, seen from one of them."""

    rank: int
    size: int
    local_rank: int  # among the workers of the same node

    def total(self, value: Tensor) -> Tensor:
        """Sum over workers, without gradient."""
        ...

    def concatenated(self, rows: Tensor) -> Tensor:
        """Rows of all workers in order of rank, without gradient; workers may hold different numbers of rows."""
        ...

    def backward(self, loss: Tensor, parameters: Iterable[nn.Parameter]) -> None:
        """Gradients of the sum of all workers' losses; of a parameter that no worker used it stays None."""
        ...

    def follow_first(self, tensors: Iterable[Tensor]) -> None:
        """Everybody's tensors become those of worker 0, in place."""
        ...

    def wait(self) -> None:
        """Until every worker has come to this point."""
        ...


class OneWorker:
    """One worker."""

    rank, size, local_rank = 0, 1, 0

    def total(self, value: Tensor) -> Tensor:
        """Return the value, without gradient."""
        return value.detach()

    def concatenated(self, rows: Tensor) -> Tensor:
        """Return the rows, without gradient."""
        return rows.detach()

    def backward(self, loss: Tensor, parameters: Iterable[nn.Parameter]) -> None:
        """Gradients of the loss."""
        loss.backward()

    def follow_first(self, tensors: Iterable[Tensor]) -> None:
        """Do nothing: there is no other worker."""

    def wait(self) -> None:
        """Return at once: there is nobody to wait for."""


class ProcessGroup:
    """The default process group of torch.distributed."""

    def __init__(self, local_rank: int | None = None) -> None:
        """`local_rank` among the workers of this node; by default all of them are on one."""
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.local_rank = self.rank if local_rank is None else local_rank
        self.bytes_sent = 0  # of gradients, in the last step

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

    def backward(self, loss: Tensor, parameters: Iterable[nn.Parameter]) -> None:
        """Gradients are summed while the rest of them is computed."""
        self.bytes_sent = backward_together(loss, parameters)

    def follow_first(self, tensors: Iterable[Tensor]) -> None:
        """Broadcast."""
        for tensor in tensors:
            dist.broadcast(tensor.detach(), src=0)

    def wait(self) -> None:
        """Barrier."""
        dist.barrier()


@contextmanager
def first_then_others(workers: Workers) -> Iterator[None]:
    """The first worker of each node goes through the block; the others follow and find its work done.

    What is done there is kept on disk. Nodes may share it or not: where they do, their first workers share the work.
    """
    if workers.local_rank != 0:
        workers.wait()
    yield
    if workers.local_rank == 0:
        workers.wait()


def shard(items: Sequence[T], workers: Workers) -> Sequence[T]:
    """The contiguous part of a batch that belongs to this worker; sizes differ by at most one."""
    base, extra = divmod(len(items), workers.size)
    start = workers.rank * base + min(workers.rank, extra)
    return items[start : start + base + (workers.rank < extra)]
