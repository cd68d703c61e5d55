"""Who watches a real server: Prometheus with every panel of the dashboard, and an open page that must not keep it."""

import itertools
import json
import shutil
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import yaml
from playwright.sync_api import expect

from tests.api.http.page import PHOTO
from tests.api.support import Server, free_port, wait_for
from tests.dashboards import boards
from tests.dashboards.boards import BOARDS, DASHBOARD, RULES, ask, rules, unanswered_queries


@pytest.fixture(scope="module")
def traffic(server: Server) -> Iterator[None]:
    """Images of every channel, now and then a bad one, until the tests are done."""
    stop = threading.Event()
    wishes = itertools.cycle(
        [{}, {"channel": "digital"}, {"channel": "ideal"}, {"top_k": 4}, {"snr_db": 0}, {"seed": -1}]
    )

    def ask_on() -> None:
        with httpx.Client(base_url=server.url, timeout=30) as client:
            while not stop.wait(0.2):
                try:
                    client.post("/segment", content=PHOTO["buffer"], params=next(wishes))
                except httpx.TransportError:  # the last test has ended the server
                    return

    thread = threading.Thread(target=ask_on)
    thread.start()
    yield
    stop.set()
    thread.join()


@pytest.fixture(scope="module")
def prometheus(server: Server, traffic: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A Prometheus with our configuration, but quicker, that has scraped the server."""
    if not shutil.which("prometheus"):
        pytest.skip("no prometheus; `make test-deps` installs it")
    folder = tmp_path_factory.mktemp("prometheus")
    config = yaml.safe_load((BOARDS / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config["rule_files"] = [str(path) for path in RULES]
    config["scrape_configs"][0]["static_configs"] = [{"targets": [f"127.0.0.1:{server.port}"]}]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    address = f"127.0.0.1:{free_port()}"
    command = ["prometheus", f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen([*command, f"--web.listen-address={address}"], stdout=log, stderr=log)
    try:

        def scraped() -> bool:
            try:
                return ask(f"http://{address}", 'up{job="airmoe"}') == [1]
            except OSError:  # not listening yet
                return False

        wait_for(lambda: process.poll() is not None or scraped())
        assert process.poll() is None, (folder / "log").read_text()
        assert scraped(), (folder / "log").read_text()
        yield f"http://{address}"
    finally:
        process.terminate()
        process.wait(timeout=20)


def test_a_real_prometheus_answers_every_panel(prometheus):
    wait_for(lambda: not unanswered_queries(prometheus, of_ray=False))
    assert unanswered_queries(prometheus, of_ray=False) == []


def test_a_real_prometheus_records_every_rule(prometheus):
    recorded = [rule["record"] for rule in rules() if "record" in rule]
    wait_for(lambda: all(ask(prometheus, name) for name in recorded))
    assert [name for name in recorded if not ask(prometheus, name)] == []


def test_a_healthy_server_fires_no_alert(prometheus):
    assert ask(prometheus, 'ALERTS{alertstate="firing"}') == []


def test_a_query_without_data_is_found_out(prometheus, monkeypatch, tmp_path):
    board = json.loads(DASHBOARD.read_text().replace("airmoe_frl_drift", "airmoe_no_such_thing"))
    (tmp_path / "board.json").write_text(json.dumps(board))
    monkeypatch.setattr(boards, "DASHBOARD", Path(tmp_path / "board.json"))
    wait_for(lambda: len(unanswered_queries(prometheus, of_ray=False)) == 1)
    (found,) = unanswered_queries(prometheus, of_ray=False)
    assert found.startswith("Drift: max by (job, instance, expert) (airmoe_no_such_thing{")


# the end; this stops the server


def test_ctrl_c_ends_the_server_and_leaves_nothing(server, browser):
    page = browser.new_page()
    page.goto(server.url)  # an open page with its polling must not keep the server
    expect(page.locator("#live[data-state=live]")).to_be_visible()
    code, left = server.stop(signal.SIGINT)
    page.close()
    assert code in {0, 130, -signal.SIGINT}
    assert not left
    assert not server.is_listening()
    assert "Traceback" not in server.log.read_text()
