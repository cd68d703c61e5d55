"""How verbs reach a running server: the options that name it, and requests whose errors are one line."""

from typing import Annotated, Any

import typer

from airmoe_ray.client import check, one_line, read_object
from api.cli.common import DEFAULT_PORT

UrlOption = Annotated[str, typer.Option(help="Address of the server.")]
KeyOption = Annotated[str | None, typer.Option(envvar="AIRMOE_API_KEY", help="API key, if the server asks for one.")]
HERE = f"http://127.0.0.1:{DEFAULT_PORT}"


def call(method: str, url: str, key: str | None = None, **options: Any) -> Any:
    """Send one request; what goes wrong is raised as one line."""
    import httpx

    headers = {**options.pop("headers", {}), **({"X-API-Key": key} if key else {})}
    with one_line(url):
        response = httpx.request(method, url, headers=headers, timeout=120, **options)
    check(response, url)
    return response


def call_json(method: str, url: str, key: str | None = None, *, has: str, **options: Any) -> dict[str, Any]:
    """Send one request whose response must be a JSON object with the field `has`: other servers answer otherwise."""
    return read_object(call(method, url, key, **options), url, has=has)
