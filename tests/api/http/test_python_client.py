"""The Python clients against a real server."""

import asyncio

import numpy as np
import pytest
from PIL import Image

from airmoe_ray import AsyncClient, Client, ServerError
from tests.api.http.images import photo
from tests.api.http.server_requests import PHOTO, mask_of
from tests.api.support import EXPERTS, TOP_K


def test_every_kind_of_image_has_the_mask_that_the_server_sends(server, client, tmp_path):
    (tmp_path / "photo.png").write_bytes(PHOTO)
    expected = mask_of(client, seed=1, channel="ideal")
    with Client(server.url) as ours:
        for image in (tmp_path / "photo.png", PHOTO, photo(48, 80), Image.fromarray(photo(48, 80))):
            found = ours.segment(image, seed=1, channel="ideal")
            assert (found.mask == expected).all()
    assert [segment.id for segment in found.segments] == np.unique(expected).tolist()
    for segment in found.segments:
        assert (segment.mask.sum(), found.classes[segment.id]) == (segment.area, segment.label)
    assert sum(expert["selected"] for expert in found.routing["experts"]) == TOP_K
    assert (found.channel["seed"], found.channel["kind"]) == (1, "ideal")
    assert found.communication["air_channel_uses"] > 0
    assert found.timings_ms["total"] > 0


def test_a_server_is_ready_and_lists_its_experts(server):
    with Client(server.url) as ours:
        assert ours.ready()
        assert [expert["id"] for expert in ours.status()] == list(range(EXPERTS))


def test_several_images_at_once_from_an_event_loop(server, client):
    async def run() -> list[np.ndarray]:
        async with AsyncClient(server.url) as ours:
            assert await ours.ready()
            found = await asyncio.gather(*(ours.segment(PHOTO, seed=seed, top_k=1) for seed in range(4)))
            return [one.mask for one in found]

    for seed, mask in enumerate(asyncio.run(run())):
        assert (mask == mask_of(client, seed=seed, top_k=1)).mean() > 0.999  # in a batch, sums may round otherwise


@pytest.mark.parametrize(("parameters", "status"), [({"top_k": 99}, 422), ({"format": "svg"}, 422), ({"sed": 1}, 422)])
def test_a_refusal_names_the_parameter(server, parameters, status):
    with pytest.raises(ServerError, match=next(iter(parameters))) as refused:
        Client(server.url).segment(PHOTO, **parameters)
    assert refused.value.status == status
