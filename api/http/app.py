"""The FastAPI application: its routes, error handlers and middleware around one `Service`."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from fastapi.staticfiles import StaticFiles

from airmoe_ray import __version__
from api.http import errors
from api.http.middleware.front_door import FrontDoor
from api.http.middleware.request_metrics import MetricsMiddleware
from api.http.middleware.security import SecurityMiddleware
from api.http.routes import inference_v2, page, segment, system
from api.http.schemas import Error
from api.http.service import Service


def create_app(service: Service, *, admin_token: str, host: str = "127.0.0.1") -> FastAPI:
    """Make the application of a server that listens on `host`; the orchestrator runs as long as it does."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with service.orchestrator:
            yield
        service.close()

    app = FastAPI(
        title="AirMoE on Ray",
        version=__version__,
        summary="Segmentation by a mixture of experts whose answers add up in the air",
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        responses={
            401: {"model": Error, "description": "A key is needed"},
            403: {"model": Error, "description": "Asked by a web page of another site"},
            421: {"model": Error, "description": "The Host is not a name of this server"},
        },
    )
    app.state.service = service
    errors.install(app)
    for part in (segment, system, inference_v2, page):
        app.include_router(part.router)
    app.mount("/static", StaticFiles(directory=page.STATIC), name="static")
    serve = service.config.serve
    door = FrontDoor(host, serve.hosts)
    app.add_middleware(SecurityMiddleware, door=door, api_keys=serve.api_keys, admin_token=admin_token)
    app.add_middleware(MetricsMiddleware, metrics=service.metrics)  # outermost: it counts refusals and defects too
    return app
