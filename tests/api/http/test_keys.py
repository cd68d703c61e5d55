"""Keys: every route but health needs one, the admin's route needs the admin's, and none is told to anybody."""

import base64

import pytest
from fastapi.routing import APIRoute
from pydantic import ValidationError

from api.http.app import create_app
from api.http.middleware.security import ADMIN, HEALTH, _matches
from tests.api.http.stub_service import TOKEN, ask, assert_is_an_error, make_service

KEYED = {"api_keys": ["first", "zweiter-schlüssel"]}
BASIC = base64.b64encode(b"anyone:first").decode()


def opened() -> list[tuple[str, str]]:
    app = create_app(make_service(), admin_token=TOKEN)
    routes = [(method, route.path) for route in app.routes if isinstance(route, APIRoute) for method in route.methods]
    routes = routes or [
        (method.upper(), path) for path, methods in app.openapi()["paths"].items() for method in methods
    ]
    return [
        *routes,
        ("GET", "/openapi.json"),
        ("GET", "/static/app.js"),
        ("GET", "/"),
        ("GET", "/docs"),
        ("GET", "/no"),
    ]


@pytest.mark.parametrize(("method", "path"), opened())
def test_every_route_but_health_needs_a_key(method, path):
    response = ask(make_service(up=False, **KEYED), method, path)
    if path in HEALTH:
        assert response.status_code in {200, 503}
    else:
        assert_is_an_error(response, 401)
        assert response.headers["www-authenticate"].startswith("Basic")


@pytest.mark.parametrize(
    "headers",
    [
        {"Authorization": "Bearer first"},
        {"authorization": "bearer  first"},
        {"X-API-Key": "first"},
        {"X-API-Key": "zweiter-schlüssel".encode()},
        {"Authorization": f"Basic {BASIC}"},
        {"Authorization": f"Bearer {TOKEN}"},
    ],
    ids=["bearer", "small letters", "header", "second key", "basic", "the admin's token"],
)
def test_a_right_key_opens(headers):
    assert ask(make_service(**KEYED), "GET", "/config", headers=headers).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"Authorization": "Bearer wrong"},
        {"Authorization": "Bearer "},
        {"Authorization": "first"},
        {"Authorization": "Basic Zmlyc3Q="},
        {"Authorization": "Basic %%%"},
        {"X-API-Key": "firs"},
        {"X-API-Key": "first first"},
        {"X-API-Key": b"\xff\xfe"},
    ],
    ids=["wrong", "empty", "no scheme", "only a name", "not base64", "a part", "twice", "bytes"],
)
def test_a_wrong_key_does_not_open(headers):
    assert_is_an_error(ask(make_service(**KEYED), "GET", "/config", headers=headers), 401)


def test_an_empty_key_is_none():
    with pytest.raises(ValidationError, match="at least 1 character"):
        make_service(api_keys=[""])
    assert not _matches(b"", [b""])


def test_a_refused_key_is_counted():
    service = make_service(**KEYED)
    ask(service)
    assert b'airmoe_requests_total{code="401"} 1.0' in service.metrics.render()[0]


@pytest.mark.parametrize("headers", [{}, {"X-API-Key": "first"}, {"Authorization": "Bearer nope"}])
def test_the_admin_route_takes_the_admin_token_only(headers):
    for service in (make_service(), make_service(**KEYED)):
        assert_is_an_error(ask(service, "POST", "/experts/scale", headers=headers, json={"experts": 3}), 401)
    right = {"Authorization": f"Bearer {TOKEN}"}
    assert ask(make_service(), "POST", "/experts/scale", headers=right, json={"experts": 3}).status_code == 200
    assert {"/experts/scale"} == ADMIN


def test_secrets_and_paths_are_not_in_the_public_configuration():
    response = ask(make_service(admin_token="hidden-1", **KEYED), "GET", "/config", headers={"X-API-Key": "first"})
    assert not [name for name in ("hidden-1", "first", "schl", "cache_dir", "storage", "root") if name in response.text]
