"""The page in a real browser: whose work an answer is, and what it would be with one alone or without one."""

import re

from playwright.sync_api import expect

from tests.api.http.page import answered, change, fact, mask_pixels, routed, upload
from tests.api.support import EXPERTS, TOP_K


def asked(page):
    """Addresses of the requests for an answer from now on."""
    urls = []
    page.on("request", lambda request: "/segment?" in request.url and urls.append(request.url))
    return urls


def pick(page, selector, wanted):
    """Press something that asks for another answer, and wait for it."""
    with page.expect_response(lambda response: wanted in response.url and response.ok):
        page.locator(selector).click(force=True)
    answered(page)


def test_the_page_says_who_spoke_and_what_they_know(page):
    upload(page)
    chips = page.locator("#whose-list button")
    expect(chips).to_have_count(1 + page.locator("tr[data-role=routed]").count() + 1)
    expect(chips.first).to_have_text("All together")
    expect(chips.first).to_have_attribute("aria-pressed", "true")
    expect(chips.nth(1)).to_have_text(re.compile(r"(clear days|rainy streets|night drawings|Expert 3)\d+.%$"))
    expect(page.locator("tr[data-expert='2'] th")).to_contain_text("night drawings")
    expect(page.locator("tr[data-expert='3'] .knows")).to_have_count(0)  # nobody said
    expect(page.locator("#terms")).to_have_text("Model little town: for research use only")


def test_one_expert_alone_is_a_request_of_its_own_and_one_click_leads_back_without_any(page):
    upload(page)
    before, urls = mask_pixels(page), asked(page)
    pick(page, "tr[data-expert='2'] button", "only=2")
    assert mask_pixels(page) != before
    assert routed(page) == 1
    expect(page.locator("#whose-words")).to_have_text("Night drawings alone")
    expect(page.locator("tr[data-expert='2'] button")).to_have_attribute("aria-pressed", "true")
    page.locator("[data-who=all]").click()
    answered(page)
    assert mask_pixels(page) == before
    assert routed(page) == TOP_K
    assert len(urls) == 1


def test_the_cloud_alone_and_the_answer_without_it(page):
    upload(page)
    pick(page, "[data-who=cloud]", "only=cloud")
    assert fact(page, "transmitting") == "nobody"
    assert fact(page, "nmse") == "none"
    expect(page.get_by_test_id("compare-air-time")).to_contain_text("none")
    pick(page, "input[name=whose-mode][value=without]", "without=cloud")
    assert routed(page) == TOP_K


def test_who_is_left_out_is_marked_and_another_speaks(page):
    upload(page)
    best = page.locator("#whose-list button").nth(1).get_attribute("data-who")
    page.locator("input[name=whose-mode][value=without]").evaluate("(one) => (one.checked = true)")
    pick(page, f"[data-who='{best}']", f"without={best}")
    expect(page.locator(f"tr[data-expert='{best}']")).to_have_attribute("data-role", "left-out")
    assert routed(page) == TOP_K


def test_where_they_disagree_is_marked_with_its_share_and_asks_nobody(page):
    upload(page)
    pick(page, "[data-who=cloud]", "only=cloud")
    share = page.locator("#disagree-share")
    expect(share).to_have_text(re.compile(r"\d"))
    expect(share).to_have_text(fact(page, "changed"))  # the mask before this one was everybody's
    urls, before = asked(page), mask_pixels(page)
    page.locator("#disagree").check()
    assert mask_pixels(page) != before
    strong = page.evaluate(
        """() => {
            const canvas = document.getElementById("mask-canvas");
            const {data} = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
            let strong = 0;
            for (let i = 3; i < data.length; i += 4) strong += data[i] > 200;
            return (100 * strong) / (data.length / 4);
        }"""
    )
    assert abs(strong - float(re.sub(r"[^\d.]", "", share.inner_text()))) < 0.11
    page.locator("[data-who=all]").click()
    answered(page)
    expect(page.locator("#whose-tools")).to_be_hidden()
    assert urls == []


def test_a_slider_asks_the_one_that_is_shown_first_and_then_what_it_is_compared_with(page):
    upload(page)
    pick(page, "[data-who=cloud]", "only=cloud")
    urls = asked(page)
    change(page, "#top-k", EXPERTS)
    expect(page.locator("#disagree-share")).to_have_text(re.compile(r"\d"))
    assert ["only=cloud" in url for url in urls] == [True, False]
    expect(page.locator("#whose-list button")).to_have_count(1 + page.locator("[data-who] .who-weight").count() + 1)


def test_of_many_slider_positions_the_newest_is_asked_and_an_answer_under_way_is_dropped(page):
    upload(page)
    page.route(re.compile("snr_db=-5"), lambda _: None)  # an answer that never comes
    with page.expect_request(re.compile("snr_db=-5")):
        page.locator("#snr").fill("-5")
    urls = asked(page)
    with (
        page.expect_event("requestfailed", lambda request: "snr_db=-5" in request.url),
        page.expect_response(lambda response: "snr_db=7&" in response.url),
    ):
        page.locator("#snr").evaluate(
            """(slider) => [1, 3, 5, 7].forEach((value) => {
                slider.value = value;
                slider.dispatchEvent(new Event("input"));
            })"""
        )
    answered(page)
    assert ["snr_db=7&" in url for url in urls] == [True]
    page.unroute_all(behavior="ignoreErrors")


def test_an_expert_that_cannot_answer_is_told_in_words_and_the_fused_answer_stays_a_click_away(page, trouble):
    upload(page)
    before = mask_pixels(page)
    page.route(
        re.compile("only=1"),
        lambda route: route.fulfill(status=503, json={"error": "expert 1 is not up at the moment", "detail": None}),
    )
    page.locator("tr[data-expert='1'] button").click()
    expect(page.locator("#notice")).to_contain_text("Expert 1 is not up")
    page.locator("[data-who=all]").click()
    expect(page.locator("#notice")).to_be_hidden()
    assert mask_pixels(page) == before
    assert [entry for entry in trouble if "503" not in entry] == []
    trouble.clear()  # the browser itself logs the 503
