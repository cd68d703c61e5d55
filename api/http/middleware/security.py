"""Checks who asks and the key, sets security headers and request ids, and answers what nothing else has handled."""

import base64
import binascii
import hmac
import logging
import re
import uuid
from collections.abc import Iterable

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.http.errors import error_response
from api.http.middleware.front_door import HEALTH, FrontDoor

log = logging.getLogger("airmoe")
ADMIN = frozenset({"/experts/scale"})

_POLICY = (
    "default-src 'self'; img-src 'self' data: blob:; style-src 'self'; script-src 'self'; connect-src 'self'; "
    "object-src 'none'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
)
_DOCS_POLICY = _POLICY.replace("style-src 'self'", "style-src 'self' 'unsafe-inline'")  # Swagger UI styles elements
_PLAIN = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")


class SecurityMiddleware:
    """Pure ASGI middleware: front door, keys, security headers, request ids, and a 500 for what nobody handled."""

    def __init__(self, app: ASGIApp, *, door: FrontDoor, api_keys: Iterable[str], admin_token: str) -> None:
        self.app, self.door = app, door
        self.api_keys = [key.encode() for key in api_keys]
        self.admin_token = admin_token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers, path = Headers(scope=scope), scope["path"]
        given_id = headers.get("x-request-id", "")
        request_id = given_id if _REQUEST_ID.fullmatch(given_id) else uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id
        started = False

        async def with_headers(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                out = MutableHeaders(scope=message)
                out.update(_PLAIN)
                out["Content-Security-Policy"] = _DOCS_POLICY if path == "/docs" else _POLICY
                out["X-Request-ID"] = request_id
            await send(message)

        if refusal := self.door.refusal(scope):
            await refusal(scope, receive, with_headers)
        elif self._may_pass(path, headers):
            try:
                await self.app(scope, receive, with_headers)
            except Exception:  # a defect: the log has the traceback, the response must not
                if started:
                    raise
                log.exception("request %s failed", request_id)
                await error_response(500, "internal error")(scope, receive, with_headers)
        else:
            refusal = error_response(401, "a key is needed", "send Authorization: Bearer KEY, or X-API-Key: KEY")
            # Basic, so that a browser asks for the key (as the password) and sends it from then on
            refusal.headers["WWW-Authenticate"] = 'Basic realm="AirMoE: the key is the password"'
            await refusal(scope, receive, with_headers)

    def _may_pass(self, path: str, headers: Headers) -> bool:
        if path in HEALTH:
            return True
        given = _credentials(headers)
        if path in ADMIN:
            return _matches(given, [self.admin_token])
        return not self.api_keys or _matches(given, [*self.api_keys, self.admin_token])


def _credentials(headers: Headers) -> bytes:
    """The key of a request, from X-API-Key or from Bearer or Basic authorization; empty if there is none."""
    if key := headers.get("x-api-key"):
        return key.encode("latin-1")  # the bytes as they were sent
    scheme, _, value = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return value.strip().encode("latin-1")
    if scheme.lower() == "basic":
        try:
            return base64.b64decode(value, validate=True).partition(b":")[2]
        except (binascii.Error, ValueError):
            return b""
    return b""


def _matches(given: bytes, keys: list[bytes]) -> bool:
    """Whether the key is one of `keys`, in constant time: it is compared with every one of them."""
    return bool(given) and any([hmac.compare_digest(given, key) for key in keys])  # noqa: C419  a generator would stop early
