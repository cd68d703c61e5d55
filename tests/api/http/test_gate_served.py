"""A run with a gate at the cloud behind a real server."""

import httpx
import pytest

from airmoe_ray import Segmenter
from tests.airmoe_ray.small_run import small_run
from tests.api.http.server_requests import PHOTO, segment
from tests.api.support import Server, airmoe

LINEAR = ("routing.rule=airmoe_ray.baselines.linear_moe:LinearGate", "routing.fusion=gate")


def test_a_gate_is_served_as_it_answers_in_python(tmp_path):
    run = small_run(tmp_path / "gated", *LINEAR)
    server = Server(run)
    try:
        server.wait_until_ready()
        with httpx.Client(base_url=server.url, timeout=60) as client:
            told = segment(client, seed=41).json()
    finally:
        server.stop()
    answer = Segmenter.from_pretrained(run)(PHOTO, seed=41)
    experts = told["routing"]["experts"]
    assert [e["selected"] for e in experts] == [c.selected for c in answer.routing]
    assert [e["weight"] for e in experts] == pytest.approx([c.weight for c in answer.routing], abs=1e-4)
    assert told["communication"]["uplink_routing_bits"] == len(experts)  # a fade bit each, and no statistics


def test_an_oracle_is_not_served(tmp_path):
    run = small_run(tmp_path / "oracle", "routing.rule=airmoe_ray.baselines.oracle:DomainGate")
    told = airmoe("serve", "--run", run)
    assert told.returncode == 2
    assert told.stderr.strip().endswith("needs the domain of every image; it cannot be served")
