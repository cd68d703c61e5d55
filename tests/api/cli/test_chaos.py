"""`airmoe chaos`: when it expects an answer to be degraded."""

import pytest

from api.cli.remote.chaos import _is_degraded


def body(*, heard=(0, 1), js=0.1, truncated=(), faults=None, all_faded=False):
    experts = [{"id": j, "js": js, "selected": True, "weight": 0.5 if j in heard else 0.0} for j in (0, 1)]
    routing = {"experts": experts, "reason": None, "faults": faults or {}, "all_faded": all_faded}
    return {"routing": routing, "channel": {"truncated": list(truncated)}}


@pytest.mark.parametrize(
    ("answer", "degraded"),
    [
        (body(), False),
        (body(heard=(0,), truncated=(1,)), False),  # ordinary truncation
        (body(heard=(0,)), True),  # lost on the way
        (body(js=None), True),
        (body(faults={"1": "late"}), True),
        (body(heard=(0,), truncated=(1,), all_faded=True), True),
    ],
)
def test_an_answer_is_degraded_by_what_its_account_says(answer, degraded):
    assert _is_degraded(answer) is degraded
