"""Laws of the service's metrics."""

import re
from dataclasses import replace

import numpy as np
import pytest

from actors.errors import Fault
from api.http.metrics import REASONS, Metrics
from tests.api.http.results import CONFIG, LEDGER, make_result, make_state, samples


def test_an_image_is_counted_in_every_account(metrics):
    metrics.observe(make_result(truncated=(3,)), seconds=0.5)
    got = samples(metrics)
    assert [got[f"airmoe_expert_selected_total{{expert={j}}}"] for j in range(10)] == [1] * 5 + [0] * 5
    assert [got[f"airmoe_routing_js_count{{expert={j}}}"] for j in range(10)] == [1] * 10
    assert got["airmoe_routing_js_sum{expert=9}"] == pytest.approx(0.2)
    assert got["airmoe_expert_weight_count{expert=0}"] == 1
    assert got["airmoe_expert_weight_count{expert=9}"] == 0, "silent clients would drown the weights of the others"
    assert got["airmoe_channel_truncated_total{expert=3}"] == 1
    assert got["airmoe_stage_duration_seconds_sum{stage=expert}"] == pytest.approx(0.004)
    assert got["airmoe_stage_duration_seconds_sum{stage=total}"] == 0.5
    assert got["airmoe_channel_nmse_count"] == 1
    assert got["airmoe_channel_snr_db"] == CONFIG.channel.snr_db
    assert got["airmoe_channel_uses_total{scheme=air}"] == LEDGER.air_channel_uses
    assert got["airmoe_channel_uses_total{scheme=tdma}"] == LEDGER.tdma_channel_uses
    assert got["airmoe_uplink_bits_total{kind=routing}"] == LEDGER.uplink_routing_bits
    assert got["airmoe_uplink_bits_total{kind=report}"] == LEDGER.uplink_report_bits
    assert got["airmoe_uplink_bits_total{kind=raw_features}"] == LEDGER.uplink_raw_feature_bits


def test_selected_counts_clients_that_faded_afterwards(metrics):
    metrics.observe(make_result(), seconds=0.1)
    faded = [replace(client, weight=0.0) if client.id == 2 else client for client in make_result().clients]
    metrics.observe(replace(make_result(truncated=(2,)), clients=tuple(faded)), seconds=0.1)
    got = samples(metrics)
    assert got["airmoe_expert_selected_total{expert=2}"] == 2
    assert got["airmoe_expert_weight_count{expert=2}"] == 1


def test_an_ideal_channel_says_nothing_about_the_air(metrics):
    ideal = CONFIG.channel.model_copy(update={"kind": "ideal", "snr_db": -7.0})
    metrics.observe(make_result(channel=ideal, ledger=replace(LEDGER, tdma_channel_uses=None)), seconds=0.1)
    got = samples(metrics)
    assert got["airmoe_channel_snr_db"] == CONFIG.channel.snr_db
    assert got["airmoe_channel_nmse_count"] == 0
    assert got["airmoe_channel_uses_total{scheme=tdma}"] == 0


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_numbers_that_are_none_do_not_poison_sums(metrics, bad):
    metrics.observe(make_result(js=bad, nmse=bad), seconds=0.1)
    metrics.observe(make_result(js=0.1, nmse=0.5), seconds=0.1)
    assert samples(metrics)["airmoe_channel_nmse_sum"] == 0.5
    assert samples(metrics)["airmoe_routing_js_sum{expert=0}"] == 0.1


def test_a_client_that_did_not_answer_has_no_divergence(metrics):
    silent = replace(make_result().clients[0], js=None, selected=False, weight=0.0)
    metrics.observe(replace(make_result(), clients=(silent,)), seconds=0.1)
    assert samples(metrics)["airmoe_routing_js_count{expert=0}"] == 0


@pytest.mark.parametrize(
    ("skipped", "all_faded", "reason"),
    [
        ({1: Fault.LATE}, False, "late"),
        ({1: Fault.LATE, 2: Fault.LOST}, False, "lost"),
        ({1: Fault.QUARANTINED, 2: Fault.INVALID}, False, "invalid"),
        ({1: Fault.RESTARTING}, True, "restarting"),
        ({}, True, "faded"),
    ],
)
def test_a_degraded_image_counts_once_under_its_gravest_reason(metrics, skipped, all_faded, reason):
    metrics.observe(make_result(skipped=skipped, all_faded=all_faded), seconds=0.1)
    got = {name: value for name, value in samples(metrics).items() if name.startswith("airmoe_degraded")}
    assert got == {f"airmoe_degraded_requests_total{{reason={name}}}": float(name == reason) for name in REASONS}


def test_the_reasons_are_those_that_dashboards_and_alerts_know():
    assert REASONS == ("lost", "failed", "invalid", "late", "quarantined", "restarting", "other", "faded")


@pytest.mark.parametrize("fault", Fault)
def test_every_fault_has_a_reason_of_its_own(metrics, fault):
    metrics.observe(make_result(skipped={0: fault}), seconds=0.1)
    assert samples(metrics)[f"airmoe_degraded_requests_total{{reason={fault.name.lower()}}}"] == 1


@pytest.mark.parametrize("fault", Fault)
def test_every_fault_reads_as_a_sentence_about_one_client_and_about_several(fault):
    assert make_result(skipped={3: fault}).reason == f"expert 3 {fault.value}"
    several = make_result(skipped={3: fault, 1: fault, 2: fault}).reason
    assert several.startswith("experts 1-3 ")
    assert not re.search(r"\b(is|was)\b", several)


def test_a_healthy_image_is_not_degraded_though_a_client_faded(metrics):
    metrics.observe(make_result(truncated=(1,)), seconds=0.1)
    assert not any(value for name, value in samples(metrics).items() if name.startswith("airmoe_degraded"))


def test_no_label_grows_with_what_strangers_send(metrics):
    metrics.observe(make_result(), seconds=0.1)
    metrics.request_started()
    metrics.request_finished(777, 0.1)
    before = samples(metrics).keys()
    for i in range(50):
        stages = {f"stage {i}": 1.0}
        metrics.observe(make_result(timings_ms=stages), seconds=0.1)
        metrics.request_started()
        metrics.request_finished(800 + i, 0.1)
    assert samples(metrics).keys() == before
    assert samples(metrics)["airmoe_requests_total{code=other}"] == 51


def test_clients_that_disappear_lose_every_series(metrics):
    metrics.observe(make_result(4), seconds=0.1)
    metrics.set_experts(make_state(j) for j in range(4))
    assert any("expert=3" in name for name in samples(metrics))
    metrics.set_experts(make_state(j) for j in range(3))
    assert not any("expert=3" in name for name in samples(metrics))
    assert sum("expert_up" in name for name in samples(metrics)) == 3


def test_a_late_image_of_a_removed_client_raises_no_alarm_and_is_swept_up(metrics):
    metrics.set_experts([make_state(0)])
    metrics.observe(make_result(2), seconds=0.1)
    assert "airmoe_expert_up{expert=1}" not in samples(metrics), "0 would mean dead"
    metrics.set_experts([make_state(0)])
    assert not any("expert=1}" in name for name in samples(metrics))
    assert samples(metrics)["airmoe_expert_selected_total{expert=0}"] == 1, "the others keep their counts"


def test_restarts_follow_the_absolute_number_and_never_go_back(metrics):
    read = []
    for restarts in (2, 3, 1, 3, 5):
        metrics.set_experts([make_state(0, restarts=restarts)])
        read.append(samples(metrics)["airmoe_expert_restarts_total{expert=0}"])
    assert read == [2, 3, 3, 3, 5]


def test_only_up_is_up_and_unknown_drift_is_absent(metrics):
    gone = {"state": "quarantined", "drift": None}
    states = [make_state(0, replicas=3, load_ratio=1.5), make_state(1, replicas=0, **gone), make_state(2, **gone)]
    metrics.set_experts(states)
    got = samples(metrics)
    assert [got[f"airmoe_expert_up{{expert={j}}}"] for j in range(3)] == [1, 0, 1]  # 2: by its replica
    assert got["airmoe_expert_replicas{expert=0}"] == 3
    assert got["airmoe_expert_load_ratio{expert=0}"] == 1.5
    assert got["airmoe_frl_drift{expert=0}"] == 0.1
    assert "airmoe_frl_drift{expert=1}" not in got
    metrics.set_experts([make_state(0, drift=None)])
    assert "airmoe_frl_drift{expert=0}" not in samples(metrics)


def test_gauges_hold_what_was_set_last(metrics):
    assert np.isnan(samples(metrics)["airmoe_routing_balancedness"]), "unknown before the first image"
    metrics.set_balancedness(0.8)
    metrics.set_queue(7)
    metrics.set_queue(3)
    metrics.observe_batch(4, 25)
    metrics.observe_stage("decode", seconds=0.2)
    got = samples(metrics)
    assert got["airmoe_routing_balancedness"] == 0.8
    assert (got["airmoe_queue_depth"], got["airmoe_queue_limit"]) == (3, CONFIG.serve.queue)
    assert got["airmoe_actor_calls_total"] == 25
    assert (got["airmoe_batch_size_sum"], got["airmoe_batch_size_count"]) == (4, 1)
    assert got["airmoe_stage_duration_seconds_sum{stage=decode}"] == 0.2


def test_two_services_in_one_process_do_not_share_counts(metrics):
    other = Metrics(CONFIG)
    metrics.observe(make_result(), seconds=0.1)
    assert samples(metrics)["airmoe_channel_nmse_count"] == 1
    assert samples(other)["airmoe_channel_nmse_count"] == 0


def test_the_page_is_prometheus_text_without_creation_times(metrics):
    body, content_type = metrics.render()
    assert content_type.startswith("text/plain; version=")
    assert b"# TYPE airmoe_requests_total counter" in body
    assert b"_created" not in body
