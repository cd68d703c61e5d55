"""Comparisons with peers: their environments, who is faster, and what crosses."""

import sys
import time
from pathlib import Path

import pytest

from airmoe_ray.errors import UserError
from airmoe_ray.radio.ledger import Traffic
from api.bench.peers.flower import _crossed
from api.bench.peers.serve import compare
from api.bench.peers.venvs import python_with
from tests.api.bench.test_requests import server


def test_a_peer_that_takes_three_times_as_long_is_a_third_as_fast() -> None:
    with (
        server(lambda asked, body: time.sleep(0.05)) as ours,
        server(lambda asked, body: time.sleep(0.15)) as theirs,
    ):
        found = compare(ours, theirs, b"image", rounds=1, seconds=1.0)
    assert 1.6 < found.value < 4.5
    assert found.detail["ours_per_s"] > found.detail["serve_per_s"]


def test_what_an_epoch_sent_is_the_difference_of_two_accounts() -> None:
    before, after = Traffic(channel_uses=10), Traffic(channel_uses=110)
    before.up("report", bits=8_000_000)
    after.up("report", bits=24_000_000)
    after.down("weights", bits=8_000_000)
    assert _crossed(before, after) == {"uplink_MB": 2.0, "downlink_MB": 1.0, "channel_uses": 100}


def test_an_environment_that_is_there_is_taken_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "peer" / "bin").mkdir(parents=True)
    (tmp_path / "peer" / "bin" / "python").symlink_to(sys.executable)
    notes: list[str] = []
    found = python_with("peer", ["nothing"], check="import json", note=notes.append, place=tmp_path)
    assert (found, notes) == (tmp_path / "peer" / "bin" / "python", [])


@pytest.mark.slow
def test_an_environment_sees_our_packages_and_one_that_cannot_be_made_is_told_in_a_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="peer: no-such-package-here cannot be installed") as caught:
        python_with("peer", ["no-such-package-here"], check="import absent", note=lambda _: None, place=tmp_path)
    assert "\n" not in str(caught.value)
    again = python_with("peer", ["-"], check="import airmoe_ray, api", note=lambda _: None, place=tmp_path)
    assert again == tmp_path / "peer" / "bin" / "python"
