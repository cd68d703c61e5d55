"""Speed as ratios of two things measured interleaved in one run."""

import statistics
import time

import pytest
import torch

from airmoe_ray.config import Config
from airmoe_ray.config_file import load_config
from airmoe_ray.data import open_dataset
from airmoe_ray.features.cache_builder import cached_views
from airmoe_ray.features.sources import CachedSource
from airmoe_ray.model.moe import AirMoE
from airmoe_ray.runtime.progress import Silent
from airmoe_ray.training.batches import Schedule
from airmoe_ray.training.trainer import Batch, Trainer

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


class StandIn:
    """Maps of the embedded backbone's shape, without its work."""

    name, fingerprint, dim, stride, pad_multiple, mean = "stand-in", "stand-in", 320, 8, 8, torch.zeros(1)

    def __call__(self, images_B3HW: torch.Tensor) -> torch.Tensor:
        batch, _, height, width = images_B3HW.shape
        return torch.randn(batch, self.dim, height // self.stride, width // self.stride)


@pytest.mark.slow
def test_reading_the_cache_costs_at_most_a_twentieth_of_a_step(tmp_path):
    views = "data.views=[identity, hflip]"
    config = load_config("quickstart", [f"data.cache_dir={tmp_path}", "data.train_count=96", views])
    caches = cached_views(open_dataset(config.data, "train"), StandIn(), config, Silent().progress)
    schedule, cpu = Schedule(CachedSource(caches, config), config), torch.device("cpu")
    subject = Trainer(AirMoE(config, feature_dim=320, classes=10, dilations=(2, 4, 8)), config, total_steps=100)
    reading, stepping = [], []
    for epoch in range(2):
        cached = schedule.batches(epoch, device=cpu)
        begun = time.process_time()
        for batch in cached:
            reading.append(time.process_time() - begun)
            begun = time.process_time()
            subject.step(batch)  # on tensors that are in memory by now
            stepping.append(time.process_time() - begun)
            begun = time.process_time()
    ratio = statistics.median(reading) / statistics.median(stepping)
    assert ratio <= 0.05, f"{ratio:.3f}"
