"""Gradients summed over workers while they are computed: what nobody used does not travel.

Before the way back, each worker reads from its graph which parameters will get a gradient, and one short sum tells all
of them whose gradients exist anywhere. These are packed into buckets in the order in which they become known, and a
bucket is on its way as soon as it is full, while the rest is still computed. All workers send the same buckets in the
same order; one that has nothing to add to a bucket adds zeros.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn

BUCKET_BYTES = 4 << 20  # small enough that the first one leaves early, large enough that latency does not count


@dataclass
class _Bucket:
    """Parameters whose gradients travel together, with a flag each: an expert nobody used must not move."""

    parameters: list[nn.Parameter]
    missing: int  # of this worker's own gradients
    flat: Tensor | None = None
    work: "dist.Work | None" = field(default=None, repr=False)

    def send(self) -> None:
        """Start the sum."""
        grads = [p.new_zeros(p.numel()) if p.grad is None else p.grad.reshape(-1) for p in self.parameters]
        flags = self.parameters[0].new_tensor([p.grad is not None for p in self.parameters])
        self.flat = torch.cat([*grads, flags])
        self.work = dist.all_reduce(self.flat, async_op=True)

    def receive(self) -> None:
        """Wait for the sum, and put it in the place of this worker's gradients."""
        assert self.work is not None
        assert self.flat is not None
        self.work.wait()
        *parts, used = self.flat.split([*(p.numel() for p in self.parameters), len(self.parameters)])
        for parameter, part, count in zip(self.parameters, parts, used.tolist(), strict=True):
            parameter.grad = part.view_as(parameter) if count else None


def backward_together(loss: Tensor, parameters: Iterable[nn.Parameter]) -> int:
    """Gradients of the sum of all workers' losses; how many bytes of them this worker sent.

    Gradients must be None before; those of a parameter that no worker used stay None.
    """
    known = [parameter for parameter in parameters if parameter.requires_grad]
    own = _reached(loss)
    used = torch.tensor([id(parameter) in own for parameter in known], dtype=torch.int32, device=loss.device)
    dist.all_reduce(used)
    travelling = [parameter for parameter, count in zip(known, used.tolist(), strict=True) if count]
    buckets = list(_packed(travelling, own))
    bucket_of = {id(parameter): bucket for bucket in buckets for parameter in bucket.parameters}
    unsent = list(reversed(buckets))

    def arrived(parameter: Tensor) -> None:
        bucket_of[id(parameter)].missing -= 1
        while unsent and unsent[-1].missing == 0:  # in order: others wait for the same bucket
            unsent.pop().send()

    hooks = [p.register_post_accumulate_grad_hook(arrived) for p in travelling if id(p) in own]
    try:
        loss.backward()
    finally:
        for hook in hooks:
            hook.remove()
    while unsent:
        unsent.pop().send()
    for bucket in buckets:
        bucket.receive()
    return sum(bucket.flat.nbytes for bucket in buckets if bucket.flat is not None)


def _packed(parameters: Sequence[nn.Parameter], own: set[int]) -> Iterator[_Bucket]:
    """Buckets in the order of the way back, which is about that of the modules, reversed."""
    together: list[nn.Parameter] = []
    for parameter in reversed(parameters):
        if together and _differs(together, parameter):
            yield _Bucket(together, sum(id(p) in own for p in together))
            together = []
        together.append(parameter)
    if together:
        yield _Bucket(together, sum(id(p) in own for p in together))


def _differs(together: Sequence[nn.Parameter], parameter: nn.Parameter) -> bool:
    """Whether a parameter begins a new bucket: the last is full, or of another number format or device."""
    first = together[0]
    full = sum(p.numel() * p.element_size() for p in together) >= BUCKET_BYTES
    return full or (first.dtype, first.device) != (parameter.dtype, parameter.device)


def _reached(loss: Tensor) -> set[int]:
    """Ids of the parameters that the way back will come to."""
    found: set[int] = set()
    seen: set[object] = set()
    ahead = [loss.grad_fn]
    while ahead:
        node = ahead.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)  # of a leaf
        if variable is not None:
            found.add(id(variable))
        ahead += [before for before, _ in node.next_functions]
    return found
