"""Packs, pins and GPU shares: what fits is planned, what does not is refused in words."""

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.cluster.placement import Node, Plan, no_room, plan, plan_hosts, shortage, wanted_plan
from actors.errors import ClusterError
from airmoe_ray.config import ClusterConfig


def planned(experts: int, gpus: float, cpus: float = 8, **settings: float | str) -> Plan:
    return plan(ClusterConfig.model_validate(settings), experts, [Node(cpus, gpus)])


def planned_on(experts: int, nodes: list[Node], **settings: object) -> Plan:
    return plan(ClusterConfig.model_validate(settings), experts, nodes)


def fit(shares: list[float], gpus: int) -> bool:
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


@settings(deadline=None)
@given(st.integers(1, 40), st.integers(1, 12))
def test_auto_shares_put_all_experts_and_the_cloud_on_the_gpus(experts: int, gpus: int) -> None:
    found = planned(experts, gpus)
    assert found.gpus_per_cloud == (0.5 if gpus == 1 else 1)
    assert found.gpus_per_expert > 0
    assert fit([found.gpus_per_expert] * experts + [found.gpus_per_cloud], gpus)


@settings(deadline=None)
@given(st.integers(1, 12), st.integers(0, 8), st.sampled_from([0, 0.25, 0.3, 0.5, 0.6, 1, 1.5, 2]), st.booleans())
def test_a_share_is_granted_exactly_when_the_gpus_hold_it(experts: int, gpus: int, share: float, cloud: bool) -> None:
    wanted = {"gpus_per_expert": share, "gpus_per_cloud": 0.5 if cloud else 0}
    shares = [share] * experts * (share > 0) + [0.5] * cloud
    try:
        found = planned(experts, gpus, **wanted)
    except ClusterError:
        assert not fit(shares, gpus)
    else:
        assert fit(shares, gpus)
        assert found.gpus_per_expert == (math.ceil(share) if share > 1 else share)  # Ray: whole ones above 1


def test_of_four_gpus_the_cloud_has_one_and_ten_experts_share_the_others() -> None:
    found = planned(10, 4)
    assert (found.gpus_per_expert, found.gpus_per_cloud) == (0.25, 1)
    assert planned(10, 4, gpus_per_cloud=0).gpus_per_expert == 0.3333
    assert planned(10, 4, gpus_per_cloud=0.25).gpus_per_cloud == 0.25


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


@settings(deadline=None)
@given(st.integers(1, 200), st.floats(0.5, 64))
def test_all_actors_claim_half_of_the_cpus_at_most(experts: int, cpus: float) -> None:
    assert 0 < planned(experts, 0, cpus).cpus * (experts + 2) <= cpus / 2 + 1e-9


def test_a_cluster_without_cpus_is_refused() -> None:
    with pytest.raises(ClusterError, match="10 experts need some CPU each, the cluster has 0"):
        planned(10, 0, 0)


def held_by_some_assignment(shares: list[float], nodes: list[int]) -> bool:
    """Whether shares can be dealt to the nodes so that each holds its own; every way is tried."""
    return any(
        all(fit([s for s, home in zip(shares, homes, strict=True) if home == n], g) for n, g in enumerate(nodes))
        for homes in itertools.product(range(len(nodes)), repeat=len(shares))
    )


@settings(deadline=None)
@given(
    st.integers(1, 4),
    st.lists(st.integers(0, 3), min_size=1, max_size=3),
    st.sampled_from([0.3, 0.5, 0.6, 1, 2, 3]),
    st.sampled_from([0, 0.4, 0.5, 1, 2]),
)
def test_a_share_never_straddles_two_nodes(experts: int, nodes: list[int], share: float, cloud: float) -> None:
    config = ClusterConfig(gpus_per_expert=share, gpus_per_cloud=cloud)
    there = [Node(4, gpus) for gpus in nodes]
    shares = [share] * experts + [cloud] * (cloud > 0)
    assert (shortage(wanted_plan(config, experts, there), there) is None) == held_by_some_assignment(shares, nodes)


def test_whole_gpus_on_too_small_nodes_are_refused_with_what_each_node_has() -> None:
    with pytest.raises(
        ClusterError, match=r"2 experts x 2 GPU need 4 GPUs, the cluster has 4 \(1 \+ 1 \+ 2, and a share"
    ):
        planned_on(2, [Node(4, 1), Node(4, 1), Node(4, 2)], gpus_per_expert=2, gpus_per_cloud=0)


@settings(deadline=None)
@given(st.integers(1, 60), st.integers(1, 25), st.dictionaries(st.integers(0, 59), st.sampled_from("ab"), max_size=20))
def test_hosts_hold_every_client_once_in_order_and_never_mix_pins(count: int, size: int, pin: dict[int, str]) -> None:
    found = plan_hosts(ClusterConfig(pin=pin), range(count), size=size)
    assert sorted(client for host in found for client in host.clients) == list(range(count))
    assert all(list(host.clients) == sorted(host.clients) and len(host.clients) <= size for host in found)
    assert all(pin.get(client) == host.pin for host in found for client in host.clients)
    kinds = [[client for client in range(count) if pin.get(client) == kind] for kind in (None, "a", "b")]
    assert len(found) == sum(math.ceil(len(kind) / size) for kind in kinds)


def test_a_host_of_several_clients_takes_the_share_of_one_actor() -> None:
    assert planned(1000, 4, experts_per_actor=250, gpus_per_expert=1, gpus_per_cloud=0).gpus_per_expert == 1
    with pytest.raises(ClusterError, match=r"^1000 experts in 4 actors x 1 GPU need 4 GPUs, the cluster has 3"):
        planned(1000, 3, experts_per_actor=250, gpus_per_expert=1)


@settings(deadline=None)
@given(st.integers(1, 200), st.lists(st.integers(1, 16), min_size=1, max_size=4))
def test_packed_by_itself_every_core_has_an_actor_and_no_actor_more_than_its_part(
    experts: int, cpus: list[int]
) -> None:
    found = planned_on(experts, [Node(count, 0) for count in cpus], experts_per_actor="auto")
    assert len(found.hosts) <= sum(cpus)
    assert found.experts_per_actor == max(len(host.clients) for host in found.hosts) == math.ceil(experts / sum(cpus))


@settings(deadline=None)
@given(st.integers(1, 60), st.integers(1, 9), st.sampled_from(["auto", 0.25, 0.5, 1.0]), st.sampled_from([0, 0.5, 1]))
def test_packed_by_itself_actors_have_the_gpus_that_the_cloud_leaves(
    experts: int, gpus: int, share: float | str, cloud: float
) -> None:
    wanted = ClusterConfig.model_validate(
        {"experts_per_actor": "auto", "gpus_per_expert": share, "gpus_per_cloud": cloud}
    )
    node = Node(64, gpus)
    found = wanted_plan(wanted, experts, [node])
    each = 1 - cloud if gpus == 1 else 1.0  # where a GPU is for experts
    held = sum(
        fit([each if share == "auto" else share] * count + [cloud] * (cloud > 0), gpus)
        for count in range(1, experts + 1)
    )
    if share == "auto" and each == 0:  # the cloud has the only GPU, and experts the cores
        assert (found.gpus_per_expert, found.experts_per_actor) == (0, 1)
    elif held == 0:
        assert shortage(found, [node]) is not None
    else:
        assert found.experts_per_actor == math.ceil(experts / held)
        assert shortage(found, [node]) is None
        assert found.gpus_per_expert == (each if share == "auto" else share)


def test_one_client_to_an_actor_is_the_default_and_ten_on_two_cores_are_packed_by_fives() -> None:
    assert planned(10, 0, 2).experts_per_actor == 1
    found = planned(10, 0, 2, experts_per_actor="auto")
    assert [len(host.clients) for host in found.hosts] == [5, 5]
    assert found.packing == "10 experts in 2 actors, at most 5 in each"
    assert wanted_plan(ClusterConfig(experts_per_actor="auto"), 10, [], grows=True).experts_per_actor == 1
    assert len(planned(10, 4, experts_per_actor="auto").hosts) == 3  # the cloud has one GPU of the four


SITES = [Node(64, 2), Node(2, 1, frozenset({"site_b"})), Node(2, 0, frozenset({"site_c"}))]


def test_a_pin_that_no_node_offers_is_refused_with_what_they_offer() -> None:
    with pytest.raises(
        ClusterError, match=r"expert 3 is pinned to moon .*, which no node offers; nodes offer site_b, si"
    ):
        planned_on(10, SITES, pin={3: "moon"})


def test_shares_must_fit_where_their_clients_are_pinned() -> None:
    pinned = dict.fromkeys(range(3), "site_b")
    with pytest.raises(
        ClusterError, match=r"^3 experts x 0\.5 GPU need 2 GPUs on nodes that offer site_b, which have 1"
    ):
        planned_on(3, SITES, pin=pinned, gpus_per_expert=0.5)
    assert planned_on(3, SITES, pin=pinned).gpus_per_expert == 0.3333  # auto divides what is there
    assert planned_on(2, SITES, pin={0: "site_c"}).gpus_per_expert == 0


def test_the_claim_on_cpus_leaves_room_where_clients_are_pinned() -> None:
    pinned = planned_on(10, SITES, pin=dict.fromkeys(range(10), "site_b"), gpus_per_expert=0)
    assert 0 < 10 * pinned.cpus <= 2


@settings(deadline=None)
@given(st.integers(1, 20), st.sampled_from([0.1, 0.25, 0.5, 1]), st.integers(1, 4), st.integers(1, 8))
def test_the_claim_on_cpus_leaves_room_beside_the_gpus(experts: int, share: float, gpus: int, cpus: int) -> None:
    nodes = [Node(64, 0), *[Node(cpus, gpus)] * 21]  # one for each expert and the cloud
    found = planned_on(experts, nodes, gpus_per_expert=share, gpus_per_cloud=share)
    most = min(experts + 1, gpus * math.floor(1 / share))
    assert 0 < most * found.cpus <= cpus


def test_a_plan_for_nodes_that_have_yet_to_come_can_be_stated() -> None:
    config = ClusterConfig(gpus_per_expert=0.5)
    found = wanted_plan(config, 4, [Node(0, 0)], grows=True)
    assert (found.gpus_per_expert, found.gpus_per_cloud) == (0.5, 0.5)
    assert found.cpus > 0
    assert shortage(found, [Node(0, 0)]) is not None
    assert shortage(found, [Node(0, 0), Node(8, 4)]) is None


LABELLED = [Node(8, 0, labels={"market": "on-demand"}), Node(8, 4, labels={"market": "spot", "zone": "a"})]


def test_roles_ask_for_labels_and_one_that_nobody_has_is_refused_with_what_there_is() -> None:
    labels = {"cloud": {"market": "on-demand"}, "channel": {"market": "!spot"}, "expert": {"zone": "in(a, b)"}}
    found = planned_on(8, LABELLED, labels=labels, gpus_per_expert=0.5, gpus_per_cloud=0)
    assert found.labels == labels
    with pytest.raises(ClusterError, match=r"the expert asks for a node with zone=c .* nodes have market=on-demand, m"):
        planned_on(8, LABELLED, labels={"expert": {"zone": "c"}})
    with pytest.raises(ClusterError, match="the cloud needs 1 GPU on a node with its labels"):
        planned_on(8, LABELLED, labels=labels, gpus_per_expert=0.25, gpus_per_cloud=1)


@pytest.mark.parametrize(
    ("selector", "has"),
    [("spot", True), ("!spot", False), ("in(spot, x)", True), ("!in(spot, x)", False), ("x", False), ("!x", True)],
)
def test_selectors_mean_what_rays_do(selector: str, has: bool) -> None:
    assert Node(1, 0, labels={"market": "spot"}).has({"market": selector}) is has
    assert Node(1, 0).has({"market": selector}) is selector.startswith("!")


@settings(deadline=None)
@given(st.integers(1, 4), st.sampled_from([0.1, 0.25, 0.3333, 0.5, 1.0]), st.integers(0, 12), st.integers(1, 40))
def test_hosts_that_join_are_refused_exactly_when_the_gpus_are_full(
    gpus: int, share: float, there: int, added: int
) -> None:
    room = gpus * math.floor(1 / share + 1e-9)
    there = min(there, room)
    node = Node(64, gpus, free_cpus=64, free_gpus=gpus - there * share)
    plan_ = Plan((), share, 0.0, cpus=0.1)
    hosts = plan_hosts(ClusterConfig(), range(added), size=1)
    assert (no_room(plan_, hosts, [node]) is None) == (there + added <= room)
