"""`airmoe segment`: sends images to a running server, and writes masks, colours and overlays as PNGs."""

import os
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from airmoe_ray.client import Client, Segmentation, ServerError
from airmoe_ray.errors import UserError
from api.cli.common import JsonOption, print_json, stderr, stdout
from api.cli.remote.connection import HERE, KeyOption, UrlOption
from api.cli.reporters import reporting

_IMAGES = {".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff"}
_PICTURES = ("mask", "color", "overlay")
_IN_FLIGHT = 4  # requests at once
_OF_THE_IMAGE = {400, 413, 415, 429, 500, 503, 504}  # refusals after which another image may do better


@dataclass(frozen=True)
class _Job:
    """One image, and where its pictures go."""

    image: Path
    stem: Path

    @property
    def pictures(self) -> list[Path]:
        return [self.stem.with_name(f"{self.stem.name}_{kind}.png") for kind in _PICTURES]


def segment(
    files: Annotated[list[Path], typer.Argument(help="Images, or folders of images.")],
    out: Annotated[Path, typer.Option(help="Folder for the pictures, in the tree of the images.")] = Path("segmented"),
    url: UrlOption = HERE,
    key: KeyOption = None,
    top_k: Annotated[int | None, typer.Option(help="K, clients routed.")] = None,
    snr_db: Annotated[float | None, typer.Option(help="SNR of the channel [dB].")] = None,
    channel: Annotated[str | None, typer.Option(help="air, ideal or digital.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of fading and noise.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Also images whose pictures exist.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Segment images on a running server; writes NAME_mask.png, NAME_color.png and NAME_overlay.png.

    Images whose three pictures exist are skipped, so an interrupted run goes on where it stopped. Exit code 1 if some
    images failed; the last lines say which.
    """
    jobs = _jobs(files, out)
    rows = {job: _skipped(job) for job in jobs if not overwrite and all(place.is_file() for place in job.pictures)}
    left = [job for job in jobs if job not in rows]
    parameters = {"top_k": top_k, "snr_db": snr_db, "channel": channel, "seed": seed}
    with Client(url, key) as client, reporting() as report:
        move = report.progress(f"segmenting {len(left)} images")
        for done, (job, row) in enumerate(_segmented(client, left, parameters), start=1):
            rows[job] = row
            move(done, len(left))
    failed = [rows[job] for job in jobs if "error" in rows[job]]
    if failed and len(jobs) == 1:
        raise UserError(failed[0]["error"])
    _print([rows[job] for job in jobs], out, as_json=as_json)
    if failed:
        stderr.print(f"airmoe: {len(failed)} of {len(jobs)} images were not segmented:")
        for row in failed:
            stderr.print(f"  {row['file']}: {row['error']}", markup=False, soft_wrap=True)
        raise typer.Exit(1)


def _segmented(client: Client, jobs: list[_Job], parameters: dict[str, Any]) -> Iterator[tuple[_Job, dict[str, Any]]]:
    """Segment images, a few at once, and tell of each when it is done; at an end before the last, no new one begins."""
    pool = ThreadPoolExecutor(_IN_FLIGHT, thread_name_prefix="segment")
    try:
        work = {pool.submit(_segment_one, client, job, parameters): job for job in jobs}
        for one in as_completed(work):
            yield work[one], one.result()
    finally:
        pool.shutdown(cancel_futures=True)


def _segment_one(client: Client, job: _Job, parameters: dict[str, Any]) -> dict[str, Any]:
    """One image's row: what was written, or why nothing was; raises what would fail all the others as well."""
    try:
        data = job.image.read_bytes()
    except OSError as error:
        return {"file": str(job.image), "error": f"{error.strerror or error}"}
    try:
        answer = client.segment(data, **parameters)
    except ServerError as error:
        if error.status not in _OF_THE_IMAGE:
            raise
        return {"file": str(job.image), "error": str(error)}
    _write_pictures(data, answer, job)
    return {"file": str(job.image), "written": [str(place) for place in job.pictures], **_summary(answer)}


def _skipped(job: _Job) -> dict[str, Any]:
    return {"file": str(job.image), "written": [str(place) for place in job.pictures], "skipped": True}


def _jobs(files: list[Path], out: Path) -> list[_Job]:
    """The images, each with its place: as it lies in the deepest folder that holds all that was given."""
    found: dict[Path, Path] = {}  # absolute -> as given
    folders = []
    for given in files:
        if given.is_dir():
            found |= {_absolute(entry): entry for entry in sorted(given.rglob("*")) if _is_image(entry, out)}
        elif given.is_file():
            found[_absolute(given)] = given
        else:
            raise UserError(f"{given}: no such file or folder")
        folders.append(_absolute(given if given.is_dir() else given.parent))
    if not found:
        raise UserError(f"{files[0]}: no images ({', '.join(sorted(_IMAGES))}) in there")
    common = os.path.commonpath(folders)
    alike = Counter(path.with_suffix("") for path in found)
    jobs = []
    for path, given in found.items():
        stem = path.with_suffix("")
        place = path if alike[stem] > 1 else stem  # a.png and a.jpg keep their endings
        jobs.append(_Job(given, out / place.relative_to(common)))
    return jobs


def _is_image(path: Path, out: Path) -> bool:
    """Whether a file of a folder is to be segmented; pictures that were written there are not."""
    ours = _absolute(path).is_relative_to(_absolute(out))
    return path.suffix.lower() in _IMAGES and not ours and path.is_file()


def _absolute(path: Path) -> Path:
    return Path(os.path.abspath(path))  # `resolve` would follow links out of the tree


def _write_pictures(data: bytes, answer: Segmentation, job: _Job) -> None:
    """Write mask, colours and overlay; each appears under its name only when it is whole."""
    from PIL import Image

    from airmoe_ray.data.base import ClassTable
    from airmoe_ray.inference.decode import decode
    from airmoe_ray.inference.pictures import colour_mask, overlay

    palette = tuple((r, g, b) for r, g, b in answer.palette.tolist())
    classes = ClassTable(answer.classes, palette)
    rgb = decode(data, max_pixels=1 << 40).rgb
    pictures = (answer.mask, colour_mask(answer.mask, classes), overlay(rgb, answer.mask, classes))
    job.stem.parent.mkdir(parents=True, exist_ok=True)
    for place, pixels in zip(job.pictures, pictures, strict=True):
        partial = place.with_name(f".{place.name}.part")
        try:
            Image.fromarray(pixels).save(partial, "PNG")
            partial.replace(place)
        finally:
            partial.unlink(missing_ok=True)


def _summary(answer: Segmentation) -> dict[str, Any]:
    height, width = answer.mask.shape
    heard = [expert for expert in answer.routing["experts"] if expert["weight"] > 0]
    largest = sorted(answer.segments, key=lambda segment: -segment.area)[:3]
    return {
        "size": f"{width}x{height}",
        "classes": ", ".join(f"{s.label} {s.area / answer.mask.size:.0%}" for s in largest),
        "experts": ", ".join(f"{expert['id']} ({expert['weight']:.2f})" for expert in heard),
        "ms": answer.timings_ms["total"],
        "seed": answer.channel["seed"],
        "degraded": answer.routing["reason"],
    }


def _print(rows: list[dict[str, Any]], out: Path, *, as_json: bool) -> None:
    if as_json:
        print_json(rows)
        return
    table = Table("image", "size", "largest classes", "experts", "ms", "degraded")
    for row in rows:
        if "size" in row:
            cells = (row["file"], row["size"], row["classes"], row["experts"], f"{row['ms']:.0f}")
            table.add_row(*cells, row["degraded"] or "no")
    if table.row_count:
        stdout.print(table)
        stdout.print(f"masks, colours and overlays are in {out}")
    if skipped := sum("skipped" in row for row in rows):
        stdout.print(f"{skipped} skipped, as their pictures are in {out}; --overwrite makes them again")
