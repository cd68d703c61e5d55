"""What people look at, on one real server: the page in a real browser, the dashboard's panels by a real Prometheus."""

import itertools
import json
import re
import shutil
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
import yaml
from playwright.sync_api import Browser, Page, expect, sync_playwright

from api.app import create_app
from tests import test_dashboards
from tests.test_dashboards import BOARDS, DASHBOARD, RULES, ask, rules, unanswered_queries
from tests.test_images import photo, saved
from tests.web.support import EXPERTS, TOP_K, Server, airmoe, free_port, wait_for
from tests.web.test_errors import make_service

PHOTO = {"name": "street.png", "mimeType": "image/png", "buffer": saved(photo(48, 80))}
expect.set_options(timeout=20_000)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    chromium = shutil.which("chromium")
    if not chromium:
        pytest.skip("no chromium; `make test-deps` installs it")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


@pytest.fixture
def trouble() -> list[str]:
    """What a page complained about; tests that provoke something clear it."""
    return []


@pytest.fixture
def page(server: Server, browser: Browser, trouble: list[str]) -> Iterator[Page]:
    """The page, freshly opened; it must log no error and ask nobody but its server."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    page = context.new_page()
    page.set_default_timeout(20_000)
    watch(page, server, trouble)
    page.goto(server.url)
    expect(page.get_by_test_id("sample-rain")).to_be_visible()
    yield page
    context.close()
    assert trouble == []


def watch(page: Page, server: Server, trouble: list[str]) -> None:
    def note_request(request: Any) -> None:
        if not request.url.startswith((server.url, "data:", "blob:")):
            trouble.append(f"asked {request.url}")

    page.on("request", note_request)
    page.on("pageerror", lambda error: trouble.append(str(error)))
    page.on("console", lambda message: message.type in {"error", "warning"} and trouble.append(message.text))


def upload(page: Page, file: Any = PHOTO) -> None:
    page.set_input_files("#file-input", file)
    answered(page)


def answered(page: Page) -> None:
    expect(page.locator("#results[data-state=answered][aria-busy=false]")).to_be_visible()


def change(page: Page, selector: str, value: object) -> None:
    """Move a slider and wait for the answer to the request that this makes."""
    with page.expect_response(lambda response: "/segment?" in response.url and response.ok):
        page.locator(selector).fill(str(value))
    answered(page)


def choose(page: Page, channel: str) -> None:
    with page.expect_response(lambda response: f"channel={channel}" in response.url and response.ok):
        page.locator(f"input[name=channel][value={channel}]").check(force=True)
    answered(page)


def fact(page: Page, name: str) -> str:
    return page.get_by_test_id(f"fact-{name}").inner_text()


def mask_pixels(page: Page) -> str:
    return page.evaluate("document.getElementById('mask-canvas').toDataURL()")


def routed(page: Page) -> int:
    return page.locator("tr[data-expert][data-role=routed], tr[data-expert][data-role=faded]").count()


# an image gets in


def test_an_uploaded_file_is_segmented_and_accounted_for(page):
    upload(page)
    assert page.evaluate(
        "[document.getElementById('mask-canvas').width, document.getElementById('mask-canvas').height]"
    ) == [80, 48]
    expect(page.locator("#image-name")).to_have_text("street.png")
    expect(page.locator("tr[data-expert]")).to_have_count(EXPERTS)
    assert routed(page) == TOP_K
    assert re.search(r"dB$", fact(page, "nmse"))
    expect(page.get_by_test_id("compare-uplink")).to_contain_text("less")
    expect(page.locator("#timings-list li")).not_to_have_count(0)


def test_a_sample_is_one_click_away(page):
    sample = page.get_by_test_id("sample-rain")
    sample.click()
    answered(page)
    expect(sample).to_have_attribute("aria-pressed", "true")
    assert page.evaluate("document.getElementById('mask-canvas').width") == 512
    assert page.locator("#sample-list button").count() >= 3


def test_a_dropped_file_is_segmented(page):
    page.evaluate(
        """async ([bytes, type]) => {
            const transfer = new DataTransfer();
            transfer.items.add(new File([new Uint8Array(bytes)], "dropped.png", {type}));
            document.getElementById("drop-zone").dispatchEvent(
                new DragEvent("drop", {dataTransfer: transfer, bubbles: true, cancelable: true}));
        }""",
        [list(PHOTO["buffer"]), "image/png"],
    )
    answered(page)
    expect(page.locator("#image-name")).to_have_text("dropped.png")


def test_a_tiff_that_the_browser_cannot_show_is_segmented_all_the_same(page):
    upload(page, {"name": "scan.tif", "mimeType": "image/tiff", "buffer": saved(photo(48, 80), "TIFF")})
    expect(page.locator("#drop-zone.no-preview")).to_be_visible()
    assert len(mask_pixels(page)) > 200


def test_what_is_not_an_image_is_told_in_words(page, trouble):
    page.set_input_files("#file-input", {**PHOTO, "buffer": b"not an image"})
    expect(page.locator("#notice")).to_contain_text("not an image")
    upload(page)
    expect(page.locator("#notice")).to_be_hidden()
    assert [entry for entry in trouble if "400" not in entry] == []
    trouble.clear()  # the browser itself logs the 400


# the radio


def test_the_snr_slider_asks_again_and_changes_the_mask(page):
    upload(page)
    before, nmse = mask_pixels(page), fact(page, "nmse")
    change(page, "#snr", -10)
    assert fact(page, "nmse") != nmse
    assert mask_pixels(page) != before
    expect(page.get_by_test_id("fact-changed")).to_contain_text("%")


def test_the_k_slider_routes_as_many_experts(page):
    upload(page)
    change(page, "#top-k", EXPERTS)
    assert routed(page) == EXPERTS
    change(page, "#top-k", 1)
    assert routed(page) == 1


def test_the_channel_switch_takes_the_noise_away(page):
    upload(page)
    choose(page, "ideal")
    assert fact(page, "nmse") == "none"
    expect(page.locator("#snr")).to_be_disabled()
    choose(page, "digital")
    assert "in turn" in fact(page, "transmitting")
    choose(page, "air")
    assert "at once" in fact(page, "transmitting")


def test_a_new_fade_is_a_new_seed_and_turning_back_gives_the_same_mask(page):
    upload(page)
    first, seed = mask_pixels(page), fact(page, "seed")
    change(page, "#snr", 0)
    change(page, "#snr", 20)
    assert (mask_pixels(page), fact(page, "seed")) == (first, seed)
    with page.expect_response(lambda response: "/segment?" in response.url):
        page.locator("#reroll").click()
    answered(page)
    assert fact(page, "seed") != seed


# looking at it


def test_the_legend_lists_what_was_found_and_picks_one_out(page):
    upload(page)
    rows = page.locator("#legend button")
    assert rows.count() >= 1
    shares = [
        float(text.split()[0].lstrip("<").strip(" %\u202f") or 0)
        for text in rows.locator(".class-area").all_inner_texts()
    ]
    assert shares == sorted(shares, reverse=True)
    rows.first.click()
    expect(rows.first).to_have_attribute("aria-pressed", "true")


def test_opacity_and_view_change_the_picture_and_ask_nobody(page):
    upload(page)
    asked: list[str] = []
    page.on("request", lambda request: "/segment" in request.url and asked.append(request.url))
    before = mask_pixels(page)
    page.locator("#opacity").fill("10")
    assert mask_pixels(page) != before
    page.locator("input[name=view][value=mask]").check(force=True)
    expect(page.locator("#layers")).to_have_attribute("data-view", "mask")
    assert asked == []


def test_the_live_panel_shows_the_server(page):
    upload(page)
    expect(page.locator("#live[data-state=live]")).to_be_visible()
    expect(page.locator("#load-bars li")).to_have_count(EXPERTS)
    expect(page.locator("#expert-states")).to_have_text(f"all {EXPERTS} experts up")
    expect(page.locator("#p50-now")).to_contain_text("ms")
    expect(page.locator("#rate-chart canvas")).to_be_visible()


def test_the_theme_switches_and_is_remembered(page):
    root = page.locator("html")
    before = root.get_attribute("data-theme")
    background = "getComputedStyle(document.body).backgroundColor"
    colour = page.evaluate(background)
    page.locator("#theme-toggle").click()
    expect(root).not_to_have_attribute("data-theme", before)
    assert page.evaluate(background) != colour
    page.reload()
    expect(root).not_to_have_attribute("data-theme", before)


@pytest.mark.parametrize("width", [320, 390, 768])
def test_nothing_sticks_out_on_a_small_screen(page, width):
    page.set_viewport_size({"width": width, "height": 800})
    upload(page)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    expect(page.locator("#mask-canvas")).to_be_visible()


def test_the_keyboard_is_enough(page):
    page.on("filechooser", lambda _: None)  # playwright needs a moment before it can catch one
    for _ in range(12):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.id") == "file-input":
            break
    with page.expect_file_chooser() as chooser:
        page.keyboard.press("Enter")
    chooser.value.set_files(PHOTO)
    answered(page)
    page.locator("#snr").focus()
    with page.expect_response(lambda response: "snr_db=19.5" in response.url):
        page.keyboard.press("ArrowLeft")
    answered(page)


def test_every_control_has_a_name(page):
    upload(page)
    unnamed = page.evaluate(
        """[...document.querySelectorAll("button, input, select, canvas[role=img], a")].filter((one) =>
            !(one.getAttribute("aria-label") || one.textContent.trim() || one.labels?.length ||
              one.getAttribute("aria-labelledby"))).map((one) => one.outerHTML)"""
    )
    assert unnamed == []


def test_the_documentation_renders_every_operation_without_another_server(page, server):
    page.goto(f"{server.url}/docs")
    expect(page.locator("#operations-segment-segment_segment_post")).to_be_visible()
    declared = sum(len(methods) for methods in httpx.get(f"{server.url}/openapi.json").json()["paths"].values())
    expect(page.locator(".opblock")).to_have_count(declared)
    page.locator("#operations-segment-segment_segment_post .opblock-summary-control").click()
    expect(page.locator(".opblock.is-open")).to_contain_text("snr_db")
    assert "Could not resolve reference" not in page.content()


def test_a_browser_asks_for_the_key_and_the_page_works_with_it(browser, trouble):
    port = free_port()
    app = create_app(make_service(api_keys=["open sesame"]), admin_token="x")
    guarded = uvicorn.Server(uvicorn.Config(app, port=port, log_level="error"))
    thread = threading.Thread(target=guarded.run)
    thread.start()
    try:
        assert wait_for(lambda: guarded.started)
        page = browser.new_page(http_credentials={"username": "me", "password": "open sesame"})
        page.on("pageerror", lambda error: trouble.append(str(error)))
        page.goto(f"http://127.0.0.1:{port}")
        expect(page.locator("#live[data-state=live]")).to_be_visible()
        expect(page.locator("#legend button")).to_have_count(2)
        assert httpx.get(f"http://127.0.0.1:{port}").status_code == 401
        assert airmoe("status", "--url", f"http://127.0.0.1:{port}", "--key", "open sesame").returncode == 0
        page.close()
    finally:
        guarded.should_exit = True
        thread.join()
    assert trouble == []


# Prometheus


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
    wait_for(lambda: not unanswered_queries(prometheus))
    assert unanswered_queries(prometheus) == []


def test_a_real_prometheus_records_every_rule(prometheus):
    recorded = [rule["record"] for rule in rules() if "record" in rule]
    wait_for(lambda: all(ask(prometheus, name) for name in recorded))
    assert [name for name in recorded if not ask(prometheus, name)] == []


def test_a_healthy_server_fires_no_alert(prometheus):
    assert ask(prometheus, 'ALERTS{alertstate="firing"}') == []


def test_a_query_without_data_is_found_out(prometheus, monkeypatch, tmp_path):
    board = json.loads(DASHBOARD.read_text().replace("airmoe_frl_drift", "airmoe_no_such_thing"))
    (tmp_path / "board.json").write_text(json.dumps(board))
    monkeypatch.setattr(test_dashboards, "DASHBOARD", Path(tmp_path / "board.json"))
    wait_for(lambda: len(unanswered_queries(prometheus)) == 1)
    assert unanswered_queries(prometheus) == ["Drift: max by (expert) (airmoe_no_such_thing)"]


# the end; this stops the server of this file


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
