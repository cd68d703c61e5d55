"""How verbs reach a running server: the options that name it, and requests whose errors are one line."""

import time
from typing import Annotated, Any

import typer

from airmoe_ray.errors import UserError
from api.cli.common import DEFAULT_PORT

UrlOption = Annotated[str, typer.Option(help="Address of the server.")]
KeyOption = Annotated[str | None, typer.Option(envvar="AIRMOE_API_KEY", help="API key, if the server asks for one.")]
HERE = f"http://127.0.0.1:{DEFAULT_PORT}"

_TRIES = 10  # of a request while the server is busy


class RefusedError(UserError):
    """The server answered with an error; a busy one says after how many seconds to try again."""

    def __init__(self, message: str, retry_after_s: float | None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


def call(method: str, url: str, key: str | None = None, **options: Any) -> Any:
    """Send one request; what goes wrong is raised as one line."""
    import httpx

    headers = {**options.pop("headers", {}), **({"X-API-Key": key} if key else {})}
    try:
        response = httpx.request(method, url, headers=headers, timeout=120, **options)
    except (httpx.TransportError, httpx.InvalidURL) as error:
        raise UserError(f"{url}: no server answers ({error}); start one with `airmoe serve`, or give --url") from None
    if response.is_success:
        return response
    try:
        body = response.json()
        message = f"{body['error']}" + (f" ({body['detail']})" if body.get("detail") else "")
    except (ValueError, KeyError, TypeError):
        message = response.reason_phrase
    wait = response.headers.get("retry-after", "")
    raise RefusedError(f"{url}: {response.status_code}, {message}", float(wait) if wait.isdigit() else None)


def call_json(method: str, url: str, key: str | None = None, *, has: str, **options: Any) -> dict[str, Any]:
    """Send one request whose response must be a JSON object with the field `has`: other servers answer otherwise."""
    response = call(method, url, key, **options)
    try:
        body = response.json()
    except ValueError:
        body = None
    if not isinstance(body, dict) or has not in body:
        raise UserError(f"{url}: what answers there is not an AirMoE server; give its address with --url")
    return body


def call_patiently(method: str, url: str, key: str | None, *, has: str, **options: Any) -> dict[str, Any]:
    """Like `call_json`, and try again while the server is busy and says when."""
    for _ in range(_TRIES - 1):
        try:
            return call_json(method, url, key, has=has, **options)
        except RefusedError as error:
            if error.retry_after_s is None:
                raise
            time.sleep(error.retry_after_s)
    return call_json(method, url, key, has=has, **options)
