"""Rules, alerts and dashboard: valid, up to date, and about metrics that exist."""

import ast
import json
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import yaml

from actors.errors import Fault
from airmoe_ray.config import Config
from api.http.metrics import Metrics
from tests.api.http.results import make_result, make_state
from tests.dashboards.boards import BOARDS, DASHBOARD, RAY_ROWS, ROOT, RULES, panels, rules

CONTRACT = {
    "airmoe_requests_total": {"code"},
    "airmoe_request_duration_seconds": set(),
    "airmoe_stage_duration_seconds": {"stage"},
    "airmoe_requests_in_progress": set(),
    "airmoe_queue_depth": set(),
    "airmoe_queue_limit": set(),
    "airmoe_actor_calls_total": set(),
    "airmoe_batch_size": set(),
    "airmoe_expert_selected_total": {"expert"},
    "airmoe_expert_load_ratio": {"expert"},
    "airmoe_routing_balancedness": set(),
    "airmoe_routing_js": {"expert"},
    "airmoe_expert_weight": {"expert"},
    "airmoe_expert_up": {"expert"},
    "airmoe_expert_replicas": {"expert"},
    "airmoe_expert_restarts_total": {"expert"},
    "airmoe_degraded_requests_total": {"reason"},
    "airmoe_channel_snr_db": set(),
    "airmoe_channel_nmse": set(),
    "airmoe_channel_truncated_total": {"expert"},
    "airmoe_channel_uses_total": {"scheme"},
    "airmoe_uplink_bits_total": {"kind"},
    "airmoe_frl_drift": {"expert"},
}


def feed(metrics: Metrics, rng: np.random.Generator, step: int) -> None:
    """One image's worth of synthetic life: mostly good, now and then degraded, refused or restarted."""
    skipped = {0: rng.choice([Fault.LATE, Fault.LOST, Fault.QUARANTINED])} if rng.random() < 0.1 else {}
    truncated = (int(rng.integers(5)),) if rng.random() < 0.2 else ()
    result = make_result(
        js=float(rng.uniform(0.001, 0.06)), nmse=float(rng.lognormal(-6)), skipped=skipped, truncated=truncated
    )
    metrics.request_started()
    metrics.observe(result, seconds=float(rng.uniform(0.02, 0.3)))
    metrics.request_finished(int(rng.choice([200, 422, 503], p=[0.9, 0.05, 0.05])), float(rng.uniform(0.02, 0.3)))
    metrics.observe_batch(int(rng.integers(1, 9)), 22)
    metrics.set_queue(int(rng.integers(20)))
    metrics.set_balancedness(float(rng.uniform(0.8, 1)))
    metrics.set_experts(make_state(j, restarts=step // 50, drift=step * 1e-3 * j) for j in range(10))


@pytest.fixture(scope="module")
def fed() -> Metrics:
    metrics, rng = Metrics(Config()), np.random.default_rng(0)
    for step in range(100):
        feed(metrics, rng, step)
    return metrics


def promtool(*arguments: str | Path, stdin: bytes = b"", folder: Path = BOARDS) -> subprocess.CompletedProcess[bytes]:
    if not shutil.which("promtool"):
        pytest.skip("no promtool; `make test-deps` installs it")
    command = ["promtool", *map(str, arguments)]
    return subprocess.run(command, input=stdin, capture_output=True, check=False, cwd=folder)


# valid


@pytest.mark.parametrize(
    "check",
    [
        ("check", "config", "prometheus.yml"),
        ("check", "config", "prometheus-onprem.yml"),
        ("check", "config", "prometheus-aws.yml"),
        ("check", "rules", *RULES),
        ("test", "rules", BOARDS / "rules" / "airmoe.test.yml"),
    ],
    ids=["config", "on-prem", "AWS", "rules", "alerts fire when they should and not before"],
)
def test_promtool_accepts(check, tmp_path):
    shutil.copytree(BOARDS, tmp_path / "dashboards", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "dashboards" / "api_key").write_text("a key")
    result = promtool(*check, folder=tmp_path / "dashboards")
    assert result.returncode == 0, (result.stdout + result.stderr).decode()


def test_promtool_has_one_remark_on_the_metrics_page(fed):
    result = promtool("check", "metrics", stdin=fed.render()[0])
    remarks = [line for line in (result.stdout + result.stderr).decode().splitlines() if line.strip()]
    # bits are what the paper counts, and what the contract promises
    assert remarks == ['airmoe_uplink_bits_total use base unit "bytes" instead of "bits"']


def test_every_alert_is_unit_tested_and_says_what_to_do():
    tested = (BOARDS / "rules" / "airmoe.test.yml").read_text()
    alerts = [rule for rule in rules() if "alert" in rule]
    assert len(alerts) >= 7
    for alert in alerts:
        assert f'alertname="{alert["alert"]}"' in tested, alert["alert"]
        assert alert["labels"]["severity"] in {"page", "ticket"}
        assert alert["annotations"]["summary"]
        assert len(alert["annotations"]["description"]) > 100


# about metrics that exist


def test_the_contract_is_declared_with_its_labels(fed):
    labels = {}
    for family in fed.registry.collect():
        name = f"{family.name}_total" if family.type == "counter" else family.name
        labels[name] = {label for sample in family.samples for label in sample.labels} - {"le"}
    assert {name: labels.get(name) for name in CONTRACT} == CONTRACT
    assert {name for name in labels if name.startswith("airmoe_")} == CONTRACT.keys()


def test_rules_and_panels_name_metrics_that_exist(fed):
    exported = {sample.name for family in fed.registry.collect() for sample in family.samples}
    recorded = {rule["record"] for rule in rules() if "record" in rule}
    queries = [rule["expr"] for rule in rules()]
    queries += [target["expr"] for panel in panels() for target in panel["targets"]]
    named = {name for query in queries for name in re.findall(r"[a-z_:]*airmoe_[a-z0-9_:]+", query)}
    assert len(named) > 20
    assert named <= exported | recorded


def test_every_metric_of_the_contract_is_on_the_dashboard():
    queries = " ".join(target["expr"] for panel in panels() for target in panel["targets"])
    assert not [name for name in CONTRACT if not re.search(rf"{name}(_bucket|_sum|_count)?\b", queries)]


def test_every_series_is_narrowed_to_what_is_chosen_and_keeps_front_ends_apart():
    for panel in panels():
        for query in (target["expr"] for target in panel["targets"]):
            for name, labels in re.findall(r"\b((?:airmoe|ray)_\w+)(\{[^}]*\})?", query):
                wanted = 'instance=~"$instance"' if name.startswith("airmoe") else 'SessionName=~"$session"'
                assert wanted in labels, f"{panel['title']}: {name}"
            for by in re.findall(r"by \(([^)]*)\)", query):
                assert "expert" not in by or {"job", "instance"} <= set(by.split(", ")), panel["title"]


def test_panels_of_nodes_name_metrics_that_this_ray_exports():
    from ray.dashboard.modules.reporter.reporter_agent import METRICS_GAUGES

    queries = [target["expr"] for panel in panels(of_ray=True) for target in panel["targets"]]
    named = {name for query in queries for name in re.findall(r"\bray_(node_\w+)", query)}
    assert len(named) > 10
    assert named <= METRICS_GAUGES.keys()


# up to date and tidy


def test_the_committed_dashboard_is_what_the_code_writes():
    pytest.importorskip("grafana_foundation_sdk", reason="no grafana-foundation-sdk; it is in the extra [dev]")
    from dashboards.build import KUBERNETES_RULES, render, render_rules

    assert DASHBOARD.read_text(encoding="utf-8") == render()
    assert KUBERNETES_RULES.read_text(encoding="utf-8") == render_rules()


def test_the_product_never_imports_the_dashboard_code():
    for path in (path for folder in ("airmoe_ray", "actors", "api") for path in (ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not [name for name in names if name.startswith(("dashboards", "grafana"))], path


def test_panels_do_not_overlap_and_fit_the_grid():
    taken: set[tuple[int, int]] = set()
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        grid = panel["gridPos"]
        assert grid["x"] + grid["w"] <= 24
        cells = {
            (x, y) for x in range(grid["x"], grid["x"] + grid["w"]) for y in range(grid["y"], grid["y"] + grid["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells


def test_every_panel_has_an_id_a_unit_a_description_and_a_legend():
    board = json.loads(DASHBOARD.read_text())
    ids = [panel["id"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids)
    assert [panel["title"] for panel in board["panels"] if panel["type"] == "row"] == [
        *("Traffic", "Routing load", "Channel", "Experts", "FRL", *RAY_ROWS)
    ]
    variables = {variable["name"]: variable for variable in board["templating"]["list"]}
    assert list(variables) == ["datasource", "job", "instance", "session"]
    assert all(
        variables[name]["allValue"] == ".*" and variables[name]["multi"] for name in ("job", "instance", "session")
    )
    for panel in panels():
        assert panel["description"].endswith("."), panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        assert panel["datasource"]["uid"] == "${datasource}"
        legend = panel["options"].get("legend", {})
        assert panel["type"] == "stat" or legend.get("showLegend") or legend.get("show"), panel["title"]
        assert all(target["legendFormat"] and target["refId"] for target in panel["targets"]), panel["title"]


def test_the_compose_file_pins_images_stays_on_loopback_and_mounts_what_is_there():
    services = yaml.safe_load((BOARDS / "docker-compose.yaml").read_text())["services"]
    assert "--web.listen-address=127.0.0.1:9090" in services["prometheus"]["command"]
    assert services["grafana"]["environment"]["GF_SERVER_HTTP_ADDR"] == "127.0.0.1"
    assert services["grafana"]["environment"]["GF_AUTH_ANONYMOUS_ORG_ROLE"] == "Viewer"
    mounts = {}
    for service in services.values():
        assert re.search(r":v?\d+\.\d+\.\d+$", service["image"])
        assert "ports" not in service
        mounts |= dict(volume.split(":")[:2] for volume in service["volumes"] if volume.startswith("./"))
    assert all((BOARDS / source).exists() for source in mounts)
    provider = yaml.safe_load((BOARDS / "grafana/provisioning/dashboards/airmoe.yml").read_text())["providers"][0]
    assert mounts["./grafana/airmoe.json"] == f"{provider['options']['path']}/airmoe.json"
