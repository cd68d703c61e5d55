"""Experts on GPUs, which Ray counts whether or not the machine has any."""

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import ray

from actors.cluster.connection import cluster
from actors.errors import ClusterError
from actors.serving.system import System


@pytest.fixture(scope="module")
def four_gpus() -> Iterator[None]:
    with cluster(cpus=4, gpus=4):
        yield


@pytest.mark.usefixtures("four_gpus")
def test_ten_experts_and_the_cloud_share_four_gpus_and_see_only_their_own(
    make_system: Callable[..., System], tmp_path: Path
) -> None:
    system = make_system(tmp_path, experts={"count": 10})
    hosts = system.start()
    cloud = system.cloud.state().get()
    seen = [ray.get(host.calls.handle.visible_gpus.remote()) for host, _ in hosts.values()]
    assert seen == [state.gpu_ids[0] for _, state in hosts.values()]
    used = Counter([*seen, *cloud.gpu_ids])
    assert used.keys() == set("0123")
    assert max(used.values()) == 3  # 11 shares of 0.3333
    with pytest.raises(ClusterError, match=r"do not fit: free are 0\.\d+ GPUs and .* \(others may hold the rest\)"):
        make_system(tmp_path / "b", experts={"count": 10}, cluster={"start_deadline_s": 1.0}).start()
    for host, _ in hosts.values():
        system.remove_host(host)
    system.stop()


@pytest.mark.usefixtures("four_gpus")
def test_more_shares_than_the_gpus_hold_are_refused_before_anything_starts(
    make_system: Callable[..., System], tmp_path: Path
) -> None:
    system = make_system(tmp_path, experts={"count": 10}, cluster={"gpus_per_expert": 0.5})
    with pytest.raises(ClusterError, match=r"^10 experts x 0\.5 GPU need 5 GPUs, the cluster has 4"):
        system.start()
