"""Routes of the Open Inference Protocol, version 2 (KServe, Triton).

One input `image`: UINT8 (H, W, 3) or (1, H, W, 3), or BYTES (1) with an encoded image file. One output `mask`: UINT8
(H, W) of class ids. Request parameters are those of /segment.
"""

import json
import time
from typing import Any

from fastapi import APIRouter, Request, Response

from actors.serving.results import ImageResult
from airmoe_ray import __version__
from airmoe_ray.inference.masks import Prepared
from api.http.codec.body import limited
from api.http.codec.response import channel_facts, class_mask
from api.http.codec.tensors import HEADER_LENGTH, TensorRequest
from api.http.deps import RequestId, ServiceDep, check_alive, readiness_response
from api.http.routes.segment import ERRORS
from api.http.schemas import Error
from api.http.service import Service

router = APIRouter(prefix="/v2", tags=["Open Inference Protocol"])
_JSON_EXPANSION = 5  # a pixel value takes up to four characters in JSON: "255,"

_BODY = {
    "schema": {
        "type": "object",
        "required": ["inputs"],
        "properties": {
            "id": {"type": "string"},
            "parameters": {"type": ["object", "null"]},
            "inputs": {
                "type": "array",
                "minItems": 1,
                "maxItems": 1,
                "items": {
                    "type": "object",
                    "required": ["name", "shape", "datatype", "data"],
                    "properties": {
                        "name": {"const": "image"},
                        "shape": {"type": "array", "items": {"type": "integer", "minimum": 1}},
                        "datatype": {"enum": ["UINT8", "BYTES"]},
                        "data": {"type": "array"},
                    },
                },
            },
        },
    },
    "example": {
        "parameters": {"seed": 7},
        "inputs": [{"name": "image", "shape": [1, 2, 3], "datatype": "UINT8", "data": [90, 90, 90, 70, 130, 180]}],
    },
}


@router.get("")
async def server() -> dict[str, Any]:
    """Server metadata."""
    return {"name": "airmoe", "version": __version__, "extensions": ["binary_tensor_data"]}


@router.get("/health/live", responses={503: {"model": Error}})
async def live(service: ServiceDep) -> dict[str, bool]:
    """The process answers, and none of its loops has died."""
    check_alive(service)
    return {"live": True}


@router.get("/health/ready", responses={503: {"model": Error}})
@router.get("/models/airmoe/ready", responses={503: {"model": Error}})
async def ready(service: ServiceDep) -> Response:
    """A tiny image goes through."""
    return await readiness_response(service, '{"ready":true}')


@router.get("/models/airmoe")
async def model(service: ServiceDep) -> dict[str, Any]:
    """Model metadata."""
    return {
        "name": "airmoe",
        "versions": ["1"],
        "platform": "ray_pytorch",
        "inputs": [{"name": "image", "datatype": "UINT8", "shape": [-1, -1, 3]}],
        "outputs": [{"name": "mask", "datatype": "UINT8", "shape": [-1, -1]}],
        "parameters": {"classes": list(service.classes.names)},
    }


@router.post(
    "/models/airmoe/infer",
    response_class=Response,
    responses={200: {"content": {"application/json": {}, "application/octet-stream": {}}}, **ERRORS},
    openapi_extra={"requestBody": {"required": True, "content": {"application/json": _BODY}}},
)
async def infer(request: Request, service: ServiceDep, request_id: RequestId) -> Response:
    """One image in, its mask out."""
    limit = service.config.serve.max_bytes
    async with service.admitted() as ends_at:
        body = b"".join([chunk async for chunk in limited(request, _JSON_EXPANSION * limit, limit)])
        arrived = time.perf_counter()
        # JSON of megapixels takes seconds to read and to write: not on the event loop
        given = await service.reading(TensorRequest.read, body, request.headers.get(HEADER_LENGTH))
        parameters = given.parameters()
        settings = service.settings(parameters)
        image = await service.reading(_prepare, service, given)
        image = image.at_model_size() if parameters.size == "model" else image
        result = await service.segment(image, settings, parameters.seed, arrived=arrived, ends_at=ends_at)
        return await service.writing(_respond, given, result, image, request_id)


def _prepare(service: Service, given: TensorRequest) -> Prepared:
    return service.prepare(given.picture(service.config.serve, service.long_side))


def _respond(given: TensorRequest, result: ImageResult, image: Prepared, request_id: str) -> Response:
    """Make the response: JSON, with the mask as bytes behind it where the request asks for that."""
    heard = [client.id for client in result.clients if client.weight > 0]
    facts = {
        **channel_facts(result).model_dump(),
        "truncated": json.dumps(result.truncated),  # the protocol's parameters are scalars
        "experts": json.dumps(heard),
        "degraded": result.degraded,
    }
    head, tail = given.reply(class_mask(result, image), facts, request_id=request_id)
    if not tail:
        return Response(head, media_type="application/json")
    return Response(head + tail, headers={HEADER_LENGTH: str(len(head))}, media_type="application/octet-stream")
