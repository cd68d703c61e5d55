"""Experts over the GPUs of several hosts: `airmoe scale` spreads them, and says at once what does not fit.

The GPUs are logical ones: Ray counts them, and what is assigned one computes on the CPU.
"""

import collections
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.actors.conftest import tiny, write_checkpoint
from tests.cluster.conftest import PORT, Operator
from tests.cluster.hosts import Hosts, wait_until

pytestmark = pytest.mark.slow  # a minute and a half

EXPERTS, TOO_MANY = 40, 48
# Four GPUs on each host. Eight experts share an actor, each actor has two GPUs, and the cloud one: five actors fit.
SETTINGS = "experts.count=8 cluster.experts_per_actor=8 cluster.gpus_per_expert=2 cluster.gpus_per_cloud=1"


@pytest.fixture
def four_gpus_each(operator: Operator, hosts: Hosts, tmp_path: Path) -> Iterator[Operator]:
    """The on-prem file with eight experts of a run that has more, on hosts with GPUs."""
    write_checkpoint(tmp_path / "run/checkpoint", tiny(experts={"count": TOO_MANY}))
    tree = yaml.safe_load(operator.file.read_text())
    changes: dict[str, Any] = {
        key: [with_gpus(command) for command in tree[key]]
        for key in ("head_start_ray_commands", "worker_start_ray_commands")
    }
    mounts = {**tree["file_mounts"], "~/airmoe/run/checkpoint": str(tmp_path / "run/checkpoint")}
    file = operator.write_file(tmp_path / "cluster.yaml", file_mounts=mounts, **changes)
    operator.ray("up", "-y", "--no-config-cache", file)
    yield operator
    operator.ray("down", "-y", file)
    for host in hosts.all:  # `ray down` takes a minute and a half to leave nothing
        host.kill()
        host.boot()


def with_gpus(command: str) -> str:
    given = " ".join(f"--set {one}" for one in SETTINGS.split())
    command = command.replace("/ray start ", "/ray start --num-gpus=4 ").replace(
        "export RAY_AUTH_MODE", "export AIRMOE_LOGICAL_GPUS=1 RAY_AUTH_MODE"
    )
    return command.replace("--set cluster.placement=spread", f"--set cluster.placement=spread {given}")


def test_scaled_experts_are_spread_over_the_gpus_and_what_does_not_fit_is_said_at_once(
    four_gpus_each: Operator, hosts: Hosts
) -> None:
    operator = four_gpus_each
    wait_until(operator.is_ready, 120, "the front end")
    token = json.loads((hosts.head.home / f"airmoe/run/state/server-{PORT}.json").read_text())["admin_token"]
    scale = ("--url", operator.url, "--admin-token", token, "--json")

    begun = time.monotonic()
    refused = operator.airmoe("scale", "--experts", TOO_MANY, *scale)
    assert refused.returncode != 0
    assert "do not fit" in refused.stderr, refused.stderr
    assert time.monotonic() - begun < 20
    assert len(operator.experts()) == 8  # nothing has changed

    done = operator.airmoe("scale", "--experts", EXPERTS, *scale)
    assert done.returncode == 0, done.stderr

    def homes() -> collections.Counter[str]:
        return collections.Counter(one["node"] for one in operator.experts() if one["state"] == "up")

    wait_until(lambda: homes().total() == EXPERTS, 120, "all experts")
    head, *workers = (host.address for host in hosts.all)
    assert homes() == {head: 8, workers[0]: 16, workers[1]: 16}  # the cloud has one of the head's four GPUs
