"""Results of images and states of experts as metrics see them, and what a scraper reads."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
from prometheus_client.parser import text_string_to_metric_families

from actors.serving.results import ClientAccount, ImageResult
from airmoe_ray.config import Config
from airmoe_ray.radio.ledger import account
from api.http.metrics import Metrics

CONFIG = Config()
LEDGER = account(CONFIG, feature_dim=64, classes=5, grid=(4, 4), top_k=5, gains_K=[1.0] * 5)


def make_result(clients: int = 10, *, js: float = 0.02, nmse: float = 3e-3, **changes: Any) -> ImageResult:
    """An image routed to the first five clients; divergences grow with the client's id."""
    accounts = tuple(
        ClientAccount(
            id=j,
            js=js * (j + 1),
            score=1.0,
            probability=1 / clients,
            selected=j < 5,
            weight=0.2 if j < 5 else 0.0,
            gamma=1 + 0j,
            version=0,
        )
        for j in range(clients)
    )
    stages = ("queue", "backbone", "read", "route", "expert", "channel")
    result = ImageResult(
        logits_Chw=np.zeros((5, 4, 4), np.float32),
        clients=accounts,
        channel=CONFIG.channel,
        seed=1,
        rho=1.0,
        noise_power=0.01,
        nmse=nmse,
        truncated=(),
        skipped={},
        all_faded=False,
        ledger=LEDGER,
        batch_size=1,
        timings_ms=dict.fromkeys(stages, 4.0),
    )
    return replace(result, **changes)


def make_state(expert: int, **changes: Any) -> SimpleNamespace:
    return SimpleNamespace(
        **{"id": expert, "state": "up", "replicas": 1, "restarts": 0, "drift": 0.1, "load_ratio": 1.0} | changes
    )


def samples(metrics: Metrics) -> dict[str, float]:
    """What a scraper reads: `name{label=value}` -> value."""
    found = {}
    for family in text_string_to_metric_families(metrics.render()[0].decode()):
        for sample in family.samples:
            labels = ",".join(f"{key}={value}" for key, value in sorted(sample.labels.items()))
            found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return found
