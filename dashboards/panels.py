"""What the dashboard shows of the server: a table of rows and panels, without a word on how they are drawn.

Queries use raw series only, so these rows need a Prometheus that scrapes the server and nothing else; the rules in
`rules/` are for alerts. What Ray itself says of nodes and GPUs is in `ray_panels.py`. Every query is narrowed to the
jobs and instances that are chosen at the top (`build.py`), and what belongs to a client keeps them apart: expert 3 of
one front end is not expert 3 of another.
"""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Panel:
    """One panel; `queries` are legend -> PromQL."""

    title: str
    unit: str  # Grafana's name of it; `none` for plain numbers
    description: str
    queries: dict[str, str]
    kind: Literal["lines", "stack", "stat", "states", "heat"] = "lines"
    width: int = 8
    log: bool = False
    red_from: float | None = None  # red at and above this
    red_below: float | None = None

    @property
    def height(self) -> int:
        """Rows of the grid."""
        return 4 if self.kind == "stat" else 8


def rate(series: str, by: str = "") -> str:
    """Rates of all matching series, summed per value of the labels `by`."""
    return f"sum by ({by}) (rate({series}[$__rate_interval]))" if by else f"sum(rate({series}[$__rate_interval]))"


def quantile(q: float, histogram: str, by: str = "le") -> str:
    """Quantile of a histogram over the last interval."""
    return f"histogram_quantile({q}, {rate(histogram + '_bucket', by)})"


EXPERT = "expert {{expert}}, {{instance}}"  # legend of a client's line
CLIENT = "job, instance, expert"  # labels of one client


def gauge(name: str) -> dict[str, str]:
    """A gauge of every client, one line each."""
    return {EXPERT: f"max by ({CLIENT}) ({name})"}


def per_image(series: str, by: str) -> str:
    """Rates over the images that the same front end answered."""
    images = rate('airmoe_stage_duration_seconds_count{stage="total"}', "job, instance")
    return f"{rate(series, f'job, instance, {by}')} / on (job, instance) group_left () {images}"


IMAGES = rate('airmoe_stage_duration_seconds_count{stage="total"}')
FAILED = rate('airmoe_requests_total{code=~"5.."}')
STAGES = 'airmoe_stage_duration_seconds_{}{{stage!="total"}}'

ROWS: dict[str, tuple[Panel, ...]] = {
    "Traffic": (
        Panel("Images", "ops", "Images answered per second.", {"images": IMAGES}, kind="stat", width=6),
        Panel(
            "Server errors",
            "percentunit",
            "Share of requests that end in 5xx. Wrong uploads (4xx) do not count.",
            {"errors": f"{FAILED} / {rate('airmoe_requests_total')}"},
            kind="stat",
            width=6,
            red_from=0.05,
        ),
        Panel(
            "Degraded images",
            "percentunit",
            "Share of images answered without a client that should have taken part, or with all of S in deep fade.",
            {"degraded": f"{rate('airmoe_degraded_requests_total')} / {IMAGES}"},
            kind="stat",
            width=6,
            red_from=0.1,
        ),
        Panel(
            "Alerts firing",
            "none",
            "From rules/airmoe.alerts.yml; each alert's description says what to do.",
            {"alerts": 'count(ALERTS{alertname=~"AirMoE.*", alertstate="firing"}) or vector(0)'},
            kind="stat",
            width=6,
            red_from=1,
        ),
        Panel(
            "Requests by code",
            "reqps",
            "HTTP requests per second by status code; probes and scrapes are left out. 499: the client went away.",
            {"{{code}}": rate("airmoe_requests_total", "code") + " > 0"},
            kind="stack",
        ),
        Panel(
            "Latency of requests",
            "s",
            "Time of an HTTP request: median, and what one in twenty and one in a hundred exceed.",
            {f"p{round(100 * q)}": quantile(q, "airmoe_request_duration_seconds") for q in (0.5, 0.95, 0.99)},
        ),
        Panel(
            "Where an image spends its time",
            "s",
            "Mean time per image in each stage, stacked. A growing queue means more load than capacity.",
            {"{{stage}}": f"{rate(STAGES.format('sum'), 'stage')} / ({rate(STAGES.format('count'), 'stage')} > 0)"},
            kind="stack",
        ),
        Panel(
            "Queue",
            "none",
            "Images waiting and requests in progress. At the limit (serve.queue) the next image is refused.",
            {
                "waiting": "sum(airmoe_queue_depth)",
                "limit": "sum(airmoe_queue_limit)",
                "in progress": "sum(airmoe_requests_in_progress)",
            },
        ),
        Panel(
            "Batch size",
            "none",
            "Mean images per batch; it grows under load, up to serve.max_batch.",
            {"images": f"{rate('airmoe_batch_size_sum')} / {rate('airmoe_batch_size_count')}"},
        ),
        Panel(
            "Calls per image",
            "none",
            "Calls between actors per image; a batch shares them.",
            {"calls": f"{rate('airmoe_actor_calls_total')} / {rate('airmoe_batch_size_sum')}"},
        ),
        Panel(
            "Degraded images by reason",
            "ops",
            "Degraded images per second, each under its gravest reason.",
            {"{{reason}}": rate("airmoe_degraded_requests_total", "reason")},
            kind="stack",
        ),
    ),
    "Routing load": (
        Panel(
            "Load over fair share",
            "none",
            "Load of each client over K/N, over the last serve.load_window images. 1 is fair, 0 is never asked.",
            gauge("airmoe_expert_load_ratio"),
        ),
        Panel(
            "Balancedness",
            "percentunit",
            "Mean load over largest load, over the last serve.load_window images. 100 % is even, K/N is collapse.",
            {"{{instance}}": "min by (job, instance) (airmoe_routing_balancedness)"},
            red_below=0.6,
        ),
        Panel(
            "Selected",
            "ops",
            "How often each client was in S, before truncation, per second.",
            {EXPERT: rate("airmoe_expert_selected_total", CLIENT)},
            kind="stack",
        ),
        Panel(
            "Median fusion weight",
            "none",
            "Median beta of each client where it transmitted, Eq. (15). 1/K is equal.",
            {EXPERT: quantile(0.5, "airmoe_expert_weight", f"{CLIENT}, le")},
            width=12,
        ),
        Panel(
            "Selected out of all images",
            "percentunit",
            "Share of images that were routed to each client; K/N is fair.",
            {EXPERT: per_image("airmoe_expert_selected_total", "expert")},
            width=12,
        ),
    ),
    "Channel": (
        Panel(
            "SNR",
            "dB",
            "Transmit SNR of the latest image, channel.snr_db or what the request asked for.",
            {"{{instance}}": "min by (job, instance) (airmoe_channel_snr_db)"},
            red_below=5,
        ),
        Panel(
            "NMSE",
            "none",
            "Squared error of the received sum over the power of the noiseless one: what the air costs.",
            {f"p{round(100 * q)}": quantile(q, "airmoe_channel_nmse") for q in (0.5, 0.95)},
            log=True,
        ),
        Panel(
            "Truncated",
            "percentunit",
            "Share of a client's selections in which it was in deep fade; 1 - exp(-gamma_th) under Rayleigh fading.",
            {
                EXPERT: f"{rate('airmoe_channel_truncated_total', CLIENT)} / "
                f"({rate('airmoe_expert_selected_total', CLIENT)} > 0)"
            },
        ),
        Panel(
            "Channel uses per image",
            "none",
            "Complex channel uses of payload, no pilots: over the air, and what one client after another would need.",
            {"{{scheme}}, {{instance}}": per_image("airmoe_channel_uses_total", "scheme")},
            width=12,
            log=True,
        ),
        Panel(
            "Uplink per image",
            "decbits",
            "Bits from clients to cloud: statistics and reports as sent, raw features as they would have been.",
            {"{{kind}}, {{instance}}": per_image("airmoe_uplink_bits_total", "kind")},
            width=12,
            log=True,
        ),
    ),
    "Experts": (
        Panel(
            "Up",
            "none",
            "Which clients take part.",
            {EXPERT: f"min by ({CLIENT}) (airmoe_expert_up)"},
            kind="states",
            width=12,
        ),
        Panel("Replicas", "none", "Hosts of each client; hot ones get more.", gauge("airmoe_expert_replicas"), width=6),
        Panel(
            "Restarts",
            "none",
            "Times each client was started again in the last 15 minutes.",
            {EXPERT: f"sum by ({CLIENT}) (increase(airmoe_expert_restarts_total[15m]))"},
            width=6,
        ),
    ),
    "FRL": (
        Panel(
            "Drift",
            "none",
            "How far each client's prototypes have moved from the checkpoint. Flat unless serve.renew_frl is on.",
            gauge("airmoe_frl_drift"),
        ),
        Panel(
            "Median D_JS",
            "none",
            "Median divergence of query and each client's statistic in nats, Eq. (8); ln 2 = 0.69 is the largest.",
            {EXPERT: quantile(0.5, "airmoe_routing_js", f"{CLIENT}, le")},
        ),
        Panel(
            "D_JS of all clients",
            "none",
            "How the divergences spread [nats]. Two bands: some clients know the input. One band: nobody stands out.",
            {"{{le}}": rate("airmoe_routing_js_bucket", "le")},
            kind="heat",
        ),
    ),
}
