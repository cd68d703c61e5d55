"""The HTTP front end: a table of contents of routes around one `Service`."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from fastapi.staticfiles import StaticFiles

from airmoe_ray import __version__
from api import errors
from api.metrics import MetricsMiddleware
from api.routes import inference_v2, page, segment, system
from api.schemas import Error
from api.security import SecurityMiddleware
from api.service import Service


def create_app(service: Service, *, admin_token: str) -> FastAPI:
    """The application; the system's loops run as long as it does."""

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
        responses={401: {"model": Error, "description": "A key is needed"}},
    )
    app.state.service = service
    errors.install(app)
    for part in (segment, system, inference_v2, page):
        app.include_router(part.router)
    app.mount("/static", StaticFiles(directory=page.STATIC), name="static")
    app.add_middleware(SecurityMiddleware, api_keys=service.config.serve.api_keys, admin_token=admin_token)
    app.add_middleware(MetricsMiddleware, metrics=service.metrics)  # outermost: it counts refusals and defects too
    return app
