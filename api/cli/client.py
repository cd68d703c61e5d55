"""Verbs that talk to a running server: `segment`, `status`, `scale`."""

import itertools
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

import typer
from rich.table import Table

from airmoe_ray.errors import UserError
from api.cli.asking import RefusedError, call_json, call_patiently
from api.cli.common import DEFAULT_PORT, JsonOption, print_json, stdout, terminal

UrlOption = Annotated[str, typer.Option(help="Address of the server.")]
KeyOption = Annotated[str | None, typer.Option(envvar="AIRMOE_API_KEY", help="API key, if the server asks for one.")]
_HERE = f"http://127.0.0.1:{DEFAULT_PORT}"
_MOST_ROWS = 50  # of a table of experts; beyond it, neighbours in one actor share a row
_IMAGES = {".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff"}


def segment(
    files: Annotated[list[Path], typer.Argument(help="Images, or folders of images.")],
    out: Annotated[Path, typer.Option(help="Folder for the pictures.")] = Path("segmented"),
    url: UrlOption = _HERE,
    key: KeyOption = None,
    top_k: Annotated[int | None, typer.Option(help="K, clients routed.")] = None,
    snr_db: Annotated[float | None, typer.Option(help="SNR of the channel [dB].")] = None,
    channel: Annotated[str | None, typer.Option(help="air, ideal or digital.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of fading and noise.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Segment images on a running server; writes NAME_mask.png, NAME_color.png and NAME_overlay.png."""
    images = _images(files)
    wishes = {"top_k": top_k, "snr_db": snr_db, "channel": channel, "seed": seed}
    given = {name: value for name, value in wishes.items() if value is not None}
    names = _output_names(images)
    out.mkdir(parents=True, exist_ok=True)
    rows, failed = [], 0
    with terminal() as report:
        move = report.progress(f"segmenting {len(images)} images")
        for number, (path, name) in enumerate(zip(images, names, strict=True), start=1):
            sent = {"params": given, "files": {"file": path.read_bytes()}}
            try:
                answer = call_patiently("POST", f"{url}/segment", key, has="mask", **sent)
            except RefusedError as error:
                if len(images) == 1:
                    raise
                report.line(f"{path}: {error}")
                failed += 1
            else:
                written = _write_pictures(path, answer, out / name)
                rows.append({"file": str(path), "written": written, **_summary(answer)})
            move(number, len(images))
    if as_json:
        print_json(rows)
    else:
        _print_segmented(rows, out)
    if failed:
        raise UserError(f"{failed} of {len(images)} images were not segmented, see above")


def _print_segmented(rows: list[dict[str, Any]], out: Path) -> None:
    table = Table("image", "size", "largest classes", "experts", "ms", "degraded")
    for row in rows:
        table.add_row(
            row["file"], row["size"], row["classes"], row["experts"], f"{row['ms']:.0f}", row["degraded"] or "no"
        )
    stdout.print(table)
    stdout.print(f"masks, colours and overlays are in {out}")


def status(url: UrlOption = _HERE, key: KeyOption = None, as_json: JsonOption = False) -> None:
    """Experts of a running server: node, GPUs, state, version, load, restarts, replicas."""
    body = call_json("GET", f"{url}/experts", key, has="experts")
    if as_json:
        print_json(body)
    else:
        _print_experts(body["experts"])


def scale(
    experts: Annotated[int | None, typer.Option(min=1, help="New number of experts N.")] = None,
    replicas: Annotated[list[str], typer.Option(metavar="EXPERT=N", help="Instances of one expert; repeatable.")] = [],  # noqa: B006
    url: UrlOption = _HERE,
    run: Annotated[Path, typer.Option(help="Folder of the served run, for its admin token.")] = Path("runs/quickstart"),
    admin_token: Annotated[str | None, typer.Option(envvar="AIRMOE_ADMIN_TOKEN", help="Admin token instead.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Change the number of experts, or of instances of one, on a running server."""
    from api.admin import read_admin_token

    wish: dict[str, Any] = {"replicas": dict(_replica(text) for text in replicas)}
    if experts is not None:
        wish["experts"] = experts
    if experts is None and not replicas:
        raise UserError("nothing to do; give --experts N or --replicas EXPERT=N")
    token = admin_token or read_admin_token(run, _port(url))
    headers = {"Authorization": f"Bearer {token}"}
    body = call_json("POST", f"{url}/experts/scale", has="experts", headers=headers, json=wish)
    if as_json:
        print_json(body)
    else:
        _print_experts(body["experts"])


def _port(url: str) -> int:
    try:
        parts = urlsplit(url)
        return parts.port or (443 if parts.scheme == "https" else 80)
    except ValueError as error:
        raise UserError(f"--url {url}: {error}") from None


def _replica(text: str) -> tuple[str, int]:
    client, _, count = text.partition("=")
    if not (client.isdigit() and count.isdigit()):
        raise UserError(f"--replicas {text}: expected EXPERT=N, such as 3=2")
    return client, int(count)


def _images(files: list[Path]) -> list[Path]:
    found: list[Path] = []
    for path in files:
        if path.is_dir():
            found += sorted(entry for entry in path.rglob("*") if entry.suffix.lower() in _IMAGES)
        elif path.is_file():
            found.append(path)
        else:
            raise UserError(f"{path}: no such file or folder")
    if not found:
        raise UserError(f"{files[0]}: no images ({', '.join(sorted(_IMAGES))}) in there")
    return found


def _output_names(images: list[Path]) -> list[str]:
    """File stems, made unique where two folders hold the same name."""
    stems = [path.stem for path in images]
    return [
        stem if stems.count(stem) == 1 else f"{path.parent.name}_{stem}_{number}"
        for number, (path, stem) in enumerate(zip(images, stems, strict=True))
    ]


def _write_pictures(path: Path, answer: dict[str, Any], stem: Path) -> list[str]:
    import base64
    import io

    import numpy as np
    from PIL import Image

    from airmoe_ray.data.base import ClassTable
    from airmoe_ray.pictures import colour_mask, overlay
    from api.images import decode

    index = Image.open(io.BytesIO(base64.b64decode(answer["mask"])))
    mask = np.asarray(index)
    flat = index.getpalette() or []
    colours = [(flat[3 * n], flat[3 * n + 1], flat[3 * n + 2]) for n in range(len(flat) // 3)][:255]
    classes = ClassTable(tuple(str(n) for n in range(len(colours))), tuple(colours))
    rgb = decode(path.read_bytes(), max_pixels=1 << 40).rgb
    pictures = {"mask": mask, "color": colour_mask(mask, classes), "overlay": overlay(rgb, mask, classes)}
    written = []
    for kind, pixels in pictures.items():
        place = stem.with_name(f"{stem.name}_{kind}.png")
        Image.fromarray(pixels).save(place)
        written.append(str(place))
    return written


def _summary(answer: dict[str, Any]) -> dict[str, Any]:
    pixels = answer["width"] * answer["height"]
    largest = sorted(answer["segments"], key=lambda segment: -segment["area"])[:3]
    return {
        "size": f"{answer['width']}x{answer['height']}",
        "classes": ", ".join(f"{s['label']} {s['area'] / pixels:.0%}" for s in largest),
        "experts": ", ".join(f"{e['id']} ({e['weight']:.2f})" for e in answer["routing"]["experts"] if e["weight"] > 0),
        "ms": answer["timings_ms"]["total"],
        "seed": answer["channel"]["seed"],
        "degraded": answer["routing"]["reason"],
    }


def _print_experts(experts: list[dict[str, Any]]) -> None:
    table = Table("expert", "state", "node", "GPUs", "version", "load", "restarts", "replicas")
    rows = [[e] for e in experts] if len(experts) <= _MOST_ROWS else _alike(experts)
    for row in rows:
        first, last = row[0], row[-1]
        name = str(first["id"]) if len(row) == 1 else f"{first['id']}-{last['id']}"
        gpus = ",".join(first["gpu_ids"]) or "-"
        load = f"{sum(e['load_ratio'] for e in row) / len(row):.2f}"
        versions, restarts, replicas = (_range(e[key] for e in row) for key in ("version", "restarts", "replicas"))
        table.add_row(name, first["state"], str(first["node"]), gpus, versions, load, restarts, replicas)
    stdout.print(table)


def _alike(experts: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Neighbours in the same actor and state."""
    return [list(row) for _, row in itertools.groupby(experts, lambda e: (e["pid"], e["node"], e["state"]))]


def _range(values: Iterable[int]) -> str:
    found = sorted(values)
    low, high = found[0], found[-1]
    return str(low) if low == high else f"{low}-{high}"
