"""POST /segment: an image in, its mask and the account of how it came about out."""

import json
import re
import time
from dataclasses import asdict
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response

from actors.messages import Answer
from airmoe_ray.inference import mask_and_scores, mask_of
from api import encode
from api.body import read_image
from api.deps import RequestId, ServiceDep
from api.schemas import Error, JsonRequest, Parameters, SegmentResponse
from api.service import Segmented, Service, logits_of

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
    async with service.admitted() as ends_at:
        data, parameters = await read_image(request, parameters, max_bytes=service.config.serve.max_bytes)
        result = await service.segment(data, parameters, ends_at=ends_at)
        return await _response(request, service, result, parameters.view, request_id)


async def _response(request: Request, service: Service, result: Segmented, view: str, request_id: str) -> Response:
    """In the form that the request likes best."""
    wanted = _wanted(request.headers.get("accept", ""))
    started = time.perf_counter()
    if wanted == "image/png":
        response = await service.on_thread(_png, service, result, view)
    elif wanted == "application/x-npy":
        mask = await service.on_thread(mask_of, logits_of(result.answer), result.prepared)
        response = Response(encode.npy(mask), media_type="application/x-npy")
    else:
        return await service.on_thread(_json, service, result, request_id)
    encode_s = time.perf_counter() - started
    service.metrics.observe_stage("encode", seconds=encode_s)
    response.headers.update(_headers(result.answer))
    stages = {"decode": result.decode_ms, **result.answer.timings_ms, "encode": 1e3 * encode_s}
    response.headers["Server-Timing"] = ", ".join(f"{name};dur={ms:.2f}" for name, ms in stages.items())
    return response


def _wanted(accept: str) -> str:
    """The type an `Accept` header likes best among ours; the first of equals, JSON where it names none of them."""
    best, liking = _TYPES[0], 0.0
    for entry in accept.split(","):
        kind, *options = (part.strip().lower() for part in entry.split(";"))
        quality = next((option[2:] for option in options if option.startswith("q=")), "1")
        value = float(quality) if re.fullmatch(r"[01](\.\d{0,3})?", quality) else 0.0
        ours = next((one for one in _TYPES if kind in (one, f"{one.partition('/')[0]}/*", "*/*")), None)
        if ours and value > liking:
            best, liking = ours, value
    return best


def _png(service: Service, result: Segmented, view: str) -> Response:
    mask = mask_of(logits_of(result.answer), result.prepared)
    if view == "overlay" and result.rgb is not None:
        content = encode.overlay_png(result.rgb, mask, service.classes)
    else:
        content = (encode.colour_png if view == "color" else encode.index_png)(mask, service.classes)
    return Response(content, media_type="image/png")


def _json(service: Service, result: Segmented, request_id: str) -> Response:
    started = time.perf_counter()
    answer, classes = result.answer, service.classes
    mask, score_C, area_C = mask_and_scores(logits_of(result.answer), result.prepared)
    body = {
        "id": request_id,
        "model": "airmoe",
        "width": mask.shape[1],
        "height": mask.shape[0],
        "segments": encode.segments(mask, score_C, area_C, classes),
        "mask": encode.base64_text(encode.index_png(mask, classes)),
        "routing": {
            "experts": [_expert(client) for client in answer.clients],
            "degraded": answer.degraded,
            "reason": answer.reason,
        },
        "channel": channel_facts(answer),
        "communication": asdict(answer.ledger),
    }
    encode_s = time.perf_counter() - started
    service.metrics.observe_stage("encode", seconds=encode_s)
    timings = {"decode": result.decode_ms, **answer.timings_ms, "encode": 1e3 * encode_s}
    total = 1e3 * (result.seconds + encode_s)
    body["timings_ms"] = {name: round(ms, 3) for name, ms in {**timings, "total": total}.items()}
    return Response(json.dumps(body, separators=(",", ":")), media_type="application/json")


def channel_facts(answer: Answer) -> dict[str, Any]:
    """What the air did, for JSON."""
    return {
        "kind": answer.channel.kind,
        "snr_db": answer.channel.snr_db,
        "rho": answer.rho,
        "truncated": list(answer.truncated),
        "noise_power": answer.noise_power,
        "nmse": answer.nmse,
        "channel_uses": answer.ledger.air_channel_uses,
        "seed": answer.seed,
    }


def _expert(client: Any) -> dict[str, Any]:
    gamma = None if client.gamma is None else [client.gamma.real, client.gamma.imag]
    return {**vars(client), "gamma": gamma}


def _headers(answer: Answer) -> dict[str, str]:
    """The facts of an answer that is no JSON."""
    chosen = [client for client in answer.clients if client.weight > 0]
    return {
        "X-AirMoE-Seed": str(answer.seed),
        "X-AirMoE-Experts": ",".join(str(client.id) for client in chosen),
        "X-AirMoE-Weights": ",".join(f"{client.weight:.4f}" for client in chosen),
        "X-AirMoE-Channel": answer.channel.kind,
        "X-AirMoE-SNR-dB": f"{answer.channel.snr_db:g}",
        "X-AirMoE-NMSE": f"{answer.nmse:.6g}",
        "X-AirMoE-Degraded": "true" if answer.degraded else "false",
    }
