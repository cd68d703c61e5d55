"""Wishes to scale, as they are declared and refused."""

import json
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, settings

from api.http.app import create_app
from tests.api.http.stub_service import TOKEN, ask, assert_is_an_error, make_service


def scale(wish: Any) -> httpx.Response:
    headers = {"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"}
    content = wish if isinstance(wish, bytes) else json.dumps(wish).encode()
    return ask(make_service(), "POST", "/experts/scale", headers=headers, content=content)


def test_more_experts_than_the_checkpoint_holds_is_409_without_a_path():
    assert "does not hold 9" in assert_is_an_error(scale({"experts": 9}), 409)["error"]


@pytest.mark.parametrize(
    "wish",
    [{}, {"experts": 0}, {"experts": True}, {"experts": "x"}, {"replicas": {"4": 2}}, {"replicas": {"0": 0}}, {"x": 1}],
    ids=json.dumps,
)
def test_a_wish_that_makes_no_sense_is_422(wish):
    assert_is_an_error(scale(wish), 422)


def test_a_wish_that_is_not_text_is_400():
    assert_is_an_error(scale(b'{"\xff": 1}'), 400)


def test_replicas_of_an_expert_that_leaves_are_refused_before_anything_changes():
    assert_is_an_error(scale({"experts": 3, "replicas": {"3": 2}}), 422)


# as declared

app = create_app(make_service(hosts=["testserver"]), admin_token=TOKEN)  # what schemathesis calls it
admin_schema = schemathesis.openapi.from_asgi("/openapi.json", app)


@admin_schema.include(path="/experts/scale").parametrize()
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
def test_scaling_answers_as_declared(case):
    beyond_a_schema = [schemathesis.checks.CHECKS.get_one("positive_data_acceptance")]  # which experts there are
    case.call_and_validate(headers={"Authorization": f"Bearer {TOKEN}"}, excluded_checks=beyond_a_schema)
