"""Dependencies that routes name in their signatures, and the response of readiness checks."""

from typing import Annotated

from fastapi import Depends, Request, Response

from api.http.errors import error_response
from api.http.service import Service


def _service(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


def _request_id(request: Request) -> str:
    return str(request.state.request_id)


async def readiness_response(service: Service, body: str) -> Response:
    """`body` if a tiny image went through cloud, experts and channel within the last seconds, else 503."""
    reason = await service.readiness.why_not()
    if reason is not None:
        return error_response(503, "not ready", reason, retry_after=2)
    return Response(body, media_type="application/json")


ServiceDep = Annotated[Service, Depends(_service)]
RequestId = Annotated[str, Depends(_request_id)]
