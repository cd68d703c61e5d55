"""Bodies of the Open Inference Protocol: tensors in JSON, or in bytes behind it as Triton's clients send them."""

import base64
import binascii
import json
import math
import re
import struct
from dataclasses import dataclass
from typing import Any

import numpy as np
from pydantic import ValidationError

from airmoe_ray.config import ServeConfig
from airmoe_ray.data.base import UInt8Array
from airmoe_ray.inference.decode import Picture, decode
from api.http.errors import ApiError
from api.http.schemas import Parameters

HEADER_LENGTH = "Inference-Header-Content-Length"  # of the JSON, where bytes follow it


@dataclass(frozen=True)
class TensorRequest:
    """One request: its JSON object, and the bytes behind it."""

    content: dict[str, Any]
    binary: bytes

    @classmethod
    def read(cls, body: bytes, header_length: str | None) -> "TensorRequest":
        """Split a body at the length that its header states."""
        if header_length is not None and (
            not re.fullmatch("[0-9]{1,12}", header_length) or int(header_length) > len(body)
        ):
            raise ApiError(400, f"{HEADER_LENGTH}: {header_length[:20]!r} is not a length within the body")
        cut = len(body) if header_length is None else int(header_length)
        try:
            content = json.loads(body[:cut])
        except (ValueError, RecursionError):
            raise ApiError(400, "the body is not JSON") from None
        if not isinstance(content, dict):
            raise ApiError(400, "the body is not a JSON object")
        if not isinstance(content.get("id", ""), str):
            raise ApiError(400, "id: expected a string")
        return cls(content, body[cut:])

    def parameters(self) -> Parameters:
        """Our own parameters; others are the protocol's."""
        given = self.content.get("parameters")
        if given is None:
            given = {}
        if not isinstance(given, dict):
            raise ApiError(422, "parameters: expected an object")
        try:
            return Parameters.model_validate({k: v for k, v in given.items() if k in Parameters.model_fields})
        except ValidationError as error:
            first = error.errors()[0]
            raise ApiError(422, f"parameters.{'.'.join(map(str, first['loc']))}: {first['msg']}") from None

    def picture(self, limits: ServeConfig, long_side: int | None) -> Picture:
        """The one input, to be scaled down to `long_side`, as `decode` gives it."""
        tensor = self._image()
        shape, datatype = tensor.get("shape"), tensor.get("datatype")
        if not isinstance(shape, list) or not all(type(n) is int and n >= 0 for n in shape):
            raise ApiError(400, "inputs.image.shape: expected a list of sizes")
        size = _object(tensor.get("parameters")).get("binary_data_size")
        raw = self.binary[:size] if type(size) is int else None
        if datatype == "BYTES":
            file = _file(raw, tensor.get("data"), shape, limits)
            return decode(file, max_pixels=limits.max_pixels, long_side=long_side)
        if datatype != "UINT8":
            raise ApiError(400, f"inputs.image.datatype: {str(datatype)[:20]!r}; expected UINT8 or BYTES")
        rgb = _array(raw, tensor.get("data"), shape, limits)
        return Picture(rgb, "UINT8", (rgb.shape[0], rgb.shape[1]))

    def _image(self) -> dict[str, Any]:
        inputs = self.content.get("inputs")
        if not isinstance(inputs, list) or len(inputs) != 1 or not isinstance(inputs[0], dict):
            raise ApiError(400, "inputs: expected a list with the one input `image`")
        if inputs[0].get("name") != "image":
            raise ApiError(400, f"inputs: {str(inputs[0].get('name'))[:20]!r} is not known; the one input is `image`")
        return inputs[0]

    def reply(self, mask: UInt8Array, parameters: dict[str, Any], *, request_id: str) -> tuple[bytes, bytes]:
        """JSON with the mask in it; or JSON, and the mask as the bytes behind it."""
        output: dict[str, Any] = {"name": "mask", "datatype": "UINT8", "shape": list(mask.shape)}
        body = {
            "model_name": "airmoe",
            "model_version": "1",
            "id": self.content.get("id") or request_id,
            "parameters": parameters,
            "outputs": [output],
        }
        if self._wants_bytes():
            output["parameters"] = {"binary_data_size": mask.nbytes}
            return json.dumps(body).encode(), mask.tobytes()
        output["data"] = mask.ravel().tolist()
        return json.dumps(body).encode(), b""

    def _wants_bytes(self) -> bool:
        outputs = self.content.get("outputs")
        asked = _object(outputs[0]) if isinstance(outputs, list) and outputs else {}
        own, common = _object(asked.get("parameters")), _object(self.content.get("parameters"))
        return bool(own.get("binary_data")) or bool(common.get("binary_data_output"))


def _object(value: Any) -> dict[str, Any]:
    """A JSON object; an empty one where something else is given."""
    return value if isinstance(value, dict) else {}


def _file(raw: bytes | None, data: Any, shape: list[int], limits: ServeConfig) -> bytes:
    """An image file: length-prefixed in bytes, base64 in JSON."""
    if math.prod(shape) != 1:
        raise ApiError(400, f"inputs.image.shape: {shape[:8]}; expected [1], one image file")
    if raw is None:
        try:
            file = base64.b64decode(data[0], validate=True)
        except (TypeError, IndexError, KeyError, binascii.Error, ValueError):
            raise ApiError(400, "inputs.image.data: expected one base64 string") from None
    elif len(raw) < 4 or struct.unpack_from("<I", raw)[0] != len(raw) - 4:
        raise ApiError(400, "inputs.image: expected one element with its length in front")
    else:
        file = raw[4:]
    if len(file) > limits.max_bytes:
        raise ApiError(413, f"the image has {len(file)} bytes, the limit is {limits.max_bytes}")
    return file


def _array(raw: bytes | None, data: Any, shape: list[int], limits: ServeConfig) -> UInt8Array:
    """Pixels as they are: one byte per value, or numbers in JSON."""
    shape = shape[1:] if len(shape) == 4 and shape[0] == 1 else shape
    if len(shape) != 3 or shape[2] != 3 or 0 in shape:
        raise ApiError(400, f"inputs.image.shape: {shape}; expected [height, width, 3]")
    if shape[0] * shape[1] > limits.max_pixels:
        raise ApiError(413, f"the image has {shape[0] * shape[1]} pixels, the limit is {limits.max_pixels}")
    values = np.frombuffer(raw, dtype=np.uint8) if raw is not None else _numbers(data)
    if values.size != shape[0] * shape[1] * 3:
        raise ApiError(400, f"inputs.image: {values.size} values, the shape says {shape[0] * shape[1] * 3}")
    return values.reshape(shape)


def _numbers(data: Any) -> UInt8Array:
    try:
        values = np.asarray(data)
        if values.dtype.kind not in "iu" or values.min(initial=0) < 0 or values.max(initial=0) > 255:
            raise ValueError
    except (ValueError, TypeError, OverflowError):
        raise ApiError(400, "inputs.image.data: expected numbers from 0 to 255") from None
    return values.astype(np.uint8).ravel()
