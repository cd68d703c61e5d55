"""Reads request bodies: a form, a raw image or JSON, up to a limit, in memory."""

import base64
import binascii
from collections.abc import AsyncGenerator

from fastapi import Request
from pydantic import ValidationError
from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser

from airmoe_ray.inference.decode import MEDIA_TYPES
from api.http.errors import ApiError
from api.http.schemas import JsonRequest, Parameters

MAX_FILES = 16  # of one form
_ENVELOPE = 64 * 1024  # what a form or JSON may add to the image itself


class _MemoryParser(MultiPartParser):
    """Starlette's parser of forms, which keeps uploads in memory instead of files."""

    spool_max_size = 1 << 40


async def read_images(request: Request, parameters: Parameters, *, max_bytes: int) -> tuple[list[bytes], Parameters]:
    """Read the image files and the parameters of a request, in whichever form they were sent.

    Only a form can have several files; `max_bytes` is for all of them together.
    """
    kind = request.headers.get("content-type", "application/octet-stream").partition(";")[0].strip().lower()
    if kind == "multipart/form-data":
        return await _from_form(request, max_bytes), parameters
    if kind == "application/json":
        data, parameters = await _from_json(request, parameters, max_bytes)
        return [data], parameters
    if kind in MEDIA_TYPES:
        return [b"".join([chunk async for chunk in limited(request, max_bytes, max_bytes)])], parameters
    raise ApiError(
        415,
        f"content type {kind[:80]!r} is not taken",
        "send multipart/form-data with a field `file`, application/json, or image/png, jpeg, webp, bmp or tiff",
    )


async def limited(request: Request, limit: int, stated_limit: int) -> AsyncGenerator[bytes, None]:
    """Read a body in chunks; raises 413 by its Content-Length, or while reading where that is missing or wrong."""
    stated = request.headers.get("content-length", "")
    size = int(stated) if stated.isdigit() else 0
    if size <= limit:
        size = 0
        async for chunk in request.stream():
            size += len(chunk)
            if size > limit:
                break
            yield chunk
        else:
            return
    raise ApiError(
        413, f"the body is larger than {stated_limit} bytes; send a smaller image", {"max_bytes": stated_limit}
    )


async def _from_form(request: Request, max_bytes: int) -> list[bytes]:
    chunks = limited(request, max_bytes + _ENVELOPE, max_bytes)
    try:
        form = await _MemoryParser(request.headers, chunks, max_files=MAX_FILES, max_fields=8).parse()
    except (MultiPartException, KeyError, ValueError, AssertionError) as error:
        reason = error.message if isinstance(error, MultiPartException) else "no valid boundary"
        if reason.startswith("Too many files"):
            raise ApiError(
                422, f"the form has more than {MAX_FILES} files; send several requests", {"max_files": MAX_FILES}
            ) from None
        raise ApiError(400, f"the form cannot be read: {reason}") from None
    fields = form.getlist("file")
    uploads = [field for field in fields if isinstance(field, UploadFile)]
    if not fields or len(uploads) < len(fields):
        raise ApiError(400, "the form has no file in the field `file`", {"fields": sorted(form.keys())[:8]})
    files = [await upload.read() for upload in uploads]
    if sum(map(len, files)) > max_bytes:
        what, less = ("image is", "a smaller one") if len(files) == 1 else ("images together are", "fewer at once")
        raise ApiError(413, f"the {what} larger than {max_bytes} bytes; send {less}", {"max_bytes": max_bytes})
    return files


async def _from_json(request: Request, parameters: Parameters, max_bytes: int) -> tuple[bytes, Parameters]:
    limit = max_bytes * 4 // 3 + _ENVELOPE  # base64 makes four bytes of three
    body = b"".join([chunk async for chunk in limited(request, limit, max_bytes)])
    try:
        content = JsonRequest.model_validate_json(body)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        status = 400 if first["type"] == "json_invalid" else 422
        raise ApiError(status, f"{where or 'body'}: {first['msg']}") from None
    try:
        data = base64.b64decode(content.inputs, validate=True)
    except (binascii.Error, ValueError):
        raise ApiError(400, "inputs: not base64") from None
    if len(data) > max_bytes:
        raise ApiError(413, f"the image is larger than {max_bytes} bytes; send a smaller one", {"max_bytes": max_bytes})
    given = parameters.model_dump(exclude_unset=True) | content.parameters.model_dump(exclude_unset=True)
    return data, Parameters.model_validate(given)
