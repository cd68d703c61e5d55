"""The page in a real browser: an image gets in, and the radio changes what comes out."""

import re

from playwright.sync_api import expect

from tests.api.http.images import photo, saved
from tests.api.http.page import PHOTO, answered, change, choose, fact, mask_pixels, routed, upload
from tests.api.support import EXPERTS, TOP_K

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
