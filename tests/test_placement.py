"""GPU shares: what fits is planned, what does not is refused in words."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.errors import ClusterError
from actors.placement import Node, Plan, plan
from airmoe_ray.config import ClusterConfig


def planned(experts: int, gpus: float, cpus: float = 8, **settings: float | str) -> Plan:
    return plan(ClusterConfig.model_validate(settings), experts, [Node(cpus, gpus)])


def pack(shares: list[float], gpus: int) -> bool:
    """Whether first-fit puts every share on one of the GPUs, as Ray does; shares above 1 take whole ones."""
    free = [1.0] * gpus
    for share in sorted(shares, reverse=True):
        whole = max(math.ceil(share), 1)
        homes = [g for g, left in enumerate(free) if left >= min(share, 1) - 1e-9][:whole]
        if len(homes) < whole:
            return False
        for home in homes:
            free[home] -= min(share, 1)
    return True


@given(st.integers(1, 40), st.integers(1, 12))
def test_auto_shares_put_all_experts_and_the_cloud_on_the_gpus(experts: int, gpus: int) -> None:
    found = planned(experts, gpus)
    assert found.gpus_per_expert == found.gpus_per_cloud > 0
    assert pack([found.gpus_per_expert] * (experts + 1), gpus)


@given(st.integers(1, 12), st.integers(0, 8), st.sampled_from([0, 0.25, 0.3, 0.5, 0.6, 1, 1.5, 2]), st.booleans())
def test_a_share_is_granted_exactly_when_the_gpus_hold_it(experts: int, gpus: int, share: float, cloud: bool) -> None:
    wanted = {"gpus_per_expert": share, "gpus_per_cloud": 0.5 if cloud else 0}
    shares = [share] * experts * (share > 0) + [0.5] * cloud
    try:
        found = planned(experts, gpus, **wanted)
    except ClusterError:
        assert not pack(shares, gpus)
    else:
        assert pack(shares, gpus)
        assert found.gpus_per_expert == (math.ceil(share) if share > 1 else share)  # Ray: whole ones above 1


def test_four_gpus_and_ten_experts_give_a_third_each() -> None:
    assert planned(10, 4) == Plan(0.3333, 0.3333, planned(10, 4).cpus)


def test_the_clouds_share_yields_to_the_experts_unless_it_was_asked_for() -> None:
    assert planned(8, 4, gpus_per_expert=0.5).gpus_per_cloud == 0
    with pytest.raises(ClusterError, match=r"8 experts x 0\.5 GPU and the cloud 0\.5 need 5 GPUs, the cluster has 4"):
        planned(8, 4, gpus_per_expert=0.5, gpus_per_cloud=0.5)


def test_too_many_shares_are_refused_with_the_sum() -> None:
    with pytest.raises(ClusterError, match=r"^10 experts x 0\.5 GPU need 5 GPUs, the cluster has 4; lower"):
        planned(10, 4, gpus_per_expert=0.5)


def test_without_a_gpu_everything_runs_on_cpus_and_asking_for_one_is_refused() -> None:
    assert planned(10, 0).gpus_per_expert == planned(10, 0).gpus_per_cloud == 0
    with pytest.raises(ClusterError, match="the cluster has 0"):
        planned(10, 0, gpus_per_expert=0.1)


@given(st.integers(1, 200), st.floats(0.5, 64))
def test_all_actors_claim_half_of_the_cpus_at_most(experts: int, cpus: float) -> None:
    assert 0 < planned(experts, 0, cpus).cpus * (experts + 2) <= cpus / 2 + 1e-9


def test_a_cluster_without_cpus_is_refused() -> None:
    with pytest.raises(ClusterError, match="10 experts need some CPU each, the cluster has 0"):
        planned(10, 0, 0)
