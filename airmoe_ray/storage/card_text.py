"""CARD.md: what a model is, what it was made of and how well it does, in words and tables made of facts alone."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from airmoe_ray.config import Config
from airmoe_ray.errors import UserError
from airmoe_ray.storage.checkpoint import ModelCard

_WEAK = 40.0  # IoU below which a class is named among the limits
_DATA = {
    "scenes": "drawn by this package: no photographs, no terms",
    "camvid": "CamVid, video of drives through Cambridge; for research, not for commercial use",
    "labelme": "LabelMeFacade, photographs of streets and facades from LabelMe; for research, not for commercial use",
    "cityscapes": "Cityscapes, under its own terms (not for commercial use)",
    "apolloscape": "ApolloScape, under its own terms",
    "carla_adv": "frames of the CARLA simulator, under its own terms",
    "folder": "a folder of the maker's own, on whose terms only the maker can tell",
}


@dataclass(frozen=True)
class Scores:
    """What `airmoe eval --json` printed, and what it was measured on."""

    title: str
    result: dict[str, Any]


def read_scores(text: str) -> Scores:
    """Scores from `FILE` or `TITLE=FILE`; without a title the file's name is one."""
    title, separator, file = text.partition("=")
    path = Path(text) if Path(text).is_file() or not separator else Path(file)
    try:
        result = json.loads(path.read_text())
        float(result["miou"]), dict(result["per_class"]), int(result["images"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"--scores {text}: cannot be read ({error}); expected FILE or TITLE=FILE, as `airmoe eval --json` prints it"
        ) from None
    return Scores(title if path != Path(text) else path.stem, result)


def card_text(
    card: ModelCard,
    config: Config,
    *,
    scores: Sequence[Scores],
    command: str | None,
    size: int,
    shipped: bool = False,
) -> str:
    """The whole card; `size` is that of the weights [bytes], a `shipped` model is known by its name."""
    parts = [
        f"# {card.name}",
        _what(card, config, size),
        "## Use",
        _use(card, card.name if shipped else "DIR"),
        "## Classes",
        ", ".join(name.replace("_", " ") for name in card.classes) + ".",
        "## Data and terms",
        "\n".join(f"- {line}" for line in _data(config)),
        f"Terms of the weights: {(card.terms or 'whoever exported them stated none').rstrip('.')}. The code that made "
        "and runs them is under Apache-2.0.",
        "## Scores",
        "\n\n".join((*(_score(one, config) for one in scores), *_not_scored(scores)))
        or "None were given to `airmoe export --scores`.",
        "## What each client knows",
        "\n".join(f"- client {j}: {words}" for j, words in enumerate(card.clients)) or "Nobody said.",
        "## Limits",
        "\n".join(f"- {line}" for line in _limits(config, scores)),
        "## How it was made",
        _made(card, command),
    ]
    return "\n\n".join(parts) + "\n"


def _what(card: ModelCard, config: Config, size: int) -> str:
    experts = config.experts
    cloud = [word for word, there in (("a head", experts.shared), ("a refiner", experts.refiner)) if there]
    beside = f", with {' and '.join(cloud)} at the cloud" if cloud else ""
    return (
        f"A mixture of {experts.count} experts for semantic segmentation, of which {config.routing.top_k} answer an "
        f"image over a simulated radio{beside}. It works on features of the frozen backbone `{card.backbone_name}`, "
        f"which is not part of these files. Weights: {size / 1e6:.1f} MB, stored as float16, computed as float32."
    )


def _use(card: ModelCard, known_as: str) -> str:
    comment = "          # this folder" if known_as != card.name else ""
    return (
        "```\n"
        f"airmoe serve --run {known_as}{comment}\n"
        "```\n"
        "```python\n"
        "from airmoe_ray import Segmenter\n\n"
        f'Segmenter.from_pretrained("{known_as}")("photo.jpg").overlay().save("{card.name}.png")\n'
        "```"
    )


def _data(config: Config) -> Iterator[str]:
    tree = config.model_dump(mode="json")["data"]
    for part in tree.get("parts") or [tree]:
        yield f"{part.get('title') or part['name']}: {_DATA.get(part['name'], 'under its own terms')}"


def _score(scores: Scores, config: Config) -> str:
    result = scores.result
    head = f"**{scores.title}**: {_headline(result, config)}"
    rows = "\n".join(
        "| " + " | ".join([name.replace("_", " "), *(_figure(row.get(key)) for key in ("iou", "pre", "rec"))]) + " |"
        for name, row in result["per_class"].items()
    )
    table = f"| class | IoU | precision | recall |\n|---|---|---|---|\n{rows}"
    domains = result.get("per_domain", {})
    listed = ", ".join(f"{name} {row['miou']:.1f}{_count(row)}" for name, row in domains.items())
    left = result.get("not_scored", {}).get("parts", [])
    return (
        f"{head}\n\n{table}"
        + (f"\n\nPer domain (mIoU): {listed}." if len(domains) > 1 else "")
        + (f"\n\nNot scored: {', '.join(left)}, whose images were all trained on." if left else "")
    )


def _headline(result: dict[str, Any], config: Config) -> str:
    """Photographs first: a mean with drawings says little about them."""
    drawn = {part.title or part.name for part in config.data.parts if part.name == "scenes"}
    parts = sorted(result.get("per_part", {}).items(), key=lambda item: item[0] in drawn)
    if not parts:
        return f"mIoU {result['miou']:.1f} on {result['images']} images"
    listed = ", ".join(f"{row['miou']:.1f} on {name}{_count(row)}" for name, row in parts)
    return f"mIoU {listed}; the mean of the {len(parts)} is {result['miou']:.1f}"


def _count(row: dict[str, Any]) -> str:
    images = row.get("images")  # scores of earlier versions do not say it
    return "" if images is None else f" ({images} image{'s' if images != 1 else ''})"


def _not_scored(scores: Sequence[Scores]) -> Iterator[str]:
    """Classes of the model that none of the scores is about."""
    missing = [_missing_classes(one.result) for one in scores]
    if missing and (nowhere := [name for name in missing[0] if all(name in others for others in missing)]):
        yield f"Classes that none of these scores is about: {', '.join(name.replace('_', ' ') for name in nowhere)}."


def _missing_classes(result: dict[str, Any]) -> list[str]:
    if "not_scored" in result:
        return list(result["not_scored"]["classes"])
    return [name for name, row in result["per_class"].items() if row.get("iou") is None]


def _figure(value: float | None) -> str:
    return "absent" if value is None else f"{value:.1f}"


def _limits(config: Config, scores: Sequence[Scores]) -> Iterator[str]:
    yield "It knows the classes above and no others: whatever else is in an image is painted as one of them."
    if config.serve.resize == "fit":
        yield f"Images are fitted to a long side of {config.data.image_size} pixels: what is tiny then is not seen."
    yield "What the data above do not show (other countries, weathers, cameras) was never measured beyond these scores."
    yield "The radio is simulated. Nothing here is fit for a vehicle or for decisions about people."
    for one in scores:
        rows = one.result["per_class"].items()
        weak = {name: row.get("iou") for name, row in rows if row.get("iou") is not None and row["iou"] < _WEAK}
        if weak:
            told = ", ".join(f"{name.replace('_', ' ')} {value:.0f}" for name, value in weak.items())
            yield f"Weak on {one.title} (IoU below {_WEAK:.0f}): {told}."
    if config.backbone.weights is not None:
        yield "The backbone's weights were a file of the maker's: give it with `--set backbone.weights=FILE`."


def _made(card: ModelCard, command: str | None) -> str:
    how = (
        command or "airmoe train --config config.yaml   # the configuration in this folder, with the data's folder set"
    )
    return (
        f"```\n{how}\n```\n"
        f"AirMoE {card.airmoe_version}, torch {card.torch_version}, checkpoint format {card.format}, backbone "
        f"`{card.backbone_name}` (fingerprint {card.backbone_fingerprint[:16]})."
    )
