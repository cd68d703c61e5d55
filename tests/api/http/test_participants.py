"""`only` and `without` of a real server: whose answer it is, what it costs, and what it leaves alone."""

import base64
from math import isnan

import numpy as np
import pytest

from api.http.schemas import Parameters
from tests.api.http.server_requests import PHOTO, assert_error, mask_of, segment
from tests.api.http.stub_service import ask, assert_is_an_error, make_service
from tests.api.support import EXPERTS, TOP_K, samples

# what a request of any kind adds to; all else is load or the state of the service
ORDINARY = ("airmoe_request", "airmoe_stage_duration_seconds", "process_")


def heard(answer):
    return [expert["id"] for expert in answer["routing"]["experts"] if expert["weight"] > 0]


def routed(answer):
    return [expert["id"] for expert in answer["routing"]["experts"] if expert["selected"]]


@pytest.mark.parametrize("expert", range(EXPERTS))
def test_one_expert_alone_answers_over_the_channel(client, expert):
    answer = segment(client, seed=1, only=expert).json()
    assert heard(answer) == routed(answer) == [expert]
    ledger, cost = answer["communication"], segment(client, seed=1).json()["communication"]
    assert ledger["air_channel_uses"] == cost["air_channel_uses"]  # whatever K is
    assert ledger["uplink_routing_bits"] == cost["uplink_routing_bits"]  # everybody was asked
    assert TOP_K * ledger["uplink_report_bits"] == cost["uplink_report_bits"]


def test_the_clouds_head_alone_needs_no_air(client):
    answer = segment(client, seed=1, only="cloud").json()
    assert heard(answer) == routed(answer) == []
    assert answer["channel"]["nmse"] == answer["communication"]["air_channel_uses"] == 0
    assert not answer["routing"]["degraded"]
    assert all(expert["js"] is not None for expert in answer["routing"]["experts"])
    masks = [mask_of(client, seed=seed, snr_db=-10, only="cloud") for seed in (1, 2)]
    assert np.array_equal(*masks)  # no fading, no noise


def test_without_a_client_the_next_best_takes_its_place(client):
    everybody = segment(client, seed=1).json()
    best = min(everybody["routing"]["experts"], key=lambda expert: expert["js"])["id"]
    answer = segment(client, seed=1, without=best).json()
    assert best in routed(everybody)
    assert best not in routed(answer)
    assert len(routed(answer)) == TOP_K
    assert len(routed(segment(client, without=best, top_k=EXPERTS).json())) == EXPERTS - 1
    assert routed(segment(client, seed=1, without="cloud").json()) == routed(everybody)


def test_json_parameters_say_it_as_well(client):
    for only, expected in ((1, [1]), ("1", [1]), ("cloud", [])):
        sent = {"inputs": base64.b64encode(PHOTO).decode(), "parameters": {"only": only}}
        assert heard(client.post("/segment", json=sent).json()) == expected


def test_such_answers_are_no_load_and_leave_every_other_figure_alone(server, client):
    segment(client)

    def figures():
        found = samples(server.url)
        return {name: value for name, value in found.items() if not name.startswith(ORDINARY)}, found

    def stats():
        return [(e["selected"], e["load_ratio"]) for e in client.get("/routing/stats").json()["experts"]]

    (before, all_before), load = figures(), stats()
    for choice in ({"only": 0}, {"only": "cloud"}, {"without": 1}, {"without": "cloud", "snr_db": 3}):
        assert segment(client, **choice).status_code == 200
    after, all_after = figures()
    assert {name: value for name, value in after.items() if before.get(name) != value and not isnan(value)} == {}
    assert stats() == load
    for name in ('airmoe_requests_total{code="200"}', 'airmoe_stage_duration_seconds_count{stage="total"}'):
        assert all_after[name] >= all_before[name] + 4


def test_such_answers_renew_no_memory_where_ordinary_ones_do():
    service = make_service(renew_frl=True)
    assert service.settings(Parameters()).renew
    for choice in ({"only": 0}, {"without": 1}):
        assert not service.settings(Parameters(**choice)).renew


@pytest.mark.parametrize(
    ("parameters", "line"),
    [
        ({"only": EXPERTS}, f"only: {EXPERTS}: there are clients 0 to {EXPERTS - 1}, and cloud"),
        ({"without": -1}, f"without: -1: there are clients 0 to {EXPERTS - 1}, and cloud"),
        ({"only": 0, "without": 1}, "only and without: both are given; give one of them"),
        ({"only": "the best"}, "only: Value error, expected the number of a client, or cloud"),
        ({"without": "1.5"}, "without: Value error, expected the number of a client, or cloud"),
    ],
    ids=str,
)
def test_a_choice_that_nobody_can_answer_is_422_in_one_line(client, parameters, line):
    assert assert_error(segment(client, **parameters), 422) == line


@pytest.mark.parametrize("name", ["only", "without"])
def test_a_model_without_a_head_at_the_cloud_says_so_with_422(name):
    body = assert_is_an_error(ask(make_service(), params={name: "cloud"}), 422)
    assert body["error"] == f"{name}: cloud: this model has no head at the cloud (experts.shared); name a client"


def test_true_is_no_client(client):
    sent = {"inputs": base64.b64encode(PHOTO).decode(), "parameters": {"only": True}}
    assert "number of a client" in assert_error(client.post("/segment", json=sent), 422)


def test_what_clients_know_and_the_terms_of_the_weights_are_told(client):
    knows = [expert["knows"] for expert in client.get("/experts").json()["experts"]]
    assert knows == ["clear days", "rainy streets", "night drawings", None]  # the card names three of four
    config = client.get("/config").json()
    assert (config["name"], config["terms"]) == ("little town", "for research use only")
