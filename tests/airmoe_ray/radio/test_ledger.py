"""The communication ledger, counted by hand."""

import asyncio
import math
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.serving.supervisor import Supervisor
from airmoe_ray.config import Config, RoutingConfig
from airmoe_ray.errors import ConfigError
from airmoe_ray.radio.ledger import (
    Ledger,
    account,
    alternatives,
    check_budget,
    label_entropy,
    mean_ledger,
    routing_uplink_bits,
)

Configs = Callable[..., Config]


def ledger(config: Config, top_k: int = 2, gains: list[float] | None = None, snr_db: float | None = None) -> Ledger:
    return account(config, feature_dim=6, classes=3, grid=(2, 3), top_k=top_k, gains_K=gains, snr_db=snr_db)


def test_the_ledger_of_four_clients_on_a_two_by_three_grid_by_hand(make_config: Configs) -> None:
    assert ledger(make_config(channel={"snr_db": 10}), gains=[1.0, 0.5]) == Ledger(
        downlink_broadcast_bits=6 * 6 * 32 + 8 * 32,
        uplink_routing_bits=4 * (8 * 32 + 1),
        downlink_routed_bits=4,
        uplink_report_bits=2 * 64,
        downlink_weights_bits=2 * 32 + 32,
        air_channel_uses=18,
        uplink_raw_feature_bits=4 * 16 * 6 * 32,
        tdma_bits=2 * 18 * 8,
        tdma_channel_uses=42 + 56,  # 144 bits at log2(11) = 3.46 and at log2(6) = 2.58 bits per use
    )


def test_other_ways_by_hand(make_config: Configs) -> None:
    config = make_config(channel={"snr_db": 10})
    spent = mean_ledger([ledger(config, gains=[1.0, 0.5])])
    found = alternatives(config, spent, classes=3, entropy=label_entropy([8, 4, 4]))
    assert label_entropy([8, 4, 4]) == pytest.approx(1.5)
    assert label_entropy([5, 0, 0]) == 0
    assert found.label_bits == pytest.approx(1.5 * 2 * 6)  # H bits for each of two clients' six cells
    assert found.label_channel_uses == pytest.approx((42 + 56) * 18 / 288)  # a sixteenth of eight bits a logit
    assert found.gate_uplink_bits == 4
    assert found.mirrored_frl_bits == 4 * 3 * 8 * 32
    assert found.mirrored_inputs == pytest.approx(4 * 3 * 8 * 32 / (4 * 257))
    assert found.broadcast_bits == 6 * 6 * 32 + 8 * 32
    assert alternatives(config, spent, classes=3, entropy=None).label_bits is None


@settings(deadline=None, max_examples=20)
@given(gains=st.lists(st.floats(0.05, 5), min_size=1, max_size=4), snr_db=st.floats(-5, 30))
def test_air_costs_the_same_for_any_number_of_clients_and_tdma_pays_for_each(
    make_config: Configs, gains: list[float], snr_db: float
) -> None:
    config = make_config()
    one, more = ledger(config, 1, gains[:1], snr_db), ledger(config, len(gains), gains, snr_db)
    assert more.air_channel_uses == one.air_channel_uses == 18
    assert more.tdma_bits == len(gains) * one.tdma_bits
    alone = [ledger(config, 1, [gain], snr_db).tdma_channel_uses for gain in gains]
    assert more.tdma_channel_uses == sum(uses for uses in alone if uses is not None)
    assert alone[0] == math.ceil(144 / math.log2(1 + 10 ** (snr_db / 10) * gains[0]))


@pytest.mark.parametrize(
    ("routing", "reals"),
    [
        ({"rule": "js"}, 8),
        ({"rule": "js", "top_k": 4}, 0),  # K = N: everybody is routed, whatever P_j is
        ({"rule": "random"}, 0),
        ({"rule": "airmoe_ray.baselines.linear_moe:LinearGate"}, 0),
        ({"rule": "js", "fusion": "equal"}, 8),
    ],
)
def test_statistics_count_where_the_rule_reads_them(
    make_config: Configs, routing: dict[str, object], reals: int
) -> None:
    assert ledger(make_config(routing=routing)).uplink_routing_bits == 4 * (reals * 32 + 1)


@pytest.mark.parametrize(("fusion", "reals"), [("divergence", 2), ("equal", 1)])
def test_delta_counts_where_it_weighs(make_config: Configs, fusion: str, reals: int) -> None:
    assert ledger(make_config(routing={"fusion": fusion})).uplink_report_bits == 2 * reals * 32


def test_a_request_is_charged_by_its_own_routing(make_config: Configs) -> None:
    def charged(routing: RoutingConfig, clients: int = 4) -> int:
        return account(
            make_config(), feature_dim=6, classes=3, grid=(2, 3), top_k=2, clients=clients, routing=routing
        ).uplink_routing_bits

    chosen = make_config().routing.model_copy(update={"top_k": 4})
    assert charged(chosen) == 4
    assert charged(chosen, clients=5) == routing_uplink_bits(5, 8)  # K < N again once a client is added
    assert charged(chosen.model_copy(update={"top_k": 1})) == routing_uplink_bits(4, 8)


def test_tdma_channel_uses_need_channel_gains(make_config: Configs) -> None:
    result = ledger(make_config())
    assert result.tdma_channel_uses is None


def test_a_configuration_over_its_routing_budget_is_refused_with_the_figure(make_config: Configs) -> None:
    needed = routing_uplink_bits(4, 8)
    assert needed == 1028
    check_budget(make_config(routing={"budget_bits": needed}))
    check_budget(make_config())
    with pytest.raises(ConfigError, match=r"C_route = 1028 bits .*budget_bits = 1027") as error:
        check_budget(make_config(routing={"budget_bits": needed - 1}))
    supervisor = object.__new__(Supervisor)
    supervisor.config = make_config(routing={"budget_bits": needed})
    with pytest.raises(ConfigError, match=r"C_route = 1285 bits"):  # nor can a running system be scaled beyond it
        asyncio.run(supervisor.scale(5))
    assert "\n" not in str(error.value)
