"""One real server: what goes in, what comes out, who can talk to it, and how it ends."""

import asyncio
import base64
import http.server
import io
import json
import re
import shutil
import signal
import socket
import stat
import statistics
import subprocess
import sys
import threading
import time
import timeit
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.http as triton
from PIL import Image

from airmoe_ray.config import Config
from api.metrics import Metrics, MetricsMiddleware
from api.schemas import SegmentResponse
from tests.test_images import photo, png, saved
from tests.test_metrics_endpoint import make_answer
from tests.web.support import EXPERTS, TOP_K, Server, airmoe, samples, wait_for

PHOTO = saved(photo(48, 80))
PNG = {"Content-Type": "image/png"}


def segment(client: httpx.Client, data: bytes = PHOTO, *, accept: str = "*/*", **parameters: Any) -> httpx.Response:
    return client.post("/segment", content=data, headers={**PNG, "Accept": accept}, params=parameters)


def mask_of(client: httpx.Client, data: bytes = PHOTO, **parameters: Any) -> np.ndarray:
    response = segment(client, data, accept="application/x-npy", **parameters)
    assert response.status_code == 200, response.text
    return np.load(io.BytesIO(response.content))


def picture(data: bytes) -> Image.Image:
    image = Image.open(io.BytesIO(data))
    image.load()
    return image


def assert_error(response: httpx.Response, code: int) -> str:
    assert response.status_code == code, response.text
    body = response.json()
    assert body.keys() == {"error", "detail"}
    assert not re.search(r"Traceback|\.py\b|site-packages|/tmp/|/home/|/root/", response.text)
    return body["error"]


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


# one test per code


@pytest.mark.parametrize(
    "data",
    [b"", b"plain text, called photo.png", PHOTO[:60], PHOTO[:-40], b"\x89PNG\r\n\x1a\n" + b"\0" * 100],
    ids=["empty", "text", "header only", "truncated", "zeros"],
)
def test_what_is_not_an_image_is_400(client, data):
    assert_error(client.post("/segment", files={"file": ("photo.png", data, "image/png")}), 400)
    assert_error(segment(client, data), 400)


def test_a_form_without_a_file_is_400(client):
    assert "`file`" in assert_error(client.post("/segment", files={"picture": PHOTO}), 400)
    assert_error(client.post("/segment", content=b"x", headers={"Content-Type": "multipart/form-data"}), 400)
    broken = {"Content-Type": "multipart/form-data; boundary=b"}
    assert_error(client.post("/segment", content=b"--b\r\nno header\r\n\r\n--b--", headers=broken), 400)


@pytest.mark.parametrize("body", [b"{", b'{"inputs": "%%%"}', b"\xff\xfe", b'{"inputs": ""}'])
def test_json_that_cannot_be_read_is_400(client, body):
    assert_error(client.post("/segment", content=body, headers={"Content-Type": "application/json"}), 400)


def test_an_unknown_address_is_404(client):
    for path in (
        "/nothing",
        "/static/../../pyproject.toml",
        "/static/%2e%2e/app.py",
        "/samples/../x.png",
        "/v2/models/x",
    ):
        assert_error(client.get(path), 404)


def test_another_method_is_405_and_says_which_is_allowed(client):
    response = client.get("/segment")
    assert_error(response, 405)
    assert response.headers["allow"] == "POST"


def test_a_body_that_states_too_many_bytes_is_413_before_it_is_sent(server):
    head = b"POST /segment HTTP/1.1\r\nHost: x\r\nContent-Type: image/png\r\nContent-Length: 99999999999\r\n\r\n"
    answer = exchange(server, head)
    assert b" 413 " in answer.splitlines()[0]
    assert b'"max_bytes":20000000' in answer


def test_a_body_that_states_nothing_is_413_while_it_is_read(client):
    chunks = (b"\x89PNG\r\n\x1a\n" if n == 0 else bytes(1 << 20) for n in range(24))
    assert "20000000" in assert_error(client.post("/segment", content=chunks, headers=PNG), 413)


@pytest.mark.parametrize("form", ["form", "json"])
def test_a_large_image_is_413_in_every_form(client, form):
    data = PHOTO + bytes(20_000_000)
    sent = {"files": {"file": data}} if form == "form" else {"json": {"inputs": base64.b64encode(data).decode()}}
    assert "20000000" in assert_error(client.post("/segment", **sent), 413)


def test_a_decompression_bomb_is_413_by_its_stated_pixels(client):
    assert "400000000 pixels" in assert_error(segment(client, png(20_000, 20_000)), 413)


@pytest.mark.parametrize("content_type", ["text/plain", "image/gif", "application/x-www-form-urlencoded", "a" * 300])
def test_a_type_that_is_not_taken_is_415(client, content_type):
    error = assert_error(client.post("/segment", content=PHOTO, headers={"Content-Type": content_type}), 415)
    assert len(error) < 150


def test_a_gif_a_pdf_and_a_polyglot_called_png_are_415_or_400(client):
    gif = saved(photo(), "GIF")
    assert "image/gif" in assert_error(segment(client, gif), 415)
    assert "application/pdf" in assert_error(segment(client, b"%PDF-1.7\n" + PHOTO), 415)
    assert_error(segment(client, b"<html><script>alert(1)</script>" + PHOTO), 400)


def test_a_picture_with_a_page_behind_it_is_only_a_picture(client):
    response = segment(client, PHOTO + b"<script>alert(1)</script>", accept="image/png")
    assert response.status_code == 200
    assert b"script" not in response.content


@pytest.mark.parametrize(
    "parameters",
    [
        {"top_k": 0},
        {"top_k": EXPERTS + 1},
        {"top_k": 1.5},
        {"snr_db": "nan"},
        {"snr_db": "inf"},
        {"snr_db": 121},
        {"channel": "water"},
        {"seed": -1},
        {"seed": 2**63},
        {"view": "x-ray"},
        {"tok_k": 2},
    ],
    ids=str,
)
def test_a_parameter_out_of_range_is_422_and_named(client, parameters):
    assert next(iter(parameters)) in assert_error(segment(client, **parameters), 422)


@pytest.mark.parametrize("parameters", [{"top_k": True}, {"seed": "x"}, {"snr_db": False}, {"extra": 1}], ids=str)
def test_a_wrong_parameter_in_json_is_422_and_named(client, parameters):
    sent = {"inputs": base64.b64encode(PHOTO).decode(), "parameters": parameters}
    assert next(iter(parameters)) in assert_error(client.post("/segment", json=sent), 422)


# headers


def exchange(server: Server, request: bytes) -> bytes:
    """Bytes out, bytes in, until the other side has nothing more to say."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
        connection.sendall(request)
        received = b""
        while b"\r\n\r\n" not in received or not received.rstrip().endswith((b"}", b">")):
            part = connection.recv(65536)
            if not part:
                break
            received += part
    return received


def test_a_request_id_is_echoed_in_header_and_body(client):
    response = client.post("/segment", content=PHOTO, headers={**PNG, "X-Request-ID": "order-66/a"})
    assert response.headers["x-request-id"] == response.json()["id"] == "order-66/a"


@pytest.mark.parametrize("hostile", [b"a b", b"x" * 129, b"\xc3\xbc", b"", b"tab\there"], ids=str)
def test_a_hostile_request_id_is_replaced(client, hostile):
    given = client.get("/livez", headers={"X-Request-ID": hostile}).headers["x-request-id"]
    assert re.fullmatch("[0-9a-f]{32}", given)


@pytest.mark.parametrize("path", ["/", "/docs", "/static/app.js", "/livez", "/nothing", "/metrics", "/segment"])
def test_security_headers_are_on_every_answer(client, path):
    headers = client.get(path).headers
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["x-frame-options"] == "DENY"
    assert headers["referrer-policy"] == "no-referrer"
    policy = dict(part.strip().split(" ", 1) for part in headers["content-security-policy"].split(";"))
    assert policy["default-src"] == policy["script-src"] == "'self'"
    assert policy["object-src"] == policy["frame-ancestors"] == policy["base-uri"] == "'none'"
    assert "server" not in headers


def test_broken_http_does_not_end_the_server(server, client):
    assert b" 400 " in exchange(server, b"NOT HTTP AT ALL\r\n\r\n")
    assert client.get("/livez").json() == {"status": "alive"}


# clients of other people


def curl(server: Server, *arguments: object) -> bytes:
    if not shutil.which("curl"):
        pytest.skip("no curl; `make test-deps` installs it")
    command = ["curl", "--silent", "--show-error", "--fail-with-body", *map(str, arguments), f"{server.url}/segment"]
    return subprocess.run(command, capture_output=True, check=True, timeout=60).stdout


def test_curl_sends_a_form_and_reads_json(server, tmp_path):
    (tmp_path / "photo.png").write_bytes(PHOTO)
    answer = json.loads(curl(server, "-F", f"file=@{tmp_path}/photo.png"))
    assert (answer["width"], answer["height"]) == (80, 48)


def test_curl_sends_bytes_and_saves_a_png(server, tmp_path):
    (tmp_path / "photo.jpg").write_bytes(saved(photo(30, 50), "JPEG"))
    options = ("-H", "Accept: image/png", "-H", "Content-Type: image/jpeg", "--data-binary")
    curl(server, *options, f"@{tmp_path}/photo.jpg", "-o", tmp_path / "mask.png")
    assert Image.open(tmp_path / "mask.png").size == (50, 30)


def test_curl_is_told_413_while_it_still_sends(server, tmp_path):
    (tmp_path / "large.png").write_bytes(PHOTO + bytes(30_000_000))
    with pytest.raises(subprocess.CalledProcessError) as failure:
        curl(server, "-F", f"file=@{tmp_path}/large.png")
    assert json.loads(failure.value.stdout)["detail"] == {"max_bytes": 20_000_000}


@pytest.fixture
def inference(server: Server) -> Any:
    return triton.InferenceServerClient(f"127.0.0.1:{server.port}")


def test_a_triton_client_finds_server_and_model(inference):
    assert inference.is_server_live()
    assert inference.is_server_ready()
    assert inference.is_model_ready("airmoe")
    assert "binary_tensor_data" in inference.get_server_metadata()["extensions"]
    metadata = inference.get_model_metadata("airmoe")
    assert [tensor["name"] for tensor in metadata["inputs"] + metadata["outputs"]] == ["image", "mask"]


@pytest.mark.parametrize("binary_out", [True, False])
@pytest.mark.parametrize("binary_in", [True, False])
def test_a_triton_client_sends_pixels(inference, client, binary_in, binary_out):
    pixels = triton.InferInput("image", [48, 80, 3], "UINT8")
    pixels.set_data_from_numpy(photo(48, 80), binary_data=binary_in)
    wanted = [triton.InferRequestedOutput("mask", binary_data=binary_out)]
    result = inference.infer("airmoe", [pixels], outputs=wanted, parameters={"seed": 9}, request_id="mine")
    assert (result.as_numpy("mask") == mask_of(client, seed=9)).all()
    assert result.get_response()["id"] == "mine"
    assert result.get_response()["parameters"]["seed"] == 9


def test_a_triton_client_sends_a_file(inference, client):
    file = triton.InferInput("image", [1], "BYTES")
    file.set_data_from_numpy(np.array([PHOTO], dtype=object))
    result = inference.infer("airmoe", [file], parameters={"seed": 9, "channel": "ideal"})
    assert (result.as_numpy("mask") == mask_of(client, seed=9, channel="ideal")).all()


def test_the_protocol_takes_a_file_as_base64(client):
    tensor = {"name": "image", "shape": [1], "datatype": "BYTES", "data": [base64.b64encode(PHOTO).decode()]}
    answer = client.post("/v2/models/airmoe/infer", json={"inputs": [tensor], "parameters": {"seed": 9}}).json()
    assert answer["outputs"][0]["shape"] == [48, 80]
    assert answer["outputs"][0]["data"] == mask_of(client, seed=9).ravel().tolist()


TENSOR = {"name": "image", "shape": [1, 1, 3], "datatype": "UINT8", "data": [1, 2, 3]}


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"shape": [1, 1, 4]}, 400),
        ({"shape": [9000, 9000, 3]}, 413),
        ({"shape": [2, 1, 3]}, 400),
        ({"shape": "all"}, 400),
        ({"datatype": "FP32"}, 400),
        ({"datatype": "BYTES", "shape": [1], "data": ["%"]}, 400),
        ({"datatype": "BYTES", "shape": [2]}, 400),
        ({"data": [1, 2, 256]}, 400),
        ({"data": [1, 2, [3]]}, 400),
        ({"data": [1, 2, 1.5]}, 400),
        ({"data": None}, 400),
        ({"name": "picture"}, 400),
    ],
    ids=str,
)
def test_a_wrong_tensor_is_refused(client, change, code):
    assert_error(client.post("/v2/models/airmoe/infer", json={"inputs": [TENSOR | change]}), code)


@pytest.mark.parametrize("length", ["9" * 5000, "²", "-1", "999", "1"], ids=lambda length: length[:5])
def test_a_wrong_length_of_the_json_part_is_400(client, length):
    headers = {"Inference-Header-Content-Length": length.encode()}
    assert_error(client.post("/v2/models/airmoe/infer", json={"inputs": [TENSOR]}, headers=headers), 400)


# the declared interface


def test_the_interface_is_as_declared(server, tmp_path):
    st = Path(sys.executable).with_name("st")
    options = ("--phases", "examples,coverage,fuzzing", "--max-examples", "12", "--generation-database", "none")
    # what an image file is, no schema can say; the admin route has a test of its own
    options += ("--exclude-checks", "positive_data_acceptance", "--exclude-path", "/experts/scale", "--no-color")
    command = [st, "run", f"{server.url}/openapi.json", *options, "--warnings", "off", "--request-timeout", "30"]
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=200, check=False)
    assert result.returncode == 0, result.stdout[-6000:]


def test_every_reference_of_the_schema_leads_somewhere(client):
    schema = client.get("/openapi.json").json()
    text = json.dumps(schema)
    for reference in set(re.findall(r'"\$ref": "#/([^"]+)"', text)):
        place = schema
        for step in reference.split("/"):
            place = place[step]
    assert {"/segment", "/v2/models/airmoe/infer", "/experts/scale"} <= schema["paths"].keys()


# the command line


def test_segment_writes_three_pictures_per_image(server, tmp_path):
    (tmp_path / "in" / "deeper").mkdir(parents=True)
    (tmp_path / "one.jpg").write_bytes(saved(photo(30, 50), "JPEG"))
    for name in ("a.png", "deeper/a.png", "notes.txt"):
        (tmp_path / "in" / name).write_bytes(PHOTO)
    arguments = (tmp_path / "one.jpg", tmp_path / "in", "--url", server.url, "--out", tmp_path / "out", "--seed", "1")
    result = airmoe("segment", *arguments, "--json")
    assert result.returncode == 0, result.stderr
    rows = json.loads(result.stdout)
    assert [row["size"] for row in rows] == ["50x30", "80x48", "80x48"]
    written = [Path(place) for row in rows for place in row["written"]]
    assert sorted(path.name.rpartition("_")[2] for path in written) == sorted(
        ["mask.png", "color.png", "overlay.png"] * 3
    )
    assert len(set(written)) == 9
    assert {Image.open(path).size for path in written[:3]} == {(50, 30)}
    assert {Image.open(path).size for path in written[3:]} == {(80, 48)}


def test_status_lists_every_expert(server):
    result = airmoe("status", "--url", server.url, "--json")
    experts = json.loads(result.stdout)["experts"]
    assert [(expert["id"], expert["state"]) for expert in experts] == [(n, "up") for n in range(EXPERTS)]
    assert {"node", "gpu_ids", "load_ratio", "restarts", "replicas", "version"} <= experts[0].keys()


def test_a_refusal_reaches_the_command_line_as_one_line(server, tmp_path):
    (tmp_path / "a.png").write_bytes(b"no picture")
    result = airmoe("segment", tmp_path / "a.png", "--url", server.url, "--out", tmp_path / "out")
    assert result.returncode == 2
    assert len(result.stderr.strip().splitlines()) == 1
    assert "not an image" in result.stderr


def test_one_bad_image_of_a_folder_does_not_lose_the_others(server, tmp_path):
    folder = tmp_path / "photos"
    folder.mkdir()
    (folder / "a.png").write_bytes(b"no picture")
    (folder / "b.png").write_bytes(PHOTO)
    result = airmoe("segment", folder, "--url", server.url, "--out", tmp_path / "out")
    assert result.returncode == 2
    assert "a.png" in result.stderr
    assert "1 of 2 images were not segmented" in result.stderr
    assert {path.name for path in (tmp_path / "out").iterdir()} == {f"b_{k}.png" for k in ("mask", "color", "overlay")}


@pytest.mark.parametrize("command", [["status"], ["segment", "IMAGE"], ["scale", "--experts", "3"], ["chaos"]])
def test_another_web_server_is_told_apart_in_one_line(command, tmp_path):
    (tmp_path / "index.html").write_text("<p>hello")
    (tmp_path / "a.png").write_bytes(PHOTO)

    class Other(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *args):
            super().__init__(*args, directory=str(tmp_path))

        def do_GET(self):
            self.rfile.read(int(self.headers.get("content-length", 0)))
            self.path = "/"
            super().do_GET()

        do_POST = do_GET

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Other) as other:
        threading.Thread(target=other.serve_forever, daemon=True).start()
        command = [str(tmp_path / "a.png") if word == "IMAGE" else word for word in command]
        url = f"http://127.0.0.1:{other.server_port}"
        result = airmoe(*command, "--url", url, AIRMOE_ADMIN_TOKEN="x")
        other.shutdown()
    assert result.returncode == 2
    assert len(result.stderr.strip().splitlines()) == 1
    assert "not an AirMoE server" in result.stderr


def test_an_address_without_sense_is_one_line():
    result = airmoe("scale", "--experts", 3, "--url", "http://localhost:abc")
    assert result.returncode == 2
    assert len(result.stderr.strip().splitlines()) == 1


# metrics


def test_metrics_agree_with_what_was_sent(server, client):
    before = samples(server.url)
    for parameters in ({"top_k": 1}, {"top_k": 3}, {"channel": "ideal"}, {"channel": "digital", "top_k": 4}):
        assert segment(client, seed=1, **parameters).status_code == 200
    segment(client, b"no picture")
    after = samples(server.url)

    def grown(start: str) -> float:
        return sum(value - before.get(name, 0) for name, value in after.items() if name.startswith(start))

    assert grown('airmoe_requests_total{code="200"}') == 4
    assert grown('airmoe_requests_total{code="400"}') == 1
    assert grown("airmoe_request_duration_seconds_count") == 5
    assert grown("airmoe_expert_selected_total") == 1 + 3 + TOP_K + 4
    assert grown("airmoe_channel_nmse_count") == 3
    assert grown('airmoe_stage_duration_seconds_count{stage="total"}') == 4
    assert grown('airmoe_stage_duration_seconds_count{stage="encode"}') == 4
    assert after["airmoe_requests_in_progress"] == 0


def test_labels_are_bounded_by_the_number_of_experts(server, client):
    segment(client)
    names = samples(server.url)
    assert {label for name in names for label in re.findall('expert="([^"]+)"', name)} == set(map(str, range(EXPERTS)))
    assert len(names) < 700


def test_metrics_cost_at_most_two_percent_of_a_request(client):
    metrics, answer = Metrics(Config()), make_answer()
    asked: list[float] = []
    for _ in range(15):
        start = time.perf_counter()
        segment(client, seed=1)
        asked.append(time.perf_counter() - start)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def send(message: Any) -> None:
        """Nowhere."""

    def cost(app: Any) -> float:
        async def many() -> None:
            for _ in range(300):
                await app({"type": "http", "path": "/segment"}, None, send)

        return min(timeit.repeat(lambda: asyncio.run(many()), number=1, repeat=5)) / 300

    middleware = cost(MetricsMiddleware(app, metrics=metrics)) - cost(app)
    counting = min(timeit.repeat(lambda: metrics.observe(answer, seconds=0.1), number=100, repeat=5)) / 100
    assert middleware + counting < 0.02 * statistics.median(asked)


# scaling


def test_scale_reads_the_token_from_a_file_of_the_owner_alone(server, client):
    token = server.run / "state" / f"server-{server.port}.json"
    assert stat.S_IMODE(token.stat().st_mode) == 0o600
    options = ("--url", server.url, "--run", server.run, "--json")
    fewer = airmoe("scale", "--experts", 3, *options)
    assert len(json.loads(fewer.stdout)["experts"]) == 3, fewer.stderr
    assert len(segment(client, top_k=3).json()["routing"]["experts"]) == 3
    assert_error(segment(client, top_k=4), 422)
    more = airmoe("scale", "--experts", 4, "--replicas", "0=2", *options)
    assert len(json.loads(more.stdout)["experts"]) == 4, more.stderr

    def replicas() -> list[int]:
        return [expert["replicas"] for expert in client.get("/experts").json()["experts"]]

    assert wait_for(lambda: replicas() == [2, 1, 1, 1], timeout_s=60), replicas()
    assert not segment(client, top_k=4, channel="ideal").json()["routing"]["degraded"]
    assert samples(server.url)['airmoe_expert_replicas{expert="0"}'] == 2


def test_scaling_beyond_the_checkpoint_is_one_clear_line(server):
    result = airmoe("scale", "--experts", 9, "--url", server.url, "--run", server.run)
    assert result.returncode == 2
    assert result.stderr.strip().endswith("409, experts: the served checkpoint does not hold 9; serve one that does")


def test_scaling_with_the_token_of_another_run_is_refused(server, tmp_path):
    unknown = airmoe("scale", "--experts", 3, "--url", server.url, "--run", tmp_path)
    wrong = airmoe("scale", "--experts", 3, "--url", server.url, "--admin-token", "guess")
    assert (unknown.returncode, wrong.returncode) == (2, 2)
    assert "no server of this run" in unknown.stderr
    assert "401" in wrong.stderr


# the end; this stops the server of this file


def test_sigterm_answers_what_is_in_flight_and_leaves_nothing(server):
    head = f"POST /segment HTTP/1.1\r\nHost: x\r\nContent-Type: image/png\r\nContent-Length: {len(PHOTO)}\r\n\r\n"
    open_requests = [socket.create_connection(("127.0.0.1", server.port), timeout=60) for _ in range(6)]
    for connection in open_requests:
        connection.sendall(head.encode() + PHOTO[:50])
    assert wait_for(lambda: samples(server.url)["airmoe_requests_in_progress"] == 6)
    with ThreadPoolExecutor(1) as beside:
        ending = beside.submit(server.stop, signal.SIGTERM)
        assert wait_for(lambda: not server.is_listening())
        for connection in open_requests:
            connection.sendall(PHOTO[50:])
        answers = [connection.recv(12) for connection in open_requests]
        code, left = ending.result()
    assert answers == [b"HTTP/1.1 200"] * 6
    assert code == 0
    assert not left
    assert not server.is_listening()
    assert not list((server.run / "state").glob(f"server-{server.port}.json"))
    assert not re.search("Traceback|SIGTERM", server.log.read_text())
