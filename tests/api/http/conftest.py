"""A real browser with the page of a real server, and metrics of no server at all."""

import shutil
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from api.http.metrics import Metrics
from tests.api.http.page import watch
from tests.api.http.results import CONFIG
from tests.api.support import Server

REBOUND = "rebound.example"  # a stranger's name that was made to lead to this machine
_REBOUND = f"--host-resolver-rules=MAP {REBOUND} 127.0.0.1"
# the page draws the seed of its fading itself: the same ones in every run, so that no client fades in one of twenty
_SEEDS = "{ let drawn = 0; crypto.getRandomValues = (into) => into.fill((drawn += 2_000)); }"


@pytest.fixture
def metrics() -> Metrics:
    return Metrics(CONFIG)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    chromium = shutil.which("chromium")
    if not chromium:
        pytest.skip("no chromium; `make test-deps` installs it")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu", _REBOUND])
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
    page.add_init_script(_SEEDS)
    watch(page, server, trouble)
    page.goto(server.url)
    expect(page.get_by_test_id("sample-rain")).to_be_visible()
    yield page
    context.close()
    assert trouble == []
