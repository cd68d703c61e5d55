"""Looking at the page in a real browser: legend, theme, small screens, keyboard, documentation, keys."""

import threading

import httpx
import pytest
import uvicorn
from playwright.sync_api import expect

from api.http.app import create_app
from tests.api.http.page import PHOTO, answered, mask_pixels, upload
from tests.api.http.stub_service import make_service
from tests.api.support import EXPERTS, airmoe, free_port, wait_for


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
