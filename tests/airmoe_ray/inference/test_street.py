"""The model in the box: small enough, right on drawings, and on photographs of places that it has never seen."""

from pathlib import Path

from airmoe_ray.config import DataConfig
from airmoe_ray.config_file import load_config
from airmoe_ray.data import adopt, open_dataset
from airmoe_ray.data.base import Subset, by_domain
from airmoe_ray.inference.evaluate import evaluate, leave_refiner_alone
from airmoe_ray.inference.segmenter import Segmenter
from airmoe_ray.storage.shipped import find_model, shipped_names


def test_it_ships_within_twelve_megabytes_with_card_and_terms() -> None:
    assert "street" in shipped_names()
    folder = find_model("street").checkpoint
    assert sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) < 12e6
    assert "for research" in (folder / "CARD.md").read_text()


def test_drawings_it_has_not_seen_come_out_right() -> None:
    segmenter = Segmenter.from_pretrained("street")
    assert len(segmenter.card.clients) == 10
    assert "research" in segmenter.card.terms
    unseen = open_dataset(DataConfig(image_size=640, val_count=10), "test")
    scores = evaluate(segmenter, adopt(unseen, segmenter.card.table, given={}, source="scenes"))
    assert scores["miou"] > 60  # all 200: see the card


def test_photographs_of_places_it_has_not_seen_come_out_right_and_by_the_experts_work(labelme: Path) -> None:
    segmenter = Segmenter.from_pretrained("street")
    (part,) = (part for part in load_config("street").data.parts if part.name == "labelme")
    whole = open_dataset(DataConfig(name="labelme", root=str(labelme)), "all")
    unseen = by_domain(whole, part.hold_out, inside=True)
    few = Subset(unseen, range(0, len(unseen), 9))
    dataset = adopt(few, segmenter.card.table, given={}, source="labelme")
    scores = evaluate(segmenter, dataset)
    assert scores["miou"] > 65
    assert scores["per_class"]["building"]["iou"] > 75
    leave_refiner_alone(segmenter)
    assert evaluate(segmenter, dataset)["miou"] < 40
