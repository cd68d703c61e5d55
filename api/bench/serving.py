"""How much of the machine's speed reaches whoever posts images: throughput and latency of `airmoe serve`."""

import http.client
import io
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlencode

from PIL import Image
from safetensors.torch import save_file

from airmoe_ray.config import BackboneConfig, Config
from airmoe_ray.data.base import ClassTable
from airmoe_ray.data.scenes import CLASSES, render_scene
from airmoe_ray.features.backbone import load_backbone
from airmoe_ray.inference.decode import decode
from airmoe_ray.inference.masks import mask_of
from airmoe_ray.inference.segmenter import Segmenter
from airmoe_ray.model.experts import dilations_for
from airmoe_ray.model.moe import AirMoE
from airmoe_ray.storage.checkpoint import save_checkpoint
from airmoe_ray.storage.shipped import find_model
from airmoe_ray.training.run import model_card
from api.bench.figures import Figure, Note, by_turns, median_ms, rate, ratio
from api.http.codec.encode import index_png

Choice = Callable[[], Mapping[str, object]]
IN_FLIGHT = 8
_BATCHES = (1, 2, 4, 8)


def serving_figures(run: str | Path, folder: Path, *, rounds: int, seconds: float, note: Note) -> dict[str, Figure]:
    """All figures of this file: the given run, and a ViT-S/16 at 384x384 made in `folder`."""
    vit = untrained_run(folder / "vit_s", vit_small(folder))
    figures = {}
    with served(run, note) as port:
        note("serve_throughput: the run itself, 8 requests in flight against the in-process model")
        figures["serve_throughput"] = _throughput(
            run, port, scene(192, 256), target=0.92, rounds=rounds, seconds=seconds
        )
    with served(vit, note) as port:
        note("serve_throughput_vit_s, serve_latency: ViT-S/16 at 384x384, N 10, K 5")
        image = scene(384, 384)
        figures["serve_throughput_vit_s"] = _throughput(vit, port, image, target=0.95, rounds=rounds, seconds=seconds)
        figures["serve_latency"] = _latency(vit, port, image, rounds, seconds)
    return figures


def vit_small(folder: Path) -> Config:
    """ViT-S/16 with random weights, default experts: N 10, K 5."""
    folder.mkdir(parents=True, exist_ok=True)
    name, weights = "vit_small_patch16_224", folder / "vit_small.safetensors"
    backbone = load_backbone(BackboneConfig(name=name), random_init_seed=0)
    tensors = {key.removeprefix("vit."): value for key, value in backbone.body.state_dict().items()}
    save_file(tensors, weights)
    return Config.model_validate({"backbone": {"name": name, "weights": str(weights)}, "data": {"image_size": 384}})


def untrained_run(run: Path, config: Config, classes: ClassTable = CLASSES) -> Path:
    """A run folder whose experts have learned nothing: enough where only time counts."""
    backbone = load_backbone(config.backbone)
    dilations = dilations_for(config.experts, config.data.image_size // backbone.stride)
    card = model_card(classes, backbone, dilations)
    model = AirMoE(config, feature_dim=backbone.dim, classes=len(classes.names), dilations=dilations)
    run.mkdir(parents=True, exist_ok=True)
    save_checkpoint(run / "checkpoint", model, card)
    return run


def _throughput(run: str | Path, port: int, image: bytes, *, target: float, rounds: int, seconds: float) -> Figure:
    segmenter = Segmenter.load(find_model(run).checkpoint)
    classes = segmenter.card.table

    def local(batch: int) -> int:
        prepared = [segmenter.prepare(decode(image, max_pixels=1 << 26).rgb) for _ in range(batch)]
        output = segmenter.run(prepared, range(batch))
        for logits, item in zip(output.logits_BChw, prepared, strict=True):
            index_png(mask_of(logits, item), classes)
        return batch

    local(1)
    best = max(_BATCHES, key=lambda batch: rate(lambda: local(batch), seconds / 4))
    with ThreadPoolExecutor(IN_FLIGHT) as pool:
        post_many(pool, port, image, 2 * IN_FLIGHT)
        pairs = by_turns(
            lambda: served_rate(pool, port, image, seconds), lambda: rate(lambda: local(best), seconds), rounds
        )
    served, alone = (statistics.median(side) for side in zip(*pairs, strict=True))
    detail = {"served_images_per_s": round(served, 2), "in_process_images_per_s": round(alone, 2), "best_batch": best}
    return ratio(pairs, target=target, better="higher", **detail)


def _latency(run: str | Path, port: int, image: bytes, rounds: int, seconds: float) -> Figure:
    segmenter = Segmenter.load(find_model(run).checkpoint)
    classes = segmenter.card.table

    def local() -> None:
        prepared = segmenter.prepare(decode(image, max_pixels=1 << 26).rgb)
        index_png(mask_of(segmenter.run([prepared], [0]).logits_BChw[0], prepared), classes)

    connection = http.client.HTTPConnection("127.0.0.1", port)
    local()
    pairs = by_turns(
        lambda: median_ms(lambda: post(connection, image), seconds), lambda: median_ms(local, seconds), rounds
    )
    served, alone = (statistics.median(side) for side in zip(*pairs, strict=True))
    return ratio(pairs, target=1.1, better="lower", served_ms=round(served, 1), in_process_ms=round(alone, 1))


def served_rate(
    pool: ThreadPoolExecutor, port: int, image: bytes, seconds: float, choose: Choice = lambda: {}
) -> float:
    """Images per second with a constant number in flight; `choose` draws the parameters of each."""
    until = time.perf_counter() + seconds
    started = time.perf_counter()

    def keep_posting() -> int:
        connection, count = http.client.HTTPConnection("127.0.0.1", port), 0
        while time.perf_counter() < until:
            post(connection, image, **choose())
            count += 1
        return count

    done = sum(pool.map(lambda _: keep_posting(), range(IN_FLIGHT)))
    return done / (time.perf_counter() - started)


def post_many(pool: ThreadPoolExecutor, port: int, image: bytes, count: int) -> None:
    """Warm up: so many images at once."""
    list(pool.map(lambda _: post(http.client.HTTPConnection("127.0.0.1", port), image), range(count)))


def post(connection: http.client.HTTPConnection, image: bytes, **parameters: object) -> dict[str, float]:
    """One image, answered by a PNG; the server's own timings by hop [ms]."""
    response = ask(connection, image, "image/png", **parameters)
    entries = [entry.strip().partition(";dur=") for entry in response.headers["Server-Timing"].split(",")]
    return {name: float(milliseconds) for name, _, milliseconds in entries}


def ask(
    connection: http.client.HTTPConnection, image: bytes, accept: str, **parameters: object
) -> http.client.HTTPResponse:
    """One image, answered in whichever form; the answer has been read."""
    headers = {"Content-Type": "application/octet-stream", "Accept": accept}
    connection.request("POST", f"/segment?{urlencode(parameters)}", image, headers)
    response = connection.getresponse()
    body = response.read()
    if response.status != 200:
        raise RuntimeError(f"the server answered {response.status}: {body[:200]!r}")
    return response


def scene(height: int, width: int) -> bytes:
    """A picture as a PNG file."""
    buffer = io.BytesIO()
    Image.fromarray(render_scene(990_000, height=height, width=width).image).save(buffer, format="PNG")
    return buffer.getvalue()


@contextmanager
def served(
    run: str | Path,
    note: Note,
    module: str | None = None,
    *,
    python: Path = Path(sys.executable),
) -> Iterator[int]:
    """A server of its own process for the duration of the block; the port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = (
        [str(python), "-m", module, str(run), str(port)]
        if module
        else [sys.executable, "-m", "api.cli.main", "serve", "--run", str(run), "--port", str(port)]
    )
    note(f"starting a server of {Path(run).name}")
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        _await_ready(process, port)
        yield port
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()


def _await_ready(process: "subprocess.Popen[str]", port: int) -> None:
    until = time.monotonic() + 180
    while time.monotonic() < until:
        if process.poll() is not None:
            raise RuntimeError(f"the server ended: {(process.stderr.read() if process.stderr else '')[-500:]}")
        try:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
            connection.request("GET", "/readyz")
            if connection.getresponse().status == 200:
                return
        except OSError:
            pass
        time.sleep(0.5)
    raise RuntimeError("the server did not become ready within 180 s")
