"""The real application over a system that is not there."""

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import httpx

from actors.errors import NoExpertsError
from actors.serving.load_window import LoadWindow
from airmoe_ray.config import Config
from airmoe_ray.errors import CheckpointError
from airmoe_ray.model.routing import Participants
from airmoe_ray.storage.checkpoint import ModelCard
from api.http.app import create_app
from api.http.service import Service
from tests.api.http.images import photo, saved

PHOTO = saved(photo())
PNG = {"Content-Type": "image/png"}
TOKEN = "the-admin-token"


class Experts:
    """A supervisor of experts that do not exist."""

    def __init__(self, *, up: bool = True) -> None:
        self.total, self.up, self.renewals_lost = 4, up, 0
        self.load = LoadWindow(4, 10)

    def status(self) -> list[Any]:
        return []

    def check_up(self, participants: Participants) -> None:
        if not self.up:
            raise NoExpertsError("no expert is up")

    async def watch(self, waiting: Callable[[], int]) -> None:
        """Nobody to watch."""

    def close(self) -> None:
        """Nobody to end."""

    async def scale(self, experts: int) -> None:
        if experts > 4:
            raise CheckpointError("/home/somebody/run/checkpoint/experts/expert_04.safetensors: missing")

    async def replicate(self, client: int, hosts: int) -> None:
        assert 0 <= client < 4


def make_service(*, up: bool = True, **serve: Any) -> Service:
    config = Config.model_validate({"experts": {"count": 4}, "routing": {"top_k": 2}, "serve": serve})
    card = ModelCard(
        classes=["road", "sky"],
        palette=[[128, 64, 128], [70, 130, 180]],
        feature_dim=6,
        dilations=[1, 2, 3],
        backbone_name="none",
        backbone_fingerprint="",
    )
    system = SimpleNamespace(config=config, card=card, pad_multiple=16, stop=lambda: None)
    return Service(system, Experts(up=up))


def ask(service: Service, method: str = "POST", path: str = "/segment", **options: Any) -> httpx.Response:
    return ask_often(service, 1, method, path, **options)[0]


def ask_often(
    service: Service, times: int, method: str = "POST", path: str = "/segment", **options: Any
) -> list[httpx.Response]:
    """Requests at the same time; nothing takes them off the queue."""
    if method == "POST" and path == "/segment":
        options = {"content": PHOTO, "headers": PNG} | options
    transport = httpx.ASGITransport(create_app(service, admin_token=TOKEN))

    async def run() -> list[httpx.Response]:
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            return await asyncio.gather(*(client.request(method, path, **options) for _ in range(times)))

    return asyncio.run(run())


def assert_is_an_error(response: httpx.Response, code: int) -> dict[str, Any]:
    """Our form, our headers, and nothing about the inside."""
    assert response.status_code == code, response.text
    body = response.json()
    assert body.keys() == {"error", "detail"}
    assert body["error"]
    assert not [
        leak for leak in ("Traceback", 'File "', ".py", "site-packages", "/home", "/tmp") if leak in response.text
    ]
    assert response.headers["x-request-id"]
    assert response.headers["x-content-type-options"] == "nosniff"
    assert "default-src 'self'" in response.headers["content-security-policy"]
    assert "server" not in response.headers
    return body
