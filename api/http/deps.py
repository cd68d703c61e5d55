"""Dependencies that routes name in their signatures, and the response of readiness checks."""

from typing import Annotated

from fastapi import Depends, Request, Response

from api.http.errors import ApiError, error_response
from api.http.service import Service


def _service(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


def _request_id(request: Request) -> str:
    return str(request.state.request_id)


def check_alive(service: Service) -> None:
    """Refuse where a loop of the server has died: only a new process helps."""
    if (loop := service.orchestrator.dead_loop) is not None:
        raise ApiError(503, f"the {loop} has died; start the server again")


async def readiness_response(service: Service, body: str) -> Response:
    """`body` if an image went through cloud, experts and channel within the last seconds, else 503."""
    reason = await service.readiness.why_not()
    if reason is not None:
        return error_response(503, "not ready", reason, retry_after=2)
    return Response(body, media_type="application/json")


ServiceDep = Annotated[Service, Depends(_service)]
RequestId = Annotated[str, Depends(_request_id)]
