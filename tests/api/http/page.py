"""The page in a real browser: what people do with it."""

from typing import Any

from playwright.sync_api import Page, expect

from tests.api.http.images import photo, saved
from tests.api.support import Server

PHOTO = {"name": "street.png", "mimeType": "image/png", "buffer": saved(photo(48, 80))}
expect.set_options(timeout=20_000)


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
