"""The JSON of /segment, against what version 0.3.0 sent for the same result (`segment_0_3_0.json`)."""

import base64
import io
import json
import time
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from PIL import Image

from actors.errors import Fault
from actors.serving.results import ClientAccount, ImageResult
from airmoe_ray.config import Config
from airmoe_ray.data.base import ClassTable
from airmoe_ray.inference.masks import Prepared
from airmoe_ray.radio.ledger import Ledger
from api.http.codec.response import fault_name, headers, segment_response, to_json
from api.http.schemas import FaultName, SegmentResponse

STORED = json.loads(Path(__file__).with_name("segment_0_3_0.json").read_text())
CLASSES = ClassTable(("road", "Straße", "sky"), ((128, 64, 128), (0, 0, 70), (70, 130, 180)))
IMAGE = Prepared(np.zeros((32, 48, 3), np.uint8), (16, 24), (16, 24))
RESULT = ImageResult(
    logits_Chw=np.array([[[2, 2, -2]] * 2, [[-2, -2, 2]] * 2, [[-9] * 3] * 2], np.float32),
    clients=(
        ClientAccount(0, 0.125, 0.75, 0.5, True, 0.625, 0.5 - 1.25j, 3),
        ClientAccount(1, None, None, None, False, 0.0, None, None),
        ClientAccount(2, 1e-05, 0.5, 0.25, True, 0.0, None, 0),
        ClientAccount(3, 0.6931, 0.1, 0.25, False, 0.375, 1 + 0j, 12),
    ),
    channel=Config().channel,
    seed=2**53 - 1,
    rho=1.5e-07,
    noise_power=0.01,
    nmse=3.0517578125e-05,
    truncated=(2,),
    skipped={1: Fault.LOST},
    all_faded=False,
    ledger=Ledger(1, 2, 3, 4, 5, 6, 7, 8, None),
    batch_size=2,
    timings_ms={
        "decode": 1.23456,
        "queue": 0.0,
        "backbone": 12.34567,
        "read": 1e-05,
        "route": 1.0,
        "expert": 2.0,
        "channel": 0.0005,
    },
)


@pytest.fixture(scope="module")
def sent() -> bytes:
    arrived = time.perf_counter() - 0.05
    return to_json(segment_response(RESULT, IMAGE, CLASSES, request_id="request-1", arrived=arrived))


def leaves(value: Any, path: str = "") -> list[tuple[str, Any]]:
    """Every value with the way to it, in the order in which they stand."""
    if isinstance(value, dict):
        return [leaf for key, item in value.items() for leaf in leaves(item, f"{path}.{key}")]
    if isinstance(value, list):
        return [leaf for n, item in enumerate(value) for leaf in leaves(item, f"{path}[{n}]")] or [(path, [])]
    return [(path, value)]


def measured(path: str) -> bool:
    return path in {".timings_ms.encode", ".timings_ms.total"}


def known_to_0_3_0(sent: bytes) -> Any:
    """The answer without what has been added since."""
    answer = json.loads(sent)
    del answer["routing"]["faults"], answer["routing"]["all_faded"]
    return answer


def test_keys_and_their_order_and_types_are_those_of_0_3_0(sent):
    new, old = leaves(known_to_0_3_0(sent)), leaves(STORED)
    assert [(path, type(value)) for path, value in new] == [(path, type(value)) for path, value in old]


def test_values_are_those_of_0_3_0(sent):
    old = dict(leaves(STORED))
    for path, value in leaves(known_to_0_3_0(sent)):
        if path.endswith(".mask"):  # another zlib may pack the same pixels otherwise
            assert (pixels(value) == pixels(old[path])).all()
        elif path.endswith(".score") and path.startswith(".segments"):
            assert value == pytest.approx(old[path], rel=1e-5)  # single precision, and another CPU's exp
        elif not measured(path):
            assert value == old[path], path


def pixels(mask: str) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(mask))))


def test_faults_are_named_for_programs(sent):
    routing = json.loads(sent)["routing"]
    assert (routing["faults"], routing["all_faded"]) == ({"1": "lost"}, False)
    assert {fault_name(fault) for fault in Fault} == set(get_args(FaultName))


def test_times_are_in_whole_microseconds_and_the_total_is_since_arrival(sent):
    times = json.loads(sent)["timings_ms"]
    assert all(value == round(value, 3) for value in times.values())
    assert times["total"] - times["encode"] > 49.9


def test_what_is_sent_is_what_is_documented(sent):
    assert to_json(SegmentResponse.model_validate_json(sent, strict=True)) == sent


def test_headers_tell_who_was_heard():
    told = headers(RESULT)
    assert (told["X-AirMoE-Experts"], told["X-AirMoE-Weights"]) == ("0,3", "0.6250,0.3750")
    assert (told["X-AirMoE-Degraded"], told["X-AirMoE-NMSE"]) == ("true", "3.05176e-05")
