"""POST /segment: takes an image, returns its mask and the account of how it came about."""

import re
import time
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response

from actors.serving.results import ImageResult
from airmoe_ray.inference.masks import Prepared
from api.http.codec import response
from api.http.codec.body import read_image
from api.http.deps import RequestId, ServiceDep
from api.http.schemas import Error, JsonRequest, Parameters, SegmentResponse
from api.http.service import Service

router = APIRouter(tags=["segment"])

ERRORS: dict[int | str, dict[str, Any]] = {
    400: {"model": Error, "description": "Not an image"},
    413: {"model": Error, "description": "Too large, in bytes or pixels"},
    415: {"model": Error, "description": "A type that is not taken"},
    422: {"model": Error, "description": "A parameter out of range"},
    429: {"model": Error, "description": "The queue is full; see Retry-After"},
    503: {"model": Error, "description": "Nothing can answer at the moment; see Retry-After"},
    504: {"model": Error, "description": "Past the deadline"},
}
_TYPES = ("application/json", "image/png", "application/x-npy")
_BINARY = {"schema": {"type": "string", "format": "binary"}}
_JSON = JsonRequest.model_json_schema()
_JSON["properties"]["parameters"] = _JSON.pop("$defs")["Parameters"]  # in place: nothing else would register it
_BODY = {
    "required": True,
    "content": {
        "multipart/form-data": {
            "schema": {
                "type": "object",
                "required": ["file"],
                "properties": {"file": {"type": "string", "format": "binary"}},
            }
        },
        **{f"image/{kind}": _BINARY for kind in ("png", "jpeg", "webp", "bmp", "tiff")},
        "application/json": {"schema": _JSON},
    },
}


@router.post(
    "/segment",
    response_class=Response,
    responses={
        200: {
            "model": SegmentResponse,
            "content": {"image/png": _BINARY, "application/x-npy": _BINARY},
            "description": "JSON with masks as base64 PNG, or by `Accept` one PNG or NumPy array of the image's size",
        },
        **ERRORS,
    },
    openapi_extra={"requestBody": _BODY},
)
async def segment(
    request: Request, parameters: Annotated[Parameters, Query()], service: ServiceDep, request_id: RequestId
) -> Response:
    """Segment one image.

    Send it as the form field `file`, as a raw image body, or as JSON `{"inputs": base64, "parameters": {…}}`. The same
    image with the same `seed` meets the same fading and noise.
    """
    wanted = _wanted(request.headers.get("accept", ""))
    async with service.admitted() as ends_at:
        data, parameters = await read_image(request, parameters, max_bytes=service.config.serve.max_bytes)
        arrived = time.perf_counter()
        settings = service.settings(parameters)
        keep_rgb = wanted == "image/png" and parameters.view == "overlay"
        image, rgb = await service.on_thread(service.decode, data, keep_rgb)
        result = await service.segment(image, settings, parameters.seed, arrived=arrived, ends_at=ends_at)
        if wanted == "application/json":
            return await service.on_thread(_json, service, result, image, request_id, arrived)
        if wanted == "image/png":
            content = partial(response.png, result, image, service.classes, view=parameters.view, rgb=rgb)
        else:
            content = partial(response.npy, result, image)
        return await service.on_thread(_binary, service, result, wanted, content)


def _wanted(accept: str) -> str:
    """The type of ours that an `Accept` header prefers: the first of equals, JSON if it names none of them."""
    best, liking = _TYPES[0], 0.0
    for entry in accept.split(","):
        kind, *options = (part.strip().lower() for part in entry.split(";"))
        quality = next((option[2:] for option in options if option.startswith("q=")), "1")
        value = float(quality) if re.fullmatch(r"[01](\.\d{0,3})?", quality) else 0.0
        ours = next((one for one in _TYPES if kind in (one, f"{one.partition('/')[0]}/*", "*/*")), None)
        if ours and value > liking:
            best, liking = ours, value
    return best


def _json(service: Service, result: ImageResult, image: Prepared, request_id: str, arrived: float) -> Response:
    """Make the JSON response; serialising it takes milliseconds too and belongs on the thread."""
    body = response.segment_response(result, image, service.classes, request_id=request_id, arrived=arrived)
    service.metrics.observe_stage("encode", seconds=body.timings_ms["encode"] / 1e3)
    return Response(response.to_json(body), media_type="application/json")


def _binary(service: Service, result: ImageResult, media_type: str, content: Callable[[], bytes]) -> Response:
    """Make a response of the mask alone; the facts and the time of each stage are in headers."""
    started = time.perf_counter()
    body = content()
    encode_s = time.perf_counter() - started
    service.metrics.observe_stage("encode", seconds=encode_s)
    stages = {**result.timings_ms, "encode": 1e3 * encode_s}
    timing = {"Server-Timing": ", ".join(f"{name};dur={ms:.2f}" for name, ms in stages.items())}
    return Response(body, media_type=media_type, headers=response.headers(result) | timing)
