"""Makes responses of one image's result: the JSON model, the mask as a picture or array, and the headers.

Suffixes: C classes.
"""

import time
from typing import cast

import numpy as np
import torch
from pydantic import TypeAdapter

from actors.errors import Fault
from actors.serving.results import ClientAccount, ImageResult
from airmoe_ray.data.base import ClassTable, UInt8Array
from airmoe_ray.inference.masks import Prepared, mask_and_scores, mask_of
from api.http.codec import encode
from api.http.schemas import ChannelFacts, Expert, FaultName, Format, LabelledMask, RoutingFacts, SegmentResponse

# bytes at once: `model_dump_json` makes text, which would have to be encoded again, megabytes of it
to_json = TypeAdapter(SegmentResponse).dump_json
labelled_to_json = TypeAdapter(list[LabelledMask]).dump_json


def segment_response(
    result: ImageResult,
    image: Prepared,
    classes: ClassTable,
    *,
    request_id: str,
    arrived: float,
    form: Format = "png",
    threshold: float | None = None,
) -> SegmentResponse:
    """Make the JSON response; `arrived`, on `time.perf_counter`, is when work on the request began."""
    started = time.perf_counter()
    mask, score_C, area_C = mask_and_scores(_logits(result), image)
    segments = encode.segments(mask, score_C, area_C, classes, form=form, threshold=threshold)
    index = encode.base64_text(encode.index_png(mask, classes))
    ended = time.perf_counter()
    timings_ms = {**result.timings_ms, "encode": 1e3 * (ended - started), "total": 1e3 * (ended - arrived)}
    return SegmentResponse(
        id=request_id,
        model="airmoe",
        width=mask.shape[1],
        height=mask.shape[0],
        segments=segments,
        mask=index,
        routing=_routing_facts(result),
        channel=channel_facts(result),
        communication=result.ledger,
        timings_ms={stage: round(ms, 3) for stage, ms in timings_ms.items()},
    )


def labelled_masks(
    result: ImageResult, image: Prepared, classes: ClassTable, *, threshold: float | None = None
) -> list[LabelledMask]:
    """Make the JSON response in Hugging Face's form, which has segments and nothing else."""
    mask, score_C, area_C = mask_and_scores(_logits(result), image)
    found = encode.segments(mask, score_C, area_C, classes, threshold=threshold)
    return [LabelledMask(label=segment.label, score=segment.score, mask=str(segment.mask)) for segment in found]


def png(
    result: ImageResult, image: Prepared, classes: ClassTable, *, view: str, rgb: UInt8Array | None = None
) -> bytes:
    """The mask as a picture: its colours over `rgb` where that is given, else by `view` colours or class ids."""
    mask = class_mask(result, image)
    if rgb is not None:
        return encode.overlay_png(rgb, mask, classes)
    return (encode.colour_png if view == "color" else encode.index_png)(mask, classes)


def npy(result: ImageResult, image: Prepared) -> bytes:
    """The mask as a NumPy file."""
    return encode.npy(class_mask(result, image))


def class_mask(result: ImageResult, image: Prepared) -> UInt8Array:
    """Class ids (H, W) at the image's own size."""
    return mask_of(_logits(result), image)


def channel_facts(result: ImageResult) -> ChannelFacts:
    """What the air did to the image."""
    return ChannelFacts(
        kind=result.channel.kind,
        snr_db=result.channel.snr_db,
        rho=result.rho,
        truncated=list(result.truncated),
        noise_power=result.noise_power,
        nmse=result.nmse,
        channel_uses=result.ledger.air_channel_uses,
        seed=result.seed,
    )


def headers(result: ImageResult) -> dict[str, str]:
    """The facts of a response that is not JSON."""
    heard = [client for client in result.clients if client.weight > 0]
    return {
        "X-AirMoE-Seed": str(result.seed),
        "X-AirMoE-Experts": ",".join(str(client.id) for client in heard),
        "X-AirMoE-Weights": ",".join(f"{client.weight:.4f}" for client in heard),
        "X-AirMoE-Channel": result.channel.kind,
        "X-AirMoE-SNR-dB": f"{result.channel.snr_db:g}",
        "X-AirMoE-NMSE": f"{result.nmse:.6g}",
        "X-AirMoE-Degraded": "true" if result.degraded else "false",
    }


def _logits(result: ImageResult) -> torch.Tensor:
    return torch.from_numpy(np.array(result.logits_Chw))  # a copy: what comes from the object store is read-only


def _routing_facts(result: ImageResult) -> RoutingFacts:
    return RoutingFacts(
        experts=[_expert(client) for client in result.clients],
        degraded=result.degraded,
        reason=result.reason,
        faults={client: fault_name(result.skipped[client]) for client in sorted(result.skipped)},
        all_faded=result.all_faded,
    )


def fault_name(fault: Fault) -> FaultName:
    """A fault as programs read it."""
    return cast("FaultName", fault.name.lower())


def _expert(client: ClientAccount) -> Expert:
    return Expert(
        id=client.id,
        js=client.js,
        score=client.score,
        probability=client.probability,
        selected=client.selected,
        weight=client.weight,
        gamma=None if client.gamma is None else [client.gamma.real, client.gamma.imag],
        version=client.version,
    )
