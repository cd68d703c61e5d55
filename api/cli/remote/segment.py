"""`airmoe segment`: sends images to a running server, and writes masks, colours and overlays as PNGs."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from airmoe_ray.errors import UserError
from api.cli.common import JsonOption, print_json, stdout
from api.cli.remote.connection import HERE, KeyOption, RefusedError, UrlOption, call_patiently
from api.cli.reporters import reporting

_IMAGES = {".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff"}


def segment(
    files: Annotated[list[Path], typer.Argument(help="Images, or folders of images.")],
    out: Annotated[Path, typer.Option(help="Folder for the pictures.")] = Path("segmented"),
    url: UrlOption = HERE,
    key: KeyOption = None,
    top_k: Annotated[int | None, typer.Option(help="K, clients routed.")] = None,
    snr_db: Annotated[float | None, typer.Option(help="SNR of the channel [dB].")] = None,
    channel: Annotated[str | None, typer.Option(help="air, ideal or digital.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of fading and noise.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Segment images on a running server; writes NAME_mask.png, NAME_color.png and NAME_overlay.png."""
    images = _images(files)
    parameters = {"top_k": top_k, "snr_db": snr_db, "channel": channel, "seed": seed}
    given = {name: value for name, value in parameters.items() if value is not None}
    names = _output_names(images)
    out.mkdir(parents=True, exist_ok=True)
    rows, failed = [], 0
    with reporting() as report:
        move = report.progress(f"segmenting {len(images)} images")
        for number, (path, name) in enumerate(zip(images, names, strict=True), start=1):
            sent = {"params": given, "files": {"file": path.read_bytes()}}
            try:
                response = call_patiently("POST", f"{url}/segment", key, has="mask", **sent)
            except RefusedError as error:
                if len(images) == 1:
                    raise
                report.line(f"{path}: {error}")
                failed += 1
            else:
                written = _write_pictures(path, response, out / name)
                rows.append({"file": str(path), "written": written, **_summary(response)})
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


def _write_pictures(path: Path, response: dict[str, Any], stem: Path) -> list[str]:
    import base64
    import io

    import numpy as np
    from PIL import Image

    from airmoe_ray.data.base import ClassTable
    from airmoe_ray.inference.decode import decode
    from airmoe_ray.inference.pictures import colour_mask, overlay

    index = Image.open(io.BytesIO(base64.b64decode(response["mask"])))
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


def _summary(response: dict[str, Any]) -> dict[str, Any]:
    pixels = response["width"] * response["height"]
    heard = [expert for expert in response["routing"]["experts"] if expert["weight"] > 0]
    largest = sorted(response["segments"], key=lambda segment: -segment["area"])[:3]
    return {
        "size": f"{response['width']}x{response['height']}",
        "classes": ", ".join(f"{s['label']} {s['area'] / pixels:.0%}" for s in largest),
        "experts": ", ".join(f"{expert['id']} ({expert['weight']:.2f})" for expert in heard),
        "ms": response["timings_ms"]["total"],
        "seed": response["channel"]["seed"],
        "degraded": response["routing"]["reason"],
    }
