"""Answers of a real server in other people's forms, and to several files at once."""

import base64

import numpy as np
import pytest
from huggingface_hub import InferenceClient
from huggingface_hub.errors import HfHubHTTPError
from pycocotools import mask as coco

from api.http.codec.body import MAX_FILES
from tests.api.http.images import photo, png, saved
from tests.api.http.server_requests import PHOTO, assert_error, mask_of, picture, segment
from tests.api.http.test_mask_forms import drawn

OTHER = saved(photo(30, 50), "JPEG")
FORMS = ("png", "rle", "polygons", "huggingface")


def several(*data: bytes) -> list[tuple[str, tuple[str, bytes, str]]]:
    return [("file", (f"{n}.png", one, "image/png")) for n, one in enumerate(data)]


# one image


def test_every_form_holds_the_same_masks(client):
    index = mask_of(client, seed=1)
    for form in FORMS:
        body = segment(client, seed=1, format=form).json()
        segments = body if form == "huggingface" else body["segments"]
        owns = [found["mask"] for found in segments]
        masks = {
            "rle": lambda own: coco.decode(own) == 1,
            "polygons": lambda own: drawn(own, index.shape),
        }.get(form, lambda own: np.asarray(picture(base64.b64decode(own))) == 255)
        assert [masks(own).tolist() for own in owns] == [(index == c).tolist() for c in np.unique(index)]


def test_the_form_may_stand_in_json(client):
    sent = {"inputs": base64.b64encode(PHOTO).decode(), "parameters": {"format": "rle"}}
    assert client.post("/segment", json=sent).json()["segments"][0]["mask"].keys() == {"size", "counts"}


def test_one_pixel_is_answered_in_every_form(client):
    own = {}
    for form in FORMS:
        body = segment(client, saved(photo(1, 1)), format=form).json()
        (own[form],) = [found["mask"] for found in (body if form == "huggingface" else body["segments"])]
    assert own["rle"] == {"size": [1, 1], "counts": "01"}
    assert own["polygons"] == [[0, 0, 1, 0, 1, 1, 0, 1]]
    assert own["huggingface"] == own["png"]


def test_an_unknown_form_is_422_and_says_which_are_known(client):
    error = assert_error(segment(client, format="svg"), 422)
    assert error.startswith("format: ")
    assert all(form in error for form in FORMS)


@pytest.mark.parametrize("accept", ["image/png", "application/x-npy"])
def test_a_form_of_json_is_refused_where_another_type_is_wanted(client, accept):
    assert accept in assert_error(segment(client, accept=accept, format="rle"), 422)
    assert segment(client, accept=accept, format="png").status_code == 200


# Hugging Face's own client


def test_hugging_faces_client_works_against_us(server, client, tmp_path):
    (tmp_path / "photo.jpg").write_bytes(OTHER)
    theirs = InferenceClient(f"{server.url}/segment?format=huggingface&seed=1")
    index = mask_of(client, OTHER, seed=1)
    for image in (OTHER, tmp_path / "photo.jpg"):
        found = theirs.image_segmentation(image)
        assert [element.label for element in found] == [
            s["label"] for s in segment(client, OTHER, seed=1).json()["segments"]
        ]
        assert all(0 < element.score <= 1 for element in found)
        assert [(np.asarray(e.mask) == 255).tolist() for e in found] == [
            (index == c).tolist() for c in np.unique(index)
        ]


def test_hugging_faces_client_may_set_a_threshold(server):
    theirs = InferenceClient(f"{server.url}/segment?format=huggingface&channel=ideal")
    everything = theirs.image_segmentation(PHOTO)
    best = max(element.score for element in everything)
    found = theirs.image_segmentation(PHOTO, threshold=best, subtask="semantic")
    assert 0 < len(found) < len(everything)
    assert all(element.score >= best for element in found)


def test_hugging_faces_client_shows_why_it_is_refused(server):
    with pytest.raises(HfHubHTTPError, match="subtask"):
        InferenceClient(f"{server.url}/segment?format=huggingface").image_segmentation(PHOTO, subtask="panoptic")


# several files


def test_several_files_are_answered_in_order_each_as_if_alone(client):
    answers = client.post("/segment", params={"seed": 4}, files=several(PHOTO, OTHER, PHOTO)).json()
    assert [(answer["width"], answer["height"]) for answer in answers] == [(80, 48), (50, 30), (80, 48)]
    assert len({answer["id"] for answer in answers}) == 3
    for data, answer in zip((PHOTO, OTHER), answers, strict=False):
        alone = segment(client, data, seed=4).json()
        draws = [[expert["gamma"] for expert in one["routing"]["experts"]] for one in (answer, alone)]
        assert draws[0] == draws[1]
        assert answer["channel"]["nmse"] == pytest.approx(alone["channel"]["nmse"], rel=1e-3)
        same = np.asarray(picture(base64.b64decode(answer["mask"]))) == mask_of(client, data, seed=4)
        assert same.mean() > 0.999  # in a batch, sums may round otherwise


def test_a_bad_file_has_its_error_and_its_neighbours_their_answers(client):
    huge, gif = png(8000, 6251), saved(photo(), "GIF")  # 8000 * 6251 is 50 008 000
    answers = client.post("/segment", files=several(b"no image", PHOTO, huge, gif, b"", OTHER)).json()
    assert [answer.get("status", 200) for answer in answers] == [400, 200, 413, 415, 400, 200]
    failed = [answer for answer in answers if "status" in answer]
    assert all(answer.keys() == {"error", "detail", "status"} for answer in failed)
    assert "50008000 pixels, the limit is 50000000" in answers[2]["error"]


def test_several_files_may_have_hugging_faces_form(client):
    answers = client.post("/segment", params={"format": "huggingface"}, files=several(PHOTO, b"x")).json()
    assert answers[0][0].keys() == {"label", "score", "mask"}
    assert answers[1]["status"] == 400


def test_several_files_as_one_picture_are_refused(client):
    response = client.post("/segment", files=several(PHOTO, PHOTO), headers={"Accept": "image/png"})
    assert "2 files are answered as JSON only" in assert_error(response, 422)


def test_too_many_files_are_422_and_the_limit_is_stated(client):
    assert f"more than {MAX_FILES} files" in assert_error(client.post("/segment", files=several(*[b"x"] * 17)), 422)
    answers = client.post("/segment", files=several(*[b"x"] * MAX_FILES)).json()
    assert [answer["status"] for answer in answers] == [400] * MAX_FILES


def test_the_limit_of_bytes_is_for_all_files_together(client):
    error = assert_error(client.post("/segment", files=several(PHOTO, bytes(11_000_000), bytes(9_000_000))), 413)
    assert "20000000" in error


def test_a_text_field_called_file_is_not_a_file(client):
    response = client.post("/segment", data={"file": "photo.png"}, files=several(PHOTO))
    assert "`file`" in assert_error(response, 400)
