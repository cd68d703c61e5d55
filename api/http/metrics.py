"""Every Prometheus metric of the service.

Each `Metrics` has a registry of its own, so several apps can live in one process. Label values are bounded: experts by
N, reasons, stages and codes by the tables below. Children are kept: `labels()` costs more than `inc()`.
"""

from collections.abc import Iterable, Iterator
from http import HTTPStatus
from math import isfinite, nan
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric, ProcessCollector
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from actors.errors import Fault
from actors.serving.results import ImageResult
from airmoe_ray.config import Config

STAGES = ("queue", "decode", "backbone", "read", "route", "expert", "channel", "encode", "total")
REASON_OF = {  # gravest first
    Fault.LOST: "lost",
    Fault.FAILED: "failed",
    Fault.INVALID: "invalid",
    Fault.LATE: "late",
    Fault.QUARANTINED: "quarantined",
    Fault.RESTARTING: "restarting",
}
REASONS = (*REASON_OF.values(), "other", "faded")
CODES = frozenset(code.value for code in HTTPStatus) | {499}  # 499: the client went away before the response
EXPECTED_CODES = (200, 400, 413, 415, 422, 429, 500, 503, 504)  # shown as 0 before they happen

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
NATS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7)  # D_JS is in [0, ln 2]
WEIGHTS = (0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.75, 1)
FINE = 100  # clients; beyond it, histograms by client have two buckets each, or a page of them takes half a second
NMSE = (1e-6, 1e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1, 10)


class ExpertState(Protocol):
    """What `set_experts` reads of each client."""

    @property
    def id(self) -> int: ...
    @property
    def state(self) -> str: ...  # "up", or why not
    @property
    def replicas(self) -> int: ...
    @property
    def restarts(self) -> int: ...  # since the service started
    @property
    def drift(self) -> float | None: ...  # None: not known
    @property
    def load_ratio(self) -> float: ...


class _Registry(CollectorRegistry):
    """A registry without `_created` samples: half as many lines, and nobody reads them."""

    def collect(self) -> Iterator[Metric]:
        for metric in super().collect():
            metric.samples = [sample for sample in metric.samples if not sample.name.endswith("_created")]
            yield metric


class _Traffic:
    """The series of one client that change with every image."""

    def __init__(self, metrics: "Metrics", expert: str) -> None:
        self.selected = metrics.selected.labels(expert)
        self.js = metrics.js.labels(expert)
        self.weight = metrics.weight.labels(expert)
        self.truncated = metrics.truncated.labels(expert)


def reason_of(result: ImageResult) -> str:
    """The gravest reason of a degraded result, out of REASONS."""
    found = {REASON_OF.get(fault, "other") for fault in result.skipped.values()}
    if result.all_faded:
        found.add("faded")
    return next(reason for reason in REASONS if reason in found)


class Metrics:
    """The metrics of one service, in a registry of their own."""

    def __init__(self, config: Config) -> None:
        self.registry = registry = _Registry()
        ProcessCollector(registry=registry)

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"airmoe_{name}", text, labels, registry=registry)

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"airmoe_{name}", text, labels, registry=registry)

        def histogram(name: str, text: str, *labels: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"airmoe_{name}", text, labels, registry=registry, buckets=buckets)

        self.requests = counter("requests_total", "HTTP requests answered, probes left out", "code")
        self.duration = histogram("request_duration_seconds", "Time of one HTTP request", buckets=SECONDS)
        self.in_progress = gauge("requests_in_progress", "HTTP requests being worked on")
        self.stage = histogram("stage_duration_seconds", "Time of one image in each stage", "stage", buckets=SECONDS)
        self.queue_depth = gauge("queue_depth", "Images waiting")
        self.queue_limit = gauge("queue_limit", "Images that may wait; one more is refused")
        self.calls = counter("actor_calls_total", "Calls between actors that answered images have taken")
        self.batch = histogram("batch_size", "Images per batch", buckets=(1, 2, 4, 8, 16, 32, 64))

        window = f"over the last {config.serve.load_window} images"
        self.selected = counter("expert_selected_total", "Images routed to the client, before truncation", "expert")
        self.load = gauge("expert_load_ratio", f"Load over the fair share, {window}", "expert")
        self.balancedness = gauge("routing_balancedness", f"Mean load over largest load, 1 is even, {window}")
        nats, weights = (NATS, WEIGHTS) if config.experts.count <= FINE else (NATS[-1:], WEIGHTS[-1:])
        self.js = histogram("routing_js", "D_JS of query and client statistic in nats", "expert", buckets=nats)
        self.weight = histogram("expert_weight", "Fusion weight beta where transmitting", "expert", buckets=weights)

        self.up = gauge("expert_up", "1 while the client takes part", "expert")
        self.replicas = gauge("expert_replicas", "Hosts of the client: its owner and replicas", "expert")
        self.restarts = counter("expert_restarts_total", "Times the client was started again", "expert")
        self.drift = gauge("frl_drift", "How far the client's prototypes have moved from the checkpoint", "expert")
        self.degraded = counter("degraded_requests_total", "Degraded images, each under its gravest reason", "reason")

        self.snr = gauge("channel_snr_db", "Transmit SNR of the latest image that crossed a channel, in dB")
        self.nmse = histogram("channel_nmse", "Squared channel error over the noiseless sum's power", buckets=NMSE)
        self.truncated = counter("channel_truncated_total", "Routed, but silent in deep fade", "expert")
        self.uses = counter("channel_uses_total", "Complex channel uses: air, and what tdma would need", "scheme")
        self.bits = counter(
            "uplink_bits_total", "Uplink bits: routing, report, and what raw_features would need", "kind"
        )

        self._codes = {code: self.requests.labels(code) for code in EXPECTED_CODES}
        self._stages = {stage: self.stage.labels(stage) for stage in STAGES}
        self._reasons = {reason: self.degraded.labels(reason) for reason in REASONS}
        self._air, self._tdma = self.uses.labels("air"), self.uses.labels("tdma")
        self._routing, self._report, self._raw = map(self.bits.labels, ("routing", "report", "raw_features"))
        self._traffic: dict[int, _Traffic] = {}
        self._restarts: dict[int, int] = {}  # by client; its keys are the clients of the last set_experts
        self.queue_limit.set(config.serve.queue)
        self.snr.set(config.channel.snr_db if config.channel.kind != "ideal" else nan)
        self.balancedness.set(nan)  # unknown, and no alert, before the first image

    def observe(self, result: ImageResult, *, seconds: float, load: bool = True) -> None:
        """Count one finished image, which took `seconds` from arrival to result; its times alone if it is no `load`."""
        for stage, milliseconds in result.timings_ms.items():
            if stage != "total":
                self.observe_stage(stage, seconds=milliseconds / 1e3)
        self.observe_stage("total", seconds=seconds)
        if not load:
            return

        for client in result.clients:
            series = self._traffic.get(client.id) or self._new_traffic(client.id)
            if client.js is not None and isfinite(client.js):  # a single NaN would stay in the sum for ever
                series.js.observe(client.js)
            if client.selected:
                series.selected.inc()
            if client.weight > 0:
                series.weight.observe(client.weight)
        for client_id in result.truncated:
            (self._traffic.get(client_id) or self._new_traffic(client_id)).truncated.inc()
        if result.degraded:
            self._reasons[reason_of(result)].inc()

        if result.channel.kind != "ideal":
            self.snr.set(result.channel.snr_db)
            if isfinite(result.nmse):
                self.nmse.observe(result.nmse)
        ledger = result.ledger
        self._air.inc(ledger.air_channel_uses)
        if ledger.tdma_channel_uses is not None:
            self._tdma.inc(ledger.tdma_channel_uses)
        self._routing.inc(ledger.uplink_routing_bits)
        self._report.inc(ledger.uplink_report_bits)
        self._raw.inc(ledger.uplink_raw_feature_bits)

    def observe_stage(self, stage: str, *, seconds: float) -> None:
        """Count the time of a stage; one that is not in STAGES is dropped."""
        if (series := self._stages.get(stage)) is not None:
            series.observe(seconds)

    def _new_traffic(self, client_id: int) -> _Traffic:
        self._traffic[client_id] = series = _Traffic(self, str(client_id))
        return series

    def observe_batch(self, size: int, calls: int) -> None:
        """Count one batch, and the calls between actors that it took."""
        self.batch.observe(size)
        self.calls.inc(calls)

    def request_started(self) -> None:
        """Count an HTTP request as in progress."""
        self.in_progress.inc()

    def request_finished(self, code: int, seconds: float) -> None:
        """Count a request by its status code; one that HTTP does not know is `other`."""
        self.in_progress.dec()
        (self._codes.get(code) or self.requests.labels(code if code in CODES else "other")).inc()
        self.duration.observe(seconds)

    def set_queue(self, depth: int) -> None:
        """Set how many images wait."""
        self.queue_depth.set(depth)

    def set_balancedness(self, value: float) -> None:
        """Set how evenly images are routed."""
        self.balancedness.set(value)

    def set_experts(self, states: Iterable[ExpertState]) -> None:
        """Take over the state of all clients; those that are no longer among them lose every series."""
        present = {state.id: state for state in states}
        for gone in (self._restarts.keys() | self._traffic.keys()) - present.keys():
            self._traffic.pop(gone, None)
            self._restarts.pop(gone, None)
            for metric in (self.selected, self.js, self.weight, self.truncated, self.load):
                metric.remove(str(gone))
            for metric in (self.up, self.replicas, self.restarts, self.drift):
                metric.remove(str(gone))
        for client_id, state in present.items():
            label = str(client_id)
            self.up.labels(label).set(state.replicas > 0)  # also where a replica stands in for its owner
            self.replicas.labels(label).set(state.replicas)
            self.load.labels(label).set(state.load_ratio)
            if state.drift is None:
                self.drift.remove(label)
            else:
                self.drift.labels(label).set(state.drift)
            seen = self._restarts.get(client_id, 0)
            self.restarts.labels(label).inc(max(0, state.restarts - seen))  # a stale report takes nothing back
            self._restarts[client_id] = max(seen, state.restarts)

    def render(self) -> tuple[bytes, str]:
        """Write out all metrics: body and content type of `/metrics`."""
        return generate_latest(self.registry), CONTENT_TYPE_LATEST
