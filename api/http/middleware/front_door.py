"""Turns away what a web page of somebody else makes its visitor's browser send.

A browser sends requests to any address that a page names, also to loopback, where no firewall stands between. Three
headers, which a page cannot forge, tell them apart:
- `Host` is the name in the address. A page whose own name was made to lead here (DNS rebinding) has a name that is not
  ours: 421. An address in digits has no name that anybody could redirect.
- `Origin` is the page that asks: 403 unless it is our own. Programs send none.
- `Sec-Fetch-Site` is how that page relates to us: 403 unless it is the same origin, or a link that was followed.
"""

import ipaddress
import re
import socket
from collections.abc import Iterable
from functools import lru_cache

from starlette.responses import Response
from starlette.types import Scope

from api.http.errors import error_response

HEALTH = frozenset({"/livez", "/readyz", "/v2/health/live", "/v2/health/ready", "/v2/models/airmoe/ready"})
_OWN_SITE = (None, b"same-origin", b"none")  # no browser, our page, an address typed in
_DEFAULT_PORTS = {"http": ":80", "https": ":443"}
_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[^\[\]:]+)(?::\d*)?")


class FrontDoor:
    """The names and pages of a server that listens on `bound`, and has the names `hosts` (`serve.hosts`) besides."""

    def __init__(self, bound: str, hosts: Iterable[str]) -> None:
        given = list(hosts)
        named = {found[1] for host in given if (found := _HOST.fullmatch(host))}
        self.any_host = "*" in named
        self.names = frozenset({bound.lower(), *_machine_names(), *named})
        self.suffixes = (".localhost", *(name[1:] for name in named if name.startswith("*.")))
        self.pages = frozenset(host for host in given if "*" not in host)
        self.local = is_loopback(bound)
        # a server meets the same few headers again and again; a flood of others only pushes them out
        self._knows = lru_cache(256)(self._is_own_host)
        self._own_page = lru_cache(256)(self._is_own_page)

    def refusal(self, scope: Scope) -> Response | None:
        """The answer to a request that is not let in; None for those that are.

        Health checks are answered under every name: load balancers call a server what they like, and there is nothing
        to learn or to change. A missing `Host`, as HTTP/1.0 allows, is no browser's.
        """
        headers = dict(scope["headers"])
        host = headers.get(b"host", b"")
        if host and not self._knows(host) and scope["path"] not in HEALTH:
            name = host.decode("latin-1")[:100]
            advice = "ask it by its address; if this is a name of its own, add it to serve.hosts"
            return error_response(421, f"Host {name}: not a name of this server", advice)
        origin = headers.get(b"origin")
        if origin is not None and not self._own_page(origin, host):
            page = origin.decode("latin-1")[:100]
            advice = "pages of other sites may not ask; a name that this server has at a proxy goes into serve.hosts"
            return error_response(403, f"Origin {page}: not a page of this server", advice)
        if headers.get(b"sec-fetch-site") not in _OWN_SITE and not _follows_link(scope["method"], headers):
            return error_response(403, "sent by a page of another site", "pages of other sites may not ask")
        return None

    def _is_own_host(self, host: bytes) -> bool:
        """Whether a `Host` is ours; ports are not compared, since forwarding changes them."""
        found = _HOST.fullmatch(host.decode("latin-1").lower())
        if self.any_host or found is None:
            return self.any_host
        name = found[1].removesuffix(".")
        if name in self.names or name.endswith(self.suffixes):
            return True
        try:
            address = ipaddress.ip_address(name.strip("[]"))
        except ValueError:
            return name == "localhost"
        # from outside we may be reached at addresses that this machine does not know of (NAT, containers, a pod's)
        return address.is_loopback or not self.local

    def _is_own_page(self, origin: bytes, host: bytes) -> bool:
        """Whether a page is of the very host and port that it asks, or of a name in `serve.hosts`; `null` is neither.

        The scheme may differ: where a proxy ends TLS, the page has https and we see http.
        """
        scheme, _, place = origin.decode("latin-1").lower().partition("://")
        asked = host.decode("latin-1").lower().removesuffix(_DEFAULT_PORTS.get(scheme, ""))
        return scheme in _DEFAULT_PORTS and bool(place) and (place == asked or place in self.pages)


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches what listens on `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _machine_names() -> set[str]:
    """The name this machine gives itself, also without its domain and as the local network calls it.

    Nothing here asks a name server: its answer is what an attacker may control.
    """
    name = socket.gethostname().lower()
    short = name.partition(".")[0]
    return {name, short, f"{short}.local"} if short else set()


def _follows_link(method: str, headers: dict[bytes, bytes]) -> bool:
    """Whether a person goes to one of our pages from another site, in a window of its own: reading, not acting."""
    return (
        method in ("GET", "HEAD")
        and headers.get(b"sec-fetch-mode") == b"navigate"
        and headers.get(b"sec-fetch-dest", b"document") == b"document"
    )
