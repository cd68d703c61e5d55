"""Requests to a running server, and what goes wrong with them in one line."""

import time
from typing import Any

from airmoe_ray.errors import UserError

_TRIES = 10  # while the server is busy


class RefusedError(UserError):
    """A server answered with an error; busy ones say when to come back."""

    def __init__(self, told: str, retry_after_s: float | None) -> None:
        super().__init__(told)
        self.retry_after_s = retry_after_s


def call(method: str, url: str, key: str | None = None, **options: Any) -> Any:
    """One request; what goes wrong is told in one line."""
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
        told = f"{body['error']}" + (f" ({body['detail']})" if body.get("detail") else "")
    except (ValueError, KeyError, TypeError):
        told = response.reason_phrase
    wait = response.headers.get("retry-after", "")
    raise RefusedError(f"{url}: {response.status_code}, {told}", float(wait) if wait.isdigit() else None)


def call_json(method: str, url: str, key: str | None = None, *, has: str, **options: Any) -> dict[str, Any]:
    """One request whose answer is an object that `has` this field, as those of our servers are."""
    response = call(method, url, key, **options)
    try:
        body = response.json()
    except ValueError:
        body = None
    if not isinstance(body, dict) or has not in body:
        raise UserError(f"{url}: what answers there is not an AirMoE server; give its address with --url")
    return body


def call_patiently(method: str, url: str, key: str | None, *, has: str, **options: Any) -> dict[str, Any]:
    """The same, again where the server is busy and says when to come back."""
    for _ in range(_TRIES - 1):
        try:
            return call_json(method, url, key, has=has, **options)
        except RefusedError as error:
            if error.retry_after_s is None:
                raise
            time.sleep(error.retry_after_s)
    return call_json(method, url, key, has=has, **options)
