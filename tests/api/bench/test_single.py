"""The plain reading computes what the model computes, and figures of one process answer to what slows it down."""

import time

import pytest
import torch

from airmoe_ray.config_file import load_config
from airmoe_ray.model.moe import AirMoE
from airmoe_ray.radio.channel import draw_gamma
from api.bench.single import model as bench
from api.bench.single.plain import plain_logits

SMALL = ["experts.hidden=16", "experts.width=16", "channel.snr_db=120", "channel.gamma_th=0.3"]


@pytest.mark.parametrize("score", ["linear", "reciprocal"])
@torch.inference_mode()
def test_the_plain_reading_gives_the_logits_of_the_model(score: str) -> None:
    config = load_config("quickstart", [*SMALL, f"routing.score={score}"])
    torch.manual_seed(0)
    model = AirMoE(config, feature_dim=24, classes=5, dilations=(1, 2, 3)).eval()
    features = torch.randn(6, 24, 8, 10)
    expected = model(features, range(6))
    gamma = draw_gamma(range(6), config.experts.count, config=config.channel, seed=config.seed)
    assert expected.round.faded_BN.gather(1, expected.routing.selected_BK).any(), "nobody that was selected has faded"
    assert plain_logits(model, features, gamma) == pytest.approx(expected.logits_BChw, abs=1e-3)


def test_a_model_that_dawdles_is_slower_than_the_plain_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config("quickstart", SMALL)
    whole = AirMoE.forward

    def dawdle(*arguments, **options):
        time.sleep(1.0)
        return whole(*arguments, **options)

    monkeypatch.setattr(AirMoE, "forward", dawdle)
    assert bench.inprocess_speed(config, rounds=1, seconds=0.5).value < 0.9


def test_routing_that_costs_per_client_shows_in_the_growth_with_n(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = bench.route

    def per_client(query, stat, **options):
        time.sleep(1e-3 * stat.shape[1])
        return whole(query, stat, **options)

    usual = bench.n_scaling(80, rounds=1, seconds=0.1).value
    monkeypatch.setattr(bench, "route", per_client)
    slow = bench.n_scaling(80, rounds=1, seconds=0.1)
    assert slow.value > 4
    assert slow.value > 1.5 * usual


def test_a_slow_channel_is_seen_and_its_symbols_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    config, whole = load_config("quickstart", []), bench.deliver
    usual = bench.channel_throughput(config, rounds=1, seconds=0.1)

    def slow(*arguments, **options):
        time.sleep(0.2)
        return whole(*arguments, **options)

    monkeypatch.setattr(bench, "deliver", slow)
    found = bench.channel_throughput(config, rounds=1, seconds=0.1)
    assert found.value < 0.6 * usual.value
    assert found.detail["symbols_per_s"] < 8 * 12 * 24 * 32 / 0.2
