"""Counter-based randomness: a draw depends on what it is for, never on when or where it is made.

key = hash(seed, purpose), counter = (id, client). The same request gives the same fading and noise in-process, on
any number of workers, on CPU and GPU nodes, and however requests are batched. Everything is drawn on the CPU.

Suffixes: B inputs, N clients.
"""

import hashlib
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (0x9E3779B9, 0xBB67AE85)
_LOW_32 = np.uint64(0xFFFFFFFF)
_SHIFT_32 = np.uint64(32)
_LOW_64 = 2**64 - 1


def derive_key(seed: int, purpose: str) -> int:
    """64-bit key of one stream; different purposes never share random numbers."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{purpose}".encode(), digest_size=8).digest(), "little")


def generator(seed: int, purpose: str, counter: int = 0) -> np.random.Generator:
    """A sequential stream for one purpose (initialisation, data order, noise of one input, …).

    `counter` (taken modulo 2^64, as ids are) starts streams 2^128 draws apart, so they never overlap.
    """
    start = (counter & _LOW_64) << 128
    return np.random.Generator(np.random.Philox(key=derive_key(seed, purpose), counter=start))


def torch_generator(seed: int, purpose: str) -> torch.Generator:
    """A sequential torch stream for one purpose, on the CPU."""
    return torch.Generator().manual_seed(derive_key(seed, purpose) & (2**63 - 1))


def training_id(epoch: int, index: int) -> int:
    """Channel id of a training sample: every epoch sees fresh fading, and a resumed run the same one."""
    return (epoch << 40) | index


def training_index(id_: int) -> int:
    """The sample that a channel id of training belongs to."""
    return id_ & ((1 << 40) - 1)


def evaluation_id(index: int, draw: int = 0) -> int:
    """Channel id of an evaluated sample, for each of several draws another; never one of training."""
    return (1 << 63) | (draw << 40) | index


def philox_4x32(counters: NDArray[np.uint32], key: int) -> NDArray[np.uint32]:
    """Philox4x32-10 (Salmon et al., SC'11) of many counters at once: (..., 4) words in, (..., 4) random words out."""
    c0, c1, c2, c3 = (counters[..., i].astype(np.uint64) for i in range(4))
    k0, k1 = key & 0xFFFFFFFF, key >> 32
    for _ in range(10):
        product_0, product_1 = _MULTIPLIERS[0] * c0, _MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (
            (product_1 >> _SHIFT_32) ^ c1 ^ np.uint64(k0),
            product_1 & _LOW_32,
            (product_0 >> _SHIFT_32) ^ c3 ^ np.uint64(k1),
            product_0 & _LOW_32,
        )
        k0, k1 = (k0 + _WEYL[0]) & 0xFFFFFFFF, (k1 + _WEYL[1]) & 0xFFFFFFFF
    return np.stack([c0, c1, c2, c3], axis=-1).astype(np.uint32)


def complex_normal_BN(
    ids_B: Sequence[int], clients: int | ArrayLike, *, seed: int, purpose: str
) -> NDArray[np.complex128]:
    """One CN(0, 1) number per input and client, in one vectorised call.

    `clients` is how many there are, or the ids of some: (N), or (B, N) where every input has its own. A client's number
    does not depend on who else is drawn for. Box-Muller on 64-bit uniforms; u1 is taken from (0, 1] so that the
    logarithm is finite.
    """
    ids = np.asarray([i & _LOW_64 for i in ids_B], dtype=np.uint64)
    members = np.asarray(np.arange(clients) if isinstance(clients, int) else clients, dtype=np.uint32)
    counters = np.zeros((len(ids), members.shape[-1], 4), dtype=np.uint32)
    counters[..., 0] = (ids & _LOW_32).astype(np.uint32)[:, None]
    counters[..., 1] = (ids >> _SHIFT_32).astype(np.uint32)[:, None]
    counters[..., 2] = members
    words = philox_4x32(counters, derive_key(seed, purpose)).astype(np.uint64)
    u1 = (((words[..., 0] << _SHIFT_32 | words[..., 1]) >> np.uint64(11)).astype(np.float64) + 1.0) * 2.0**-53
    u2 = ((words[..., 2] << _SHIFT_32 | words[..., 3]) >> np.uint64(11)).astype(np.float64) * 2.0**-53
    # |z|^2 = -ln u1 is Exp(1), so E|z|^2 = 1
    return np.sqrt(-np.log(u1)) * np.exp(2j * np.pi * u2)
