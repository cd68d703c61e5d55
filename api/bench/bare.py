"""What Ray itself takes for the calls of one image: the floor under `serve_overhead_ms`."""

import statistics
import time
from typing import Any

import numpy as np
import ray

from actors.cluster.connection import cluster


class Nothing:
    """Takes anything, does nothing."""

    def take(self, *_: object) -> bytes:
        """A small reply."""
        return b"ok"


def bare_calls_ms(*, clients: int, routed: int, feature_bytes: int, image_bytes: int, rounds: int = 60) -> float:
    """Median time of the same pattern of calls between actors that do nothing [ms].

    One call with the image, a fan-out to all clients, one to the routed with the features by reference, one more to the
    routed whose replies go on to another actor.
    """
    features, image, small = np.zeros(feature_bytes, np.uint8), np.zeros(image_bytes, np.uint8), bytes(900)
    with cluster():
        actors: list[Any] = [ray.remote(Nothing).options(num_cpus=0).remote() for _ in range(clients + 1)]
        *experts, channel = actors
        ray.get([actor.take.remote() for actor in actors])
        times = []
        for _ in range(rounds):
            started = time.perf_counter()
            ray.get(channel.take.remote(image))
            ray.get([expert.take.remote(small) for expert in experts])
            shared = ray.put(features)
            ray.get([expert.take.remote(small, shared) for expert in experts[:routed]])
            ray.get(channel.take.remote(*(expert.take.remote(small) for expert in experts[:routed])))
            times.append(1e3 * (time.perf_counter() - started))
    return statistics.median(times)
