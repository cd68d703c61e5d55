"""POST /segment: takes images, returns their masks and the account of how they came about."""

import asyncio
import logging
import re
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response

from actors.rounds.messages import Settings
from actors.serving.results import ImageResult
from airmoe_ray.inference.masks import Prepared
from api.http.codec import response
from api.http.codec.body import MAX_FILES, read_images
from api.http.deps import RequestId, ServiceDep
from api.http.errors import ApiError, Refusal, refusal
from api.http.schemas import AnyAnswer, Error, FileError, JsonRequest, Parameters
from api.http.service import Service

log = logging.getLogger("airmoe")
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
                "properties": {
                    "file": {
                        "type": "array",
                        "minItems": 1,
                        "maxItems": MAX_FILES,
                        "items": {"type": "string", "format": "binary"},
                        "description": "One image file, or several fields of this name",
                    }
                },
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
            "model": AnyAnswer,
            "content": {"image/png": _BINARY, "application/x-npy": _BINARY},
            "description": "JSON with masks as base64 PNG, or in another form by `format`; a list of answers "
            "to several files; or by `Accept` one PNG or NumPy array of the image's size",
        },
        **ERRORS,
    },
    openapi_extra={"requestBody": _BODY},
)
async def segment(
    request: Request, parameters: Annotated[Parameters, Query()], service: ServiceDep, request_id: RequestId
) -> Response:
    """Segment one image, or several.

    Send it as the form field `file`, as a raw image body, or as JSON `{"inputs": base64, "parameters": {…}}`. The same
    image with the same `seed` meets the same fading and noise. Several fields `file` are answered by a list, in their
    order; a file that fails has its error there, and the others their answers.
    """
    wanted = _wanted(request.headers.get("accept", ""))
    async with service.admitted() as ends_at:
        files, parameters = await read_images(request, parameters, max_bytes=service.config.serve.max_bytes)
        _check_fits(wanted, parameters, len(files))
        order = _Order(service, parameters, service.settings(parameters), wanted, time.perf_counter(), ends_at)
        if len(files) == 1:
            return await order.respond(files[0], request_id)
        answers = await asyncio.gather(*(order.one_of_several(data, n, request_id) for n, data in enumerate(files)))
        return Response(b"[" + b",".join(answers) + b"]", media_type=_TYPES[0])


def _check_fits(wanted: str, parameters: Parameters, files: int) -> None:
    """Refuse what JSON alone can say where another type is wanted."""
    if wanted == _TYPES[0]:
        return
    if files > 1:
        raise ApiError(422, f"{files} files are answered as JSON only, not as {wanted}; send them one by one")
    if parameters.format != "png":
        raise ApiError(422, f"format: {parameters.format} is a form of JSON; do not ask for {wanted}, or leave it out")


@dataclass(frozen=True)
class _Order:
    """What a request asks for, of each of its images."""

    service: Service
    parameters: Parameters
    settings: Settings
    wanted: str  # type of the response
    arrived: float  # when work on the request began, on `time.perf_counter`
    ends_at: float  # when its time is over, on `time.monotonic`

    async def respond(self, data: bytes, request_id: str) -> Response:
        """Segment an image file, and make the response of it."""
        service, parameters, wanted = self.service, self.parameters, self.wanted
        overlay = wanted == "image/png" and parameters.view == "overlay"
        image, rgb = await service.reading(service.decode, data, overlay and parameters.size == "image")
        if parameters.size == "model":
            image = image.at_model_size()
            rgb = image.fitted if overlay else None
        result = await service.segment(
            image, self.settings, parameters.seed, arrived=self.arrived, ends_at=self.ends_at
        )
        if wanted == "application/json":
            return await service.writing(_json, service, result, image, parameters, request_id, self.arrived)
        if wanted == "image/png":
            content = partial(response.png, result, image, service.classes, view=parameters.view, rgb=rgb)
        else:
            content = partial(response.npy, result, image)
        return await service.writing(_binary, service, result, wanted, content)

    async def one_of_several(self, data: bytes, number: int, request_id: str) -> bytes:
        """JSON of one file of a list, or of its error; each takes a place, the first one that of the request."""
        try:
            async with nullcontext() if number == 0 else self.service.admitted():
                return bytes((await self.respond(data, f"{request_id}.{number}")).body)
        except Exception as error:
            told = refusal(error)
            if told is None:  # a defect: the log has the traceback, and the other files have their answers
                log.exception("file %d of request %s failed", number, request_id)
                told = Refusal(500, "internal error")
            return FileError(error=told.error, detail=told.detail, status=told.status).model_dump_json().encode()


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


def _json(  # noqa: PLR0917
    service: Service, result: ImageResult, image: Prepared, parameters: Parameters, request_id: str, arrived: float
) -> Response:
    """Make the JSON response; serialising it takes milliseconds too and belongs on the thread."""
    threshold = parameters.threshold
    if parameters.format == "huggingface":
        started = time.perf_counter()
        found = response.labelled_masks(result, image, service.classes, threshold=threshold)
        service.metrics.observe_stage("encode", seconds=time.perf_counter() - started)
        return Response(response.labelled_to_json(found), media_type="application/json")
    body = response.segment_response(
        result,
        image,
        service.classes,
        request_id=request_id,
        arrived=arrived,
        form=parameters.format,
        threshold=threshold,
    )
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
