"""The Open Inference Protocol, version 2 (KServe, Triton): JSON tensors, and binary ones as Triton's clients send.

One input `image`: UINT8 (H, W, 3) or (1, H, W, 3), or BYTES (1) with an encoded image file. One output `mask`: UINT8
(H, W) of class ids. Request parameters are those of /segment.
"""

import base64
import binascii
import json
import math
import re
import struct
import time
from typing import Any

import numpy as np
from fastapi import APIRouter, Request, Response
from pydantic import ValidationError

from actors.messages import Answer
from airmoe_ray import __version__
from airmoe_ray.config import ServeConfig
from airmoe_ray.data.base import UInt8Array
from airmoe_ray.inference import Prepared, mask_of
from api.body import limited
from api.deps import RequestId, ServiceDep, readiness
from api.errors import ApiError
from api.images import decode
from api.routes.segment import ERRORS, channel_facts
from api.schemas import Error, Parameters
from api.service import Service, logits_of

router = APIRouter(prefix="/v2", tags=["Open Inference Protocol"])
_HEADER_LENGTH = "Inference-Header-Content-Length"
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


@router.get("/health/live")
async def live() -> dict[str, bool]:
    """The process answers."""
    return {"live": True}


@router.get("/health/ready", responses={503: {"model": Error}})
@router.get("/models/airmoe/ready", responses={503: {"model": Error}})
async def ready(service: ServiceDep) -> Response:
    """A tiny image goes through."""
    return await readiness(service, '{"ready":true}')


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
        started = time.perf_counter()
        # JSON of megapixels takes seconds to read and to write: not on the event loop
        wish, binary = await service.on_thread(_split, body, request.headers.get(_HEADER_LENGTH))
        parameters = _parameters(wish)
        settings = service.settings(parameters)
        prepared = await service.on_thread(_decode, service, wish, binary)
        decode_ms = 1e3 * (time.perf_counter() - started)
        answer, _ = await service.run(
            prepared, settings, parameters.seed, started=started, decode_ms=decode_ms, ends_at=ends_at
        )
        return await service.on_thread(_reply, wish, prepared, answer, wish.get("id") or request_id)


def _split(body: bytes, header_length: str | None) -> tuple[dict[str, Any], bytes]:
    """The JSON part and the binary tail of a request."""
    if header_length is not None and (not re.fullmatch("[0-9]{1,12}", header_length) or int(header_length) > len(body)):
        raise ApiError(400, f"{_HEADER_LENGTH}: {header_length[:20]!r} is not a length within the body")
    cut = len(body) if header_length is None else int(header_length)
    try:
        wish = json.loads(body[:cut])
    except (ValueError, RecursionError):
        raise ApiError(400, "the body is not JSON") from None
    if not isinstance(wish, dict):
        raise ApiError(400, "the body is not a JSON object")
    if not isinstance(wish.get("id", ""), str):
        raise ApiError(400, "id: expected a string")
    return wish, body[cut:]


def _parameters(wish: dict[str, Any]) -> Parameters:
    given = wish.get("parameters")
    if given is None:
        given = {}
    if not isinstance(given, dict):
        raise ApiError(422, "parameters: expected an object")
    # others are the protocol's own
    ours = {name: value for name, value in given.items() if name in Parameters.model_fields}
    try:
        return Parameters.model_validate(ours)
    except ValidationError as error:
        first = error.errors()[0]
        raise ApiError(422, f"parameters.{'.'.join(map(str, first['loc']))}: {first['msg']}") from None


def _decode(service: Service, wish: dict[str, Any], binary: bytes) -> Prepared:
    return service.prepare(_image(wish, binary, service.config.serve))


def _image(wish: dict[str, Any], binary: bytes, limits: ServeConfig) -> UInt8Array:
    inputs = wish.get("inputs")
    if not isinstance(inputs, list) or len(inputs) != 1 or not isinstance(inputs[0], dict):
        raise ApiError(400, "inputs: expected a list with the one input `image`")
    tensor = inputs[0]
    if tensor.get("name") != "image":
        raise ApiError(400, f"inputs: {str(tensor.get('name'))[:20]!r} is not known; the one input is `image`")
    shape, datatype = tensor.get("shape"), tensor.get("datatype")
    if not isinstance(shape, list) or not all(type(n) is int and n >= 0 for n in shape):
        raise ApiError(400, "inputs.image.shape: expected a list of sizes")
    own = (
        (tensor.get("parameters") or {}).get("binary_data_size") if isinstance(tensor.get("parameters"), dict) else None
    )
    raw = binary[:own] if type(own) is int else None
    if datatype == "BYTES":
        if math.prod(shape) != 1:
            raise ApiError(400, f"inputs.image.shape: {shape[:8]}; expected [1], one image file")
        file = _file(raw, tensor)
        if len(file) > limits.max_bytes:
            raise ApiError(413, f"the image has {len(file)} bytes, the limit is {limits.max_bytes}")
        return decode(file, max_pixels=limits.max_pixels).rgb
    if datatype != "UINT8":
        raise ApiError(400, f"inputs.image.datatype: {str(datatype)[:20]!r}; expected UINT8 or BYTES")
    shape = shape[1:] if len(shape) == 4 and shape[0] == 1 else shape
    if len(shape) != 3 or shape[2] != 3 or 0 in shape:
        raise ApiError(400, f"inputs.image.shape: {shape}; expected [height, width, 3]")
    if shape[0] * shape[1] > limits.max_pixels:
        raise ApiError(413, f"the image has {shape[0] * shape[1]} pixels, the limit is {limits.max_pixels}")
    values = np.frombuffer(raw, dtype=np.uint8) if raw is not None else _numbers(tensor.get("data"))
    if values.size != shape[0] * shape[1] * 3:
        raise ApiError(400, f"inputs.image: {values.size} values, the shape says {shape[0] * shape[1] * 3}")
    return values.reshape(shape)


def _file(raw: bytes | None, tensor: dict[str, Any]) -> bytes:
    """An encoded image: length-prefixed in binary, base64 in JSON."""
    if raw is not None:
        if len(raw) < 4 or struct.unpack_from("<I", raw)[0] != len(raw) - 4:
            raise ApiError(400, "inputs.image: expected one element with its length in front")
        return raw[4:]
    data = tensor.get("data")
    try:
        return base64.b64decode(data[0], validate=True)  # type: ignore[index]
    except (TypeError, IndexError, KeyError, binascii.Error, ValueError):
        raise ApiError(400, "inputs.image.data: expected one base64 string") from None


def _numbers(data: Any) -> UInt8Array:
    try:
        values = np.asarray(data)
        if values.dtype.kind not in "iu" or values.min(initial=0) < 0 or values.max(initial=0) > 255:
            raise ValueError
    except (ValueError, TypeError, OverflowError):
        raise ApiError(400, "inputs.image.data: expected numbers from 0 to 255") from None
    return values.astype(np.uint8).ravel()


def _reply(wish: dict[str, Any], prepared: Prepared, answer: Answer, request_id: str) -> Response:
    """As JSON, or with the mask as bytes behind it where the client asks for that."""
    mask = mask_of(logits_of(answer), prepared)
    routed = [client.id for client in answer.clients if client.weight > 0]
    facts = {**channel_facts(answer), "experts": json.dumps(routed), "degraded": answer.degraded}
    facts["truncated"] = json.dumps(facts["truncated"])  # the protocol's parameters are scalars
    given = wish.get("outputs")
    asked = given[0] if isinstance(given, list) and given and isinstance(given[0], dict) else {}
    own, common = asked.get("parameters"), wish.get("parameters")
    binary = bool((own if isinstance(own, dict) else {}).get("binary_data"))
    binary = binary or bool((common if isinstance(common, dict) else {}).get("binary_data_output"))
    output: dict[str, Any] = {"name": "mask", "datatype": "UINT8", "shape": list(mask.shape)}
    body = {"model_name": "airmoe", "model_version": "1", "id": request_id, "parameters": facts, "outputs": [output]}
    if not binary:
        output["data"] = mask.ravel().tolist()
        return Response(json.dumps(body), media_type="application/json")
    output["parameters"] = {"binary_data_size": mask.nbytes}
    head = json.dumps(body).encode()
    return Response(
        head + mask.tobytes(), headers={_HEADER_LENGTH: str(len(head))}, media_type="application/octet-stream"
    )
