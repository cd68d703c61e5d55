"""Routes about the system: health, metrics, experts, routing load, configuration, scaling."""

import asyncio
from typing import Any

from fastapi import APIRouter, Response

from airmoe_ray.config import SECRETS
from airmoe_ray.errors import CheckpointError
from api.http.deps import ServiceDep, check_alive, readiness_response
from api.http.errors import ApiError
from api.http.schemas import Error, ScaleRequest

router = APIRouter(tags=["system"])

_PRIVATE = SECRETS | {  # and paths of the machine
    "data": {"root", "cache_dir"},
    "backbone": {"weights"},
    "cluster": {"storage"},
}


@router.get("/livez", responses={503: {"model": Error}})
async def livez(service: ServiceDep) -> dict[str, str]:
    """The process answers, and none of its loops has died."""
    check_alive(service)
    return {"status": "alive"}


@router.get("/readyz", responses={503: {"model": Error}})
async def readyz(service: ServiceDep) -> Response:
    """A tiny image went through cloud, experts and channel within the last seconds."""
    return await readiness_response(service, '{"status":"ready"}')


@router.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
async def metrics(service: ServiceDep) -> Response:
    """Prometheus exposition."""
    body, content_type = await service.scrape()
    return Response(body, headers={"Content-Type": content_type})


@router.get("/experts")
async def experts(service: ServiceDep) -> dict[str, Any]:
    """Every expert with what it knows, its node, GPUs, state, version, load, restarts and replicas."""
    return {"experts": [status.as_dict() for status in service.supervisor.status()]}


@router.get("/routing/stats")
async def routing_stats(service: ServiceDep) -> dict[str, Any]:
    """Routing load over the window, and latency over the last requests."""
    return service.stats()


@router.get("/config")
async def config(service: ServiceDep) -> dict[str, Any]:
    """Name and terms of the model, classes, limits and settings of this server, without secrets and paths."""
    classes, serve, card = service.classes, service.config.serve, service.system.card
    return {
        "model": "airmoe",
        "name": card.name,
        "terms": card.terms,
        "classes": [
            {"id": number, "name": name, "color": list(color)}
            for number, (name, color) in enumerate(zip(classes.names, classes.palette, strict=True))
        ],
        "limits": {"max_bytes": serve.max_bytes, "max_pixels": serve.max_pixels},
        "settings": service.config.model_dump(mode="json", exclude=_PRIVATE),
    }


@router.post(
    "/experts/scale",
    responses={
        400: {"model": Error, "description": "Not text"},
        409: {"model": Error, "description": "The checkpoint holds fewer experts"},
        422: {"model": Error, "description": "Not JSON, or a number out of range"},
    },
)
async def scale(request: ScaleRequest, service: ServiceDep) -> dict[str, Any]:
    """Change N, or the number of hosts of some experts; needs the admin token. Drains before it removes."""
    if request.experts is None and not request.replicas:
        raise ApiError(422, "give experts or replicas", {"experts": 8, "replicas": {"3": 2}})
    total = service.supervisor.total if request.experts is None else request.experts
    if unknown := [client for client in request.replicas if not 0 <= client < total]:
        raise ApiError(422, f"replicas: there are experts 0 to {total - 1}", {"unknown": unknown[:8]})
    if request.experts is not None:
        try:
            await service.supervisor.scale(request.experts)
        except CheckpointError:  # its message names a path
            raise ApiError(
                409, f"experts: the served checkpoint does not hold {request.experts}; serve one that does"
            ) from None
    await asyncio.gather(*(service.supervisor.replicate(client, n) for client, n in request.replicas.items()))
    return {"experts": [status.as_dict() for status in service.supervisor.status()]}
