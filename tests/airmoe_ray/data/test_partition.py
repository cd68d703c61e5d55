"""Laws of the client partition: a disjoint cover, nobody empty, domains kept apart."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from airmoe_ray.data.partition import Rule, partition
from airmoe_ray.errors import ConfigError

RULES: tuple[Rule, ...] = ("domain", "dirichlet", "iid")

domain_lists = st.lists(st.integers(0, 5), min_size=1, max_size=60)
seeds = st.integers(0, 2**32 - 1)


def deal(
    domains: list[int], clients: int, *, rule: Rule = "domain", alpha: float = 0.5, seed: int = 0
) -> list[list[int]]:
    parts = partition(domains, clients, rule=rule, alpha=alpha, rng=np.random.default_rng(seed))
    return [part.tolist() for part in parts]


@given(domains=domain_lists, rule=st.sampled_from(RULES), alpha=st.floats(1e-4, 1e4), seed=seeds, data=st.data())
def test_every_sample_goes_to_exactly_one_client_and_none_is_empty(
    domains: list[int], rule: Rule, alpha: float, seed: int, data: st.DataObject
) -> None:
    clients = data.draw(st.integers(1, len(domains)))
    parts = deal(domains, clients, rule=rule, alpha=alpha, seed=seed)
    assert len(parts) == clients
    assert all(parts)
    assert sorted(i for part in parts for i in part) == list(range(len(domains)))
    assert all(part == sorted(part) for part in parts)


@given(domains=domain_lists, seed=seeds, data=st.data())
def test_with_enough_clients_each_sees_one_domain(domains: list[int], seed: int, data: st.DataObject) -> None:
    clients = data.draw(st.integers(len(set(domains)), len(domains)))
    for part in deal(domains, clients, seed=seed):
        assert len({domains[i] for i in part}) == 1


@given(domains=domain_lists, seed=seeds, data=st.data())
def test_with_few_clients_domains_stay_whole(domains: list[int], seed: int, data: st.DataObject) -> None:
    clients = data.draw(st.integers(1, len(set(domains))))
    parts = deal(domains, clients, seed=seed)
    holders = [{j for j, part in enumerate(parts) for i in part if domains[i] == d} for d in set(domains)]
    assert all(len(holder) == 1 for holder in holders)


def test_larger_domains_get_more_clients() -> None:
    parts = deal([0] * 60 + [1] * 30 + [2] * 10, clients=10)
    assert [sum(part[0] in block for part in parts) for block in (range(60), range(60, 90), range(90, 100))] == [
        6,
        3,
        1,
    ]


def test_small_alpha_is_more_skewed_than_large() -> None:
    def spread(alpha: float) -> float:
        """Mean over clients and domains of the squared distance from an even deal."""
        domains = np.repeat([0, 1, 2], 100)
        parts = deal(domains.tolist(), clients=5, rule="dirichlet", alpha=alpha)
        counts = np.stack([np.bincount(domains[part], minlength=3) for part in parts])
        return float(((counts - 20) ** 2).mean())

    assert spread(0.05) > 10 * spread(10.0)


@pytest.mark.parametrize("rule", RULES)
def test_the_generator_decides(rule: Rule) -> None:
    domains = [0, 1] * 50
    assert deal(domains, 6, rule=rule, seed=1) == deal(domains, 6, rule=rule, seed=1)
    assert deal(domains, 6, rule=rule, seed=1) != deal(domains, 6, rule=rule, seed=2)


def test_what_cannot_be_dealt_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="5 clients for 3 samples"):
        deal([0, 0, 1], 5)
    with pytest.raises(ConfigError, match="0 clients"):
        deal([0, 0, 1], 0)
    with pytest.raises(ConfigError, match="alpha 0"):
        deal([0, 0, 1], 2, rule="dirichlet", alpha=0.0)
    with pytest.raises(ConfigError, match="'random'"):
        deal([0, 0, 1], 2, rule="random")  # type: ignore[arg-type]
