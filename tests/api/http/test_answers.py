"""Answers of a real server: what goes in, what comes out, what may be chosen, and images of every kind."""

import base64

import numpy as np
import pytest
from PIL import Image

from api.http.schemas import SegmentResponse
from tests.api.http.images import photo, saved
from tests.api.http.server_requests import PHOTO, mask_of, picture, segment
from tests.api.support import EXPERTS, TOP_K

# three ways in


def test_a_form_a_raw_body_and_json_give_the_same_mask(client):
    form = client.post("/segment", params={"seed": 3}, files={"file": ("any name.png", PHOTO, "image/png")})
    raw = segment(client, seed=3)
    sent = {"inputs": base64.b64encode(PHOTO).decode(), "parameters": {"seed": 3}}
    hugging_face = client.post("/segment", json=sent)
    assert form.status_code == raw.status_code == hugging_face.status_code == 200
    assert form.json()["mask"] == raw.json()["mask"] == hugging_face.json()["mask"]


def test_the_parameters_of_json_win_over_those_of_the_address(client):
    sent = {"inputs": base64.b64encode(PHOTO).decode(), "parameters": {"seed": 4}}
    answer = client.post("/segment", params={"seed": 3, "channel": "digital"}, json=sent).json()
    assert (answer["channel"]["seed"], answer["channel"]["kind"]) == (4, "digital")


def test_a_body_without_a_declared_type_is_judged_by_its_content(client):
    assert client.post("/segment", content=PHOTO).status_code == 200


# what comes out


def test_json_is_as_declared_and_adds_up(client):
    response = segment(client, seed=1)
    answer = SegmentResponse.model_validate_json(response.content, strict=True)
    assert (answer.width, answer.height) == (80, 48)
    assert sum(found.area for found in answer.segments) == 80 * 48
    assert all(0 < found.score <= 1 for found in answer.segments)
    assert answer.id == response.headers["x-request-id"]
    assert {"decode", "backbone", "read", "route", "expert", "channel", "encode", "total"} <= answer.timings_ms.keys()
    chosen = [expert for expert in answer.routing.experts if expert.selected]
    assert (len(answer.routing.experts), len(chosen)) == (EXPERTS, TOP_K)
    assert sum(expert.weight for expert in answer.routing.experts) == pytest.approx(1, abs=1e-5)


def test_json_names_no_field_that_is_not_declared(client):
    body = segment(client).json()
    assert body.keys() == SegmentResponse.model_fields.keys()
    declared = SegmentResponse.model_json_schema()["$defs"]
    assert body["channel"].keys() == declared["ChannelFacts"]["properties"].keys()
    assert body["routing"]["experts"][0].keys() == declared["Expert"]["properties"].keys()
    assert body["segments"][0].keys() == declared["Segment"]["properties"].keys()


def test_every_form_of_the_mask_is_the_same_mask(client):
    body = segment(client, seed=1).json()
    index = np.asarray(picture(base64.b64decode(body["mask"])))
    assert (index == np.asarray(picture(segment(client, accept="image/png", seed=1).content))).all()
    assert (index == mask_of(client, seed=1)).all()
    for found in body["segments"]:
        single = np.asarray(picture(base64.b64decode(found["mask"])))
        assert ((single == 255) == (index == found["id"])).all()
        assert found["area"] == (index == found["id"]).sum()


def test_a_view_is_the_index_with_palette_the_colours_or_the_overlay(client):
    views = {view: segment(client, accept="image/png", seed=1, view=view) for view in ("mask", "color", "overlay")}
    index, color, overlay = (picture(views[view].content) for view in ("mask", "color", "overlay"))
    assert (index.mode, color.mode, overlay.mode) == ("P", "RGB", "RGB")
    assert index.size == color.size == overlay.size == (80, 48)
    assert (np.asarray(index.convert("RGB")) == np.asarray(color)).all()
    assert (np.asarray(overlay) != np.asarray(color)).any()
    assert views["mask"].headers["x-airmoe-seed"] == "1"
    assert len(views["mask"].headers["x-airmoe-experts"].split(",")) == TOP_K


@pytest.mark.parametrize(
    ("accept", "kind"),
    [
        ("*/*", "application/json"),
        ("text/html", "application/json"),
        ("application/json, image/png", "application/json"),
        ("application/json;q=0.5, image/png", "image/png"),
        ("image/png;q=0.1, application/x-npy;q=0.7", "application/x-npy"),
        ("image/*", "image/png"),
        ("image/png;q=0", "application/json"),
        ("image/png;q=much, ,;;", "application/json"),
    ],
)
def test_accept_decides_by_its_order_and_quality(client, accept, kind):
    assert segment(client, accept=accept).headers["content-type"] == kind


# what may be chosen


def test_the_same_seed_is_the_same_draw_bit_for_bit(client):
    first, second = (segment(client, seed=11, snr_db=-5).json() for _ in range(2))
    for fact in ("mask", "segments", "channel", "routing"):
        assert first[fact] == second[fact]


def test_another_seed_is_another_draw(client):
    first, second = (segment(client, seed=seed, snr_db=-5).json() for seed in (1, 2))
    assert first["channel"]["nmse"] != second["channel"]["nmse"]
    assert first["mask"] != second["mask"]


def test_without_a_seed_every_answer_can_still_be_asked_for_again(client):
    first, second = segment(client).json(), segment(client).json()
    assert first["channel"]["seed"] != second["channel"]["seed"]
    again = segment(client, seed=first["channel"]["seed"]).json()
    assert (again["channel"], again["mask"]) == (first["channel"], first["mask"])


def test_the_ideal_channel_knows_no_seed(client):
    first, second = (segment(client, seed=seed, channel="ideal").json() for seed in (1, 2))
    assert first["mask"] == second["mask"]
    assert first["segments"] == second["segments"]
    assert first["channel"]["nmse"] == 0


def test_less_noise_is_less_distortion(client):
    nmse = [segment(client, seed=5, snr_db=snr_db).json()["channel"]["nmse"] for snr_db in (-60, 0, 20, 60, 120)]
    assert nmse == sorted(nmse, reverse=True)


def test_the_digital_channel_quantises_and_adds_no_noise(client):
    answer = segment(client, seed=5, channel="digital").json()
    assert answer["channel"]["noise_power"] == 0
    assert 0 < answer["channel"]["nmse"] < 1e-2


@pytest.mark.parametrize("top_k", range(1, EXPERTS + 1))
def test_top_k_experts_are_routed(client, top_k):
    answer = segment(client, seed=5, top_k=top_k, channel="ideal").json()
    assert sum(expert["selected"] for expert in answer["routing"]["experts"]) == top_k
    assert sum(expert["weight"] > 0 for expert in answer["routing"]["experts"]) == top_k
    fade_bits_alone = answer["communication"]["uplink_routing_bits"] == EXPERTS
    assert fade_bits_alone == (top_k == EXPERTS)  # where everybody is routed no statistic decides


# images of every kind


def odd_images() -> dict[str, tuple[bytes, tuple[int, int]]]:
    """Files with the size that people see."""
    rgb = Image.fromarray(photo(48, 80))
    exif = Image.Exif()
    exif[0x0112] = 6  # a quarter turn
    wide, tall = (80, 48), (48, 80)
    deep = Image.fromarray((photo(48, 80)[..., 0].astype(np.uint16)) * 257)
    return {
        "jpeg on its side": (saved(rgb, "JPEG", exif=exif), tall),
        "grey": (saved(rgb.convert("L")), wide),
        "bits": (saved(rgb.convert("1")), wide),
        "alpha": (saved(rgb.convert("RGBA")), wide),
        "grey alpha": (saved(rgb.convert("LA")), wide),
        "16 bit": (saved(deep), wide),
        "palette": (saved(rgb.convert("P")), wide),
        "palette, transparent": (saved(rgb.convert("P"), transparency=3), wide),
        "cmyk jpeg": (saved(rgb.convert("CMYK"), "JPEG"), wide),
        "animated webp": (saved(rgb, "WEBP", save_all=True, append_images=[rgb.rotate(180)]), wide),
        "bmp": (saved(rgb, "BMP"), wide),
        "tiff": (saved(rgb, "TIFF"), wide),
        "one pixel": (saved(photo(1, 1)), (1, 1)),
        "a line": (saved(photo(1, 700)), (700, 1)),
        "a column": (saved(photo(700, 1)), (1, 700)),
    }


@pytest.mark.parametrize("kind", odd_images())
def test_an_image_of_any_kind_has_a_mask_of_its_own_size(client, kind):
    data, size = odd_images()[kind]
    response = client.post("/segment", files={"file": data}, headers={"Accept": "image/png"})
    assert response.status_code == 200, response.text
    assert picture(response.content).size == size


def test_an_image_larger_than_the_model_is_answered_at_its_own_size(client):
    assert mask_of(client, saved(photo(700, 900))).shape == (700, 900)


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_masks_come_at_the_size_of_the_model_where_that_is_asked_for(client, kind):
    data = saved(photo(600, 1200), kind)
    small = mask_of(client, data, seed=3, size="model")
    assert small.shape == (32, 64)
    body = segment(client, data, seed=3, size="model").json()
    assert (body["height"], body["width"]) == small.shape
    assert sum(one["area"] for one in body["segments"]) == small.size
    for view in ("mask", "overlay"):
        shown = picture(segment(client, data, accept="image/png", seed=3, size="model", view=view).content)
        assert shown.size == small.shape[::-1]


def test_a_large_jpeg_has_one_mask_and_its_overlay_all_its_pixels(client):
    image = photo(900, 1200)
    data = saved(image, "JPEG", quality=95)
    index, overlay, plain = (
        np.asarray(picture(segment(client, data, accept="image/png", seed=3, view=view).content))
        for view in ("mask", "overlay", "color")
    )
    assert (index == mask_of(client, data, seed=3)).all()
    assert overlay.shape == plain.shape == image.shape
    inside = (overlay != plain).any(axis=2)  # borders have the plain colour
    shown = overlay[inside].astype(float) - 0.55 * plain[inside]
    assert np.abs(shown - 0.45 * image[inside]).mean() < 4
