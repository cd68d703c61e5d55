"""Speed as ratios of two things measured interleaved in one run."""

import statistics
import time

import pytest
import torch

from airmoe_ray.config import Config
from airmoe_ray.moe import AirMoE
from airmoe_ray.training import Batch, Trainer

BATCH, K = 16, 5


def trainer(clients: int) -> Trainer:
    config = Config.model_validate({"experts": {"count": clients, "hidden": 96, "width": 48}, "routing": {"top_k": K}})
    return Trainer(AirMoE(config, feature_dim=320, classes=10, dilations=(2, 4, 8)), config, total_steps=100)


@pytest.mark.slow
def test_a_step_with_twice_the_clients_costs_at_most_a_third_more():
    features = torch.randn(BATCH, 320, 24, 32, generator=torch.Generator().manual_seed(0))
    labels = torch.zeros(BATCH, 192, 256, dtype=torch.uint8)
    trainers = {n: trainer(n) for n in (10, 20)}
    seconds: dict[int, list[float]] = {n: [] for n in trainers}
    for step in range(6):
        for n, subject in trainers.items():
            begun = time.process_time()
            result = subject.step(Batch(features, labels, [step * BATCH + i for i in range(BATCH)]))
            seconds[n].append(time.process_time() - begun)
            assert 0.7 * BATCH * K <= result.forwards <= BATCH * K
    ratio = statistics.median(seconds[20][1:]) / statistics.median(seconds[10][1:])
    assert ratio <= 1.3, f"{ratio:.2f}"
