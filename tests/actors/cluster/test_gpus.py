"""Experts on GPUs, which Ray counts whether or not the machine has any."""

import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from actors.cluster.connection import cluster
from actors.errors import ClusterError
from actors.serving.system import System
from airmoe_ray.runtime.device import LOGICAL_GPUS
from tests.actors.conftest import tiny, write_checkpoint


@pytest.fixture(scope="module")
def four_gpus() -> Iterator[None]:
    """Four that are counted and do not exist."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(LOGICAL_GPUS, "1")
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
    assert sorted(used.values()) == [1, 2, 4, 4]  # the cloud has one alone; ten shares of a quarter
    assert used[cloud.gpu_ids[0]] == 1
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


@pytest.mark.usefixtures("four_gpus")
def test_forty_experts_spread_over_all_gpus_and_more_are_refused_at_once(
    serve: Callable[..., Any], tmp_path: Path
) -> None:
    write_checkpoint(tmp_path / "all" / "checkpoint", tiny(experts={"count": 45}))
    shares = {"experts_per_actor": 5, "gpus_per_expert": 0.5, "gpus_per_cloud": 0}
    with serve(tmp_path, experts={"count": 10}, cluster=shares) as service:
        for path in (tmp_path / "all" / "checkpoint" / "experts").iterdir():
            shutil.copy(path, tmp_path / "checkpoint" / "experts")
        assert service.system.cloud.state().get().gpu_ids == ()
        service.run(service.supervisor.scale(40))
        service.wait(service.all_up, within_s=90)
        used = Counter(gpu for record in service.records for gpu in record.seen.gpu_ids)
        assert used == dict.fromkeys("0123", 2)  # eight actors of five experts, half a GPU each
        with pytest.raises(ClusterError, match=r"^5 experts in 1 actors x 0\.5 GPU .* room for 0 \(0 GPUs are free\)"):
            service.run(service.supervisor.scale(45))
        assert len(service.status()) == 40
        assert service.segment(1).degraded is False
