"""The model in Python: by name or folder, on any kind of image, with the account of the answer."""

import io
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import airmoe_ray
from airmoe_ray.data.scenes import render_scene
from airmoe_ray.errors import CheckpointError, UserError
from airmoe_ray.inference.masks import mask_of
from airmoe_ray.inference.pictures import colour_mask, overlay
from airmoe_ray.inference.segmenter import Segmenter
from airmoe_ray.radio.ledger import account
from airmoe_ray.storage import shipped
from airmoe_ray.storage.export import export_model
from tests.airmoe_ray.small_run import KNOWS, small_run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_run(tmp_path_factory.mktemp("pretrained") / "run")


@pytest.fixture(scope="module")
def segmenter(run: Path) -> Segmenter:
    return Segmenter.from_pretrained(run)


@pytest.fixture(scope="module")
def photo() -> np.ndarray:
    return render_scene(990_000, height=48, width=64).image


def png(image: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, "PNG")
    return buffer.getvalue()


def test_the_package_offers_the_segmenter_and_is_light_until_somebody_asks():
    assert airmoe_ray.Segmenter is Segmenter
    assert "Segmenter" in dir(airmoe_ray)
    with pytest.raises(AttributeError, match="no attribute 'Segmentor'"):
        airmoe_ray.Segmentor  # noqa: B018
    code = "import airmoe_ray, sys; print({'torch', 'numpy', 'PIL', 'pydantic', 'ray'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"


def test_a_folder_a_shipped_name_and_a_hub_id_give_the_same_model(run, photo, tmp_path, monkeypatch):
    export_model(run / "checkpoint", tmp_path / "shipped" / "street", name="street")
    monkeypatch.setattr(shipped, "shipped_folder", lambda: tmp_path / "shipped")
    monkeypatch.setattr("airmoe_ray.storage.shipped.fetch_from_hub", lambda name: tmp_path / "shipped" / "street")
    monkeypatch.chdir(tmp_path)
    answers = [
        Segmenter.from_pretrained(name)(photo, seed=3)
        for name in ("street", tmp_path / "shipped" / "street", "someone/street")
    ]
    assert all((answer.mask == answers[0].mask).all() for answer in answers)
    whole = Segmenter.from_pretrained(run / "checkpoint")(photo, seed=3)  # float32 on disk, too
    assert (whole.mask == answers[0].mask).mean() > 0.99
    assert [client.id for client in whole.answered] == [client.id for client in answers[0].answered]


def test_only_what_looks_like_one_is_sought_on_the_hub(monkeypatch, tmp_path):
    monkeypatch.setattr("airmoe_ray.storage.shipped.fetch_from_hub", lambda name: pytest.fail("the hub was asked"))
    monkeypatch.chdir(tmp_path)
    for name in ("nowhere", "/srv/nothing", "a/b/c"):
        with pytest.raises(CheckpointError, match=f"^{name}: neither a run folder nor a shipped model"):
            Segmenter.from_pretrained(name)
    (tmp_path / "some" / "folder").mkdir(parents=True)
    with pytest.raises(CheckpointError, match="some/folder: no checkpoint here"):
        Segmenter.from_pretrained("some/folder")


def test_a_path_bytes_a_picture_and_an_array_are_one_image(segmenter, photo, tmp_path):
    (tmp_path / "photo.png").write_bytes(png(photo))
    kinds = [photo, png(photo), Image.fromarray(photo), tmp_path / "photo.png", str(tmp_path / "photo.png")]
    answers = [segmenter(kind, seed=1) for kind in kinds]
    assert all((answer.mask == answers[0].mask).all() for answer in answers)
    grey = segmenter(photo[..., 0])
    assert (grey.mask == segmenter(np.repeat(photo[..., :1], 3, axis=2)).mask).all()
    sideways = Image.fromarray(photo)
    sideways.getexif()[0x0112] = 6  # a camera that was held upright
    assert segmenter(sideways).mask.shape == photo.shape[1::-1]


def test_the_answer_is_that_of_a_run_with_the_seed_as_its_id(segmenter, photo):
    answer = segmenter(photo, seed=11)
    prepared = segmenter.prepare(photo)
    output = segmenter.run([prepared], [11])
    assert answer.mask.dtype == np.uint8
    assert (answer.mask == mask_of(output.logits_BChw[0], prepared)).all()
    sent = dict(zip(output.routing.transmit_BK[0].tolist(), output.beta_BK[0].tolist(), strict=True))
    assert {client.id: client.weight for client in answer.routing if client.weight} == sent
    assert [client.knows for client in answer.routing] == KNOWS
    assert sum(client.weight for client in answer.routing) == pytest.approx(1)
    assert answer.channel.seed == 11
    assert answer.channel.nmse == pytest.approx(float(output.nmse_B[0]))
    gains = output.round.gains(output.routing.transmit_BK)[0].tolist()
    expected = account(
        segmenter.config, feature_dim=segmenter.card.feature_dim, classes=10, grid=(6, 8), top_k=2, gains_K=gains
    )
    assert answer.communication == expected


def test_segments_are_what_the_mask_holds(segmenter, photo):
    answer = segmenter(photo)
    ids, areas = np.unique(answer.mask, return_counts=True)
    assert [(s.id, s.area) for s in answer.segments] == list(zip(ids.tolist(), areas.tolist(), strict=True))
    assert [s.label for s in answer.segments] == [answer.classes[i] for i in ids]
    assert {s.label: s.score for s in answer.segments} == {k: v for k, v in answer.scores.items() if v > 0}
    assert list(answer.scores) == list(answer.classes)


def test_pictures_are_those_of_the_mask(segmenter, photo):
    answer = segmenter(photo)
    table = segmenter.card.table
    assert (np.asarray(answer.colour()) == colour_mask(answer.mask, table)).all()
    assert (np.asarray(answer.overlay()) == overlay(photo, answer.mask, table)).all()
    assert "64x48" in repr(answer)


def test_options_of_a_call_reach_the_air_and_are_gone_after_it(segmenter, photo):
    usual = segmenter(photo, seed=2)
    assert (segmenter(photo, seed=2).mask == usual.mask).all()
    noisy, ideal = segmenter(photo, seed=2, snr_db=-40), segmenter(photo, seed=2, channel="ideal")
    assert noisy.channel.nmse > 100 * usual.channel.nmse
    assert (ideal.channel.kind, ideal.channel.nmse) == ("ideal", 0.0)
    everybody = segmenter(photo, top_k=4, channel="ideal")
    assert len(everybody.answered) == everybody.communication.uplink_routing_bits == 4  # K = N: a fade bit each
    assert segmenter(photo, seed=3).channel.nmse != usual.channel.nmse
    again = segmenter(photo, seed=2)
    assert (again.mask == usual.mask).all()
    assert again.channel == usual.channel


@pytest.mark.parametrize(("options", "told"), [
    ({"top_k": 9}, "routing.top_k = 9 is more than experts.count = 4"),
    ({"top_k": 0}, "routing.top_k = 0"),
    ({"snr_db": 500}, "channel.snr_db = 500"),
    ({"channel": "fibre"}, "channel.kind = 'fibre'"),
    ({"seed": -1}, "seed = -1"),
])  # fmt: skip
def test_options_out_of_range_are_told_in_one_line(segmenter, photo, options, told):
    with pytest.raises(UserError) as caught:
        segmenter(photo, **options)
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_is_no_image_is_told_in_one_line(segmenter, tmp_path, monkeypatch):
    (tmp_path / "notes.txt").write_text("hello")
    cases = {
        "notes.txt: the file is not an image; send PNG": tmp_path / "notes.txt",
        "none.png: cannot be read (No such file": tmp_path / "none.png",
        "cannot be read (Is a directory": tmp_path,
        "the file is empty": b"",
        "an array of 4 x 5 x 2 uint8": np.zeros((4, 5, 2), np.uint8),
        "an array of 4 x 5 x 3 float32": np.zeros((4, 5, 3), np.float32),
        "an array of 0 x 5 x 3 uint8": np.zeros((0, 5, 3), np.uint8),
        "0 x 0 has no pixels": Image.new("RGB", (0, 0)),
        "int is not taken": 7,
        "64000000 pixels, the limit is 50000000": Image.new("L", (8000, 8000)),
    }
    for told, image in cases.items():
        with pytest.raises(UserError) as caught:
            segmenter(image)
        assert told in str(caught.value)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("size", [(1, 1), (1, 300), (300, 1)])
def test_the_smallest_and_thinnest_images_have_a_mask(segmenter, size):
    answer = segmenter(np.full((*size, 3), 120, np.uint8))
    assert answer.mask.shape == size
    assert sum(segment.area for segment in answer.segments) == answer.mask.size


def test_a_rule_of_ones_own_chooses_the_clients(run, photo):
    def last_first(query_dist_Bd: torch.Tensor, stat_BNd: torch.Tensor) -> torch.Tensor:
        return torch.arange(stat_BNd.shape[1]).expand(len(query_dist_Bd), -1).float()

    ruled = Segmenter.from_pretrained(run, rule=last_first)
    answer = ruled(photo, channel="ideal")
    assert {client.id for client in answer.answered} == {2, 3}
    assert {client.id for client in ruled(photo, channel="ideal", top_k=3).answered} == {1, 2, 3}
    wrong = Segmenter.from_pretrained(run, rule=lambda query_dist_Bd, stat_BNd: stat_BNd)
    with pytest.raises(UserError, match=r"the routing rule gave \(1, 4, 64\); expected .* \(1, 4\)"):
        wrong(photo)
