"""The committed rules and panels, and what a real Prometheus answers to them."""

import json
from math import isnan
from pathlib import Path
from typing import Any
from urllib.parse import urlencode
from urllib.request import urlopen

import yaml

ROOT = Path(__file__).parents[2]
BOARDS = ROOT / "dashboards"
RAY_ROWS = ("Nodes", "GPUs")
DASHBOARD = BOARDS / "grafana" / "airmoe.json"
RULES = (BOARDS / "rules" / "airmoe.rules.yml", BOARDS / "rules" / "airmoe.alerts.yml")


def panels(*, of_ray: bool | None = None) -> list[dict[str, Any]]:
    """Panels that show something: all but row titles; of Ray's rows, of ours, or of both."""
    found, row = [], ""
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        if panel["type"] == "row":
            row = panel["title"]
        elif of_ray is None or of_ray == (row in RAY_ROWS):
            found.append(panel)
    return found


def rules() -> list[dict[str, str]]:
    return [rule for path in RULES for group in yaml.safe_load(path.read_text())["groups"] for rule in group["rules"]]


def ask(prometheus_url: str, query: str) -> list[float]:
    """Values that Prometheus has for a query now, NaN left out."""
    with urlopen(f"{prometheus_url}/api/v1/query?{urlencode({'query': query})}", timeout=10) as reply:
        result = json.load(reply)["data"]["result"]
    return [value for series in result if not isnan(value := float(series["value"][1]))]


def chosen(query: str, *, instance: str = ".*") -> str:
    """A panel's query as Grafana sends it, with everything or one instance chosen at the top."""
    for variable, value in {"$__rate_interval": "15s", "$job": ".*", "$instance": instance, "$session": ".*"}.items():
        query = query.replace(variable, value)
    return query


def unanswered_queries(prometheus_url: str, *, of_ray: bool) -> list[str]:
    """Panel queries for which Prometheus has no number at all, each with its panel's title."""
    queries = [(panel["title"], target["expr"]) for panel in panels(of_ray=of_ray) for target in panel["targets"]]
    return [f"{title}: {query}" for title, query in queries if not ask(prometheus_url, chosen(query))]
