"""A cluster as Prometheus sees it: a real Ray node, found in the file that Ray writes, and two front ends with a key.

No machine of ours has a GPU: the series of the GPU panels are made up, under Ray's own names and labels.
"""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import numpy as np
import pytest
import yaml

from airmoe_ray.config import Config
from api.http.metrics import Metrics
from tests.api.support import free_port, wait_for
from tests.dashboards.boards import BOARDS, RULES, ask, chosen, panels, unanswered_queries
from tests.dashboards.test_dashboards import feed

KEY = "who sends this may ask"
NODE = """
import sys, ray
folder, port = sys.argv[1], int(sys.argv[2])
ray.init(address="local", num_cpus=1, include_dashboard=True, dashboard_port=0, log_to_driver=False,
         _metrics_export_port=port, _temp_dir=folder, object_store_memory=100_000_000)
print("up", flush=True)
sys.stdin.read()
"""
GPU = """
ray_node_gpus_utilization{{{0}}} 40
ray_node_gram_used{{{0}}} 6000
ray_node_gram_available{{{0}}} 18000
ray_node_gpu_power_milliwatts{{{0}}} 90000
ray_node_gpu_temperature_celsius{{{0}}} 60
""".format('ip="10.0.0.11", GpuIndex="0", RayNodeType="worker", SessionName="made_up"')


@contextlib.contextmanager
def page(text: bytes, key: str | None = None) -> Iterator[str]:
    """Address of a server that has one page, for whoever has the key."""

    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            open_to = key is None or self.headers.get("Authorization") == f"Bearer {key}"
            self.send_response(200 if open_to else 401)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.end_headers()
            self.wfile.write(text if open_to else b"")

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Page)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


@pytest.fixture(scope="module")
def ray_folder() -> Iterator[Path]:
    """Where a Ray node with a dashboard, in a process of its own, keeps its files."""
    folder = Path(tempfile.mkdtemp(prefix="ray", dir="/tmp"))  # short: sockets live there
    # as a shell has it: what a cluster of our own sets for its processes (no metrics, a token) stays in this one
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environment |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}
    process = subprocess.Popen(
        [sys.executable, "-c", NODE, str(folder), str(free_port())],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stdout.readline().strip() == "up"
    yield folder
    process.stdin.close()  # ends it, and its node with it
    process.wait(60)
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def prometheus(ray_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Prometheus with the configuration for hosts of one's own: only its targets and the pace are ours."""
    if not shutil.which("prometheus"):
        pytest.skip("no prometheus; `make test-deps` installs it")
    folder = tmp_path_factory.mktemp("prometheus")
    metrics, rng = Metrics(Config()), np.random.default_rng(0)
    for step in range(50):
        feed(metrics, rng, step)
    life = metrics.render()[0]
    with page(life, KEY) as first, page(life, KEY) as second, page(GPU.encode()) as gpus:
        config = yaml.safe_load((BOARDS / "prometheus-onprem.yml").read_text())
        config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
        config["rule_files"] = [str(path) for path in RULES]
        front_ends, ray = config["scrape_configs"]
        front_ends["static_configs"] = [{"targets": [first, second]}]
        (listed,) = ray["file_sd_configs"]
        assert listed["files"] == ["/tmp/ray/prom_metrics_service_discovery.json"]
        listed |= {"files": [listed["files"][0].replace("/tmp/ray", str(ray_folder))], "refresh_interval": "1s"}
        ray |= {"scrape_interval": "1s", "static_configs": [{"targets": [gpus]}]}
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        (folder / "api_key").write_text(KEY)
        address = f"127.0.0.1:{free_port()}"
        command = ["prometheus", f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen([*command, f"--web.listen-address={address}"], stdout=log, stderr=log)
        try:

            def answers() -> bool:
                try:
                    return len(ask(f"http://{address}", 'up{job="airmoe"} == 1')) == 2
                except OSError:  # not listening yet
                    return False

            wait_for(lambda: process.poll() is not None or answers())
            assert answers(), (folder / "log").read_text()
            yield f"http://{address}"
        finally:
            process.terminate()
            process.wait(timeout=20)


def test_ray_lists_its_node_in_the_file_that_prometheus_reads(ray_folder: Path) -> None:
    listed = json.loads((ray_folder / "prom_metrics_service_discovery.json").read_text())
    assert [entry["labels"] for entry in listed] == [{"job": "ray"}]
    assert listed[0]["targets"]


def test_every_panel_of_nodes_and_gpus_is_answered(prometheus: str) -> None:
    wait_for(lambda: not unanswered_queries(prometheus, of_ray=True))
    assert unanswered_queries(prometheus, of_ray=True) == []


def test_expert_3_of_two_front_ends_are_two_lines_and_one_when_one_is_chosen(prometheus: str) -> None:
    query = next(panel for panel in panels() if panel["title"] == "Load over fair share")["targets"][0]["expr"]
    wait_for(lambda: len(ask(prometheus, chosen(query))) == 20)
    assert len(ask(prometheus, chosen(query))) == 20
    one = chosen(query, instance=_instances(prometheus)[0])
    assert len(ask(prometheus, one)) == 10


def test_a_scrape_without_the_key_would_be_refused(prometheus: str) -> None:
    assert httpx.get(f"http://{_instances(prometheus)[0]}/metrics", timeout=10).status_code == 401


def _instances(prometheus: str) -> list[str]:
    reply = httpx.get(
        f"{prometheus}/api/v1/label/instance/values", params={"match[]": "airmoe_queue_limit"}, timeout=10
    )
    return reply.json()["data"]
