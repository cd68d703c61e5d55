"""Routes of the page, the API documentation and sample scenes; all files are our own."""

import io
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Response
from fastapi.responses import FileResponse
from PIL import Image

from airmoe_ray.data.scenes import DOMAINS, render_scene
from api.http.errors import ApiError

STATIC = Path(str(resources.files("api.http"))) / "static"
_FIRST_SAMPLE = 990_000  # far from any training, validation or test scene

router = APIRouter(include_in_schema=False)


@router.get("/")
async def page() -> FileResponse:
    """The page."""
    return FileResponse(STATIC / "index.html")


@router.get("/docs")
async def docs() -> FileResponse:
    """Swagger UI from our own files."""
    return FileResponse(STATIC / "docs.html")


@router.get("/favicon.ico")
async def favicon() -> FileResponse:
    """The icon, for browsers that ask for it at the root."""
    return FileResponse(STATIC / "favicon.svg", media_type="image/svg+xml")


@router.get("/samples")
async def samples() -> dict[str, Any]:
    """Names and addresses of the sample scenes."""
    return {"samples": [{"name": name, "url": f"/samples/{name}.png"} for name in DOMAINS]}


@router.get("/samples/{name}.png")
def sample(name: str) -> Response:
    """One scene, drawn on demand."""
    if name not in DOMAINS:
        raise ApiError(404, "no such sample", list(DOMAINS))
    return Response(_draw(name), media_type="image/png", headers={"Cache-Control": "max-age=3600"})


@lru_cache(maxsize=len(DOMAINS))
def _draw(name: str) -> bytes:
    buffer = io.BytesIO()
    scene = render_scene(_FIRST_SAMPLE + DOMAINS.index(name), height=384, width=512)
    Image.fromarray(scene.image).save(buffer, format="PNG")
    return buffer.getvalue()
