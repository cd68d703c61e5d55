"""Workers train on GPUs wherever a cluster has or can have them, and what they train on is said."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.cluster.placement import Node
from actors.errors import ClusterError
from actors.training.crew import plan_crew

TWO_OF_FOUR = [Node(8, 0), Node(8, 2), Node(8, 2)]


def test_without_a_number_there_is_a_worker_for_each_gpu_and_one_without_gpus() -> None:
    assert (
        plan_crew("auto", None, TWO_OF_FOUR, None).workers,
        plan_crew("auto", None, [Node(8, 0)], None).workers,
    ) == (4, 1)
    assert not plan_crew("cpu", None, TWO_OF_FOUR, None).gpu


def test_gpus_still_to_come_are_waited_for_and_it_is_said() -> None:
    crew = plan_crew("auto", 8, [Node(4, 0)], 16)
    assert (crew.gpu, crew.missing) == (True, 8)
    assert crew.told == "8 workers with a GPU each; 0 are there, waiting for the autoscaler to bring 8"


def test_more_workers_than_gpus_are_refused_instead_of_trained_on_the_cpu() -> None:
    with pytest.raises(ClusterError, match=r"--workers 8: the cluster has 4 GPUs; ask for 4, or set train.device=cpu"):
        plan_crew("auto", 8, TWO_OF_FOUR, None)
    with pytest.raises(ClusterError, match="has 4 GPUs and can have 6; ask for 6"):
        plan_crew("auto", 8, TWO_OF_FOUR, 6)
    with pytest.raises(ClusterError, match="the cluster has no GPU and cannot get one"):
        plan_crew("cuda", 1, [Node(8, 0)], None)
    with pytest.raises(ClusterError, match="a worker gets the GPU that Ray assigns"):
        plan_crew("cuda:1", 1, TWO_OF_FOUR, None)


def test_gpus_that_others_hold_are_not_counted_as_free() -> None:
    shared = [Node(8, 1, free_gpus=0), Node(8, 4, free_gpus=1.5)]
    assert plan_crew("auto", None, shared, None).workers == 1
    crew = plan_crew("auto", 3, shared, None)
    assert (crew.free, crew.missing, crew.held) == (1, 0, 2)
    assert crew.told == "3 workers with a GPU each; 5 are there, 1 of them free, waiting for others to let go of 2"
    crew = plan_crew("auto", 4, shared, 6)
    assert (crew.missing, crew.held) == (1, 2)
    assert crew.told.endswith("waiting for others to let go of 2 and for the autoscaler to bring 1")


def test_where_nobody_says_how_many_gpus_can_come_they_are_waited_for_if_there_are_some_or_they_are_asked_for() -> None:
    assert plan_crew("auto", 8, TWO_OF_FOUR, math.inf).missing == 4
    assert plan_crew("cuda", 8, [Node(8, 0)], math.inf).missing == 8
    assert not plan_crew("auto", 8, [Node(8, 0)], math.inf).gpu


@settings(deadline=None)
@given(
    st.sampled_from(["auto", "cuda", "cpu"]),
    st.none() | st.integers(1, 20),
    st.lists(
        st.builds(Node, cpus=st.integers(0, 8), gpus=st.integers(0, 4), free_gpus=st.floats(0, 4)),
        min_size=1,
        max_size=4,
    ),
    st.none() | st.integers(0, 12),
)
def test_whoever_is_planned_has_or_gets_what_it_needs(
    device: str, workers: int | None, there: list[Node], most: int | None
) -> None:
    try:
        crew = plan_crew(device, workers, there, most)
    except ClusterError:
        return
    gpus = sum(int(node.gpus) for node in there)
    assert crew.workers == workers or workers is None
    assert crew.gpu == (device != "cpu" and max(gpus, most or 0) > 0)
    assert crew.workers <= (crew.free + crew.held + crew.missing if crew.gpu else sum(node.cpus for node in there))
    assert crew.free + crew.held <= gpus
    assert gpus + crew.missing <= max(gpus, most or 0)
