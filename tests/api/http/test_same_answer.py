"""A server and the model in Python give one answer to one image and seed."""

import base64
import io
from dataclasses import asdict

import numpy as np
import pytest
from PIL import Image

from airmoe_ray import Segmenter
from tests.api.http.server_requests import PHOTO, segment


@pytest.mark.parametrize("options", [{}, {"snr_db": 0.0, "top_k": 3}, {"channel": "digital"}], ids=str)
def test_the_same_seed_gives_the_same_mask_routing_and_bits(server, client, options):
    told = segment(client, seed=41, **options).json()
    answer = Segmenter.from_pretrained(server.run)(PHOTO, seed=41, **options)
    mask = np.asarray(Image.open(io.BytesIO(base64.b64decode(told["mask"]))))
    assert (mask == answer.mask).mean() > 0.999  # a tie may fall either way between two processes
    experts = told["routing"]["experts"]
    assert [e["selected"] for e in experts] == [c.selected for c in answer.routing]
    for key in ("js", "score", "probability", "weight"):
        assert [e[key] for e in experts] == pytest.approx([getattr(c, key) for c in answer.routing], abs=1e-4)
    for expert, mine in zip(experts, answer.routing, strict=True):
        assert (expert["gamma"] is None) == (mine.gamma is None)
        assert expert["gamma"] is None or complex(*expert["gamma"]) == pytest.approx(mine.gamma, rel=1e-5)
    assert told["communication"] == asdict(answer.communication)
    channel = {**asdict(answer.channel), "truncated": list(answer.channel.truncated)}
    assert told["channel"].keys() == channel.keys()
    for key, value in told["channel"].items():
        assert value == (pytest.approx(channel[key], rel=1e-3) if key in ("rho", "nmse") else channel[key]), key
    assert [(s["label"], s["id"]) for s in told["segments"]] == [(s.label, s.id) for s in answer.segments]
