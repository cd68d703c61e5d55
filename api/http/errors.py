"""Turns every error into `{"error": "...", "detail": ...}`, never with a traceback, a path or a version."""

import math
from typing import Any, NamedTuple

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from actors.errors import DeadlineError, NoExpertsError, OverloadedError, ServiceError, StoppedError
from airmoe_ray.errors import UserError
from airmoe_ray.inference.decode import ImageError

_STATUS: dict[type[ServiceError], tuple[int, int | None]] = {  # code, seconds after which to try again
    NoExpertsError: (503, 2),
    StoppedError: (503, 5),
    DeadlineError: (504, None),
}


class ApiError(Exception):
    """A request that is refused, with the status and the words of the response."""

    def __init__(self, status: int, error: str, detail: Any = None) -> None:
        super().__init__(error)
        self.status, self.error, self.detail = status, error, detail


class Refusal(NamedTuple):
    """What a response says about an error that is not a defect of ours."""

    status: int
    error: str
    detail: Any = None
    retry_after: int | None = None  # seconds


def refusal(error: Exception) -> Refusal | None:
    """Status and words for an error; None for a defect."""
    if isinstance(error, ApiError):
        return Refusal(error.status, error.error, error.detail)
    if isinstance(error, ImageError):
        return Refusal(error.status, str(error))
    if isinstance(error, OverloadedError):
        return Refusal(429, str(error), retry_after=math.ceil(error.again_s))
    if isinstance(error, ServiceError):
        status, retry_after = _STATUS.get(type(error), (500, None))
        return Refusal(status, str(error), retry_after=retry_after)
    return Refusal(422, str(error)) if isinstance(error, UserError) else None


def install(app: FastAPI) -> None:
    """Add the handlers to `app`; what none of them handles, `SecurityMiddleware` answers with 500."""

    async def refused(_: Request, error: Exception) -> JSONResponse:
        told = refusal(error)
        assert told is not None, "of a type below"
        return error_response(told.status, told.error, told.detail, retry_after=told.retry_after)

    for kind in (ApiError, ServiceError, UserError):  # an ImageError is a UserError
        app.add_exception_handler(kind, refused)

    @app.exception_handler(RequestValidationError)
    async def validation_error(_: Request, error: RequestValidationError) -> JSONResponse:
        found = [
            {"parameter": ".".join(map(str, e["loc"][1:] or e["loc"])), "problem": e["msg"]} for e in error.errors()
        ]
        first = found[0] if found else {"parameter": "", "problem": "invalid"}
        return error_response(422, f"{first['parameter']}: {first['problem']}", found)

    @app.exception_handler(ClientDisconnect)
    async def gone(_: Request, __: ClientDisconnect) -> JSONResponse:
        return error_response(499, "the client went away")  # for the metrics; nobody reads it

    @app.exception_handler(HTTPException)
    async def http_error(_: Request, error: HTTPException) -> JSONResponse:
        response = error_response(error.status_code, str(error.detail).lower())
        response.headers.update(error.headers or {})
        return response


def error_response(status: int, error: str, detail: Any = None, *, retry_after: int | None = None) -> JSONResponse:
    """Make the response of an error; every error of the service has this form."""
    headers = {} if retry_after is None else {"Retry-After": str(retry_after)}
    return JSONResponse({"error": error, "detail": detail}, status, headers)
