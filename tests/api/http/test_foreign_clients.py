"""Clients of other people on a real server: curl, Triton's, and a fuzzer that reads the declared interface."""

import base64
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.http as triton
from PIL import Image

from tests.api.http.images import photo, saved
from tests.api.http.server_requests import PHOTO, assert_error, mask_of
from tests.api.support import Server


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
