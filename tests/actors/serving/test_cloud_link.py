"""What the front end does about a batch that came back with an error. Without actors."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorUnavailableError

from actors.errors import ChannelLostError, Fault, NoExpertsError
from actors.rounds.fault_policy import Health, State
from actors.serving import cloud_link as module
from actors.serving.cloud_link import Again, CloudLink
from actors.serving.host_records import HostRecord, HostRecords
from airmoe_ray.config import Config


class FakeChannel:
    """A channel that answers, is gone, or hangs."""

    def __init__(self, state: str) -> None:
        self.state, self.restarts = state, 0

    async def ping(self) -> bool:
        if self.state == "gone":
            raise ActorUnavailableError("restarting", None)
        if self.state == "hangs":
            await asyncio.sleep(60)
        return True

    def restart(self) -> None:
        self.restarts += 1


def mended(channel: FakeChannel, error: Exception) -> Again:
    system = SimpleNamespace(channel=channel, config=Config())
    hosts: Any = SimpleNamespace(system=system, record_faults=lambda *_, **__: None)
    cloud: Any = None
    return asyncio.run(CloudLink(hosts)._mend(cloud, error, was_up=True))


@pytest.mark.parametrize(("state", "pause", "restarts"), [("up", False, 0), ("gone", True, 0), ("hangs", True, 1)])
def test_a_batch_waits_a_moment_for_a_channel_that_is_not_back_yet(
    state: str, pause: bool, restarts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_CHANNEL_S", 0.05)
    channel = FakeChannel(state)
    assert mended(channel, ChannelLostError("gone")).pause == pause
    assert channel.restarts == restarts


def test_images_that_nobody_was_there_for_are_named() -> None:
    assert mended(FakeChannel("up"), NoExpertsError("none", rows=(2,))) == Again(alone=(2,), nobody=True)


def records_of(state: State) -> tuple[HostRecords, HostRecord, list[Any]]:
    hosts: Any = object.__new__(HostRecords)
    made: list[Any] = []
    host: Any = SimpleNamespace(key="3/1", clients=(3,), owner=True, describe=str)

    def remake_host(old: Any) -> Any:
        made.append(SimpleNamespace(**{**vars(old), "key": "3/2"}))
        return made[-1]

    record = HostRecord(host, Health(state))
    hosts.system = SimpleNamespace(config=Config(), remake_host=remake_host)
    hosts.records, hosts.publish, hosts.changed = {"3/1": record}, lambda: None, asyncio.Event()
    return hosts, record, made


def test_a_host_that_cannot_start_is_made_anew_unless_it_is_leaving() -> None:
    hosts, record, made = records_of(State.RESTARTING)
    hosts.make_again(record)
    assert [host.key for host in made] == ["3/2"] == list(hosts.records)
    hosts, record, made = records_of(State.DRAINING)
    hosts.make_again(record)
    assert not made


def test_a_good_statistic_forgives_a_late_one() -> None:
    hosts, record, _ = records_of(State.UP)
    for _ in range(9):
        hosts.record_faults({"3/1": Fault.LATE})
        hosts.record_faults({}, answered=["3/1"])
    assert record.health.state is State.UP
