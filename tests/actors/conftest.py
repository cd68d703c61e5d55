"""A Ray of our own per test module, a tiny served system on it, and experts that misbehave on command."""

import asyncio
import hashlib
import os
import signal
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import torch
from ray.actor import ActorClass

from actors.cluster.connection import cluster
from actors.processes.expert_host import ExpertHost, host_actor
from actors.processes.frl_journal import parse_snapshot
from actors.rounds.messages import Array, Forward, HostReport, HostStatistic, Read, Renew, Settings, Transmit
from actors.rounds.stubs import HostCalls
from actors.serving.host_records import HostRecord
from actors.serving.orchestrator import Orchestrator
from actors.serving.results import ImageResult
from actors.serving.status import ExpertStatus
from actors.serving.supervisor import Supervisor
from actors.serving.system import System
from airmoe_ray.config import Config
from airmoe_ray.features.backbone import load_backbone
from airmoe_ray.features.preprocess import to_tensor
from airmoe_ray.inference.masks import Prepared
from airmoe_ray.inference.segmenter import Segmenter
from airmoe_ray.model.moe import AirMoE, collaborate
from airmoe_ray.model.routing import EVERYBODY
from airmoe_ray.storage.checkpoint import ModelCard, save_checkpoint

TINY: dict[str, Any] = {
    "data": {"image_size": 64},
    "experts": {"count": 4, "hidden": 16, "width": 16},
    "frl": {"dim": 8, "prototypes": 3, "eta": 0.3},
    "routing": {"top_k": 2},
    "train": {"threads": 1},
    "cluster": {"cloud_threads": 1, "probe_every_s": 0.2},
}
CLASSES = 3


def tiny(**blocks: dict[str, Any]) -> Config:
    """Configuration of four tiny experts behind the embedded backbone; each keyword is a block that differs."""
    return Config.model_validate(TINY | {name: TINY.get(name, {}) | block for name, block in blocks.items()})


def write_checkpoint(folder: Path, config: Config) -> Path:
    """An untrained checkpoint; weights follow from the seed."""
    backbone = load_backbone(config.backbone)
    names = [f"class {c}" for c in range(CLASSES)]
    card = ModelCard(
        names, [[c, c, c] for c in range(CLASSES)], backbone.dim, [1, 2, 3], backbone.name, backbone.fingerprint
    )
    save_checkpoint(folder, AirMoE(config, feature_dim=backbone.dim, classes=CLASSES, dilations=(1, 2, 3)), card)
    return folder


def picture(seed: int, size: tuple[int, int] = (64, 64)) -> Prepared:
    """A random image that needs no padding."""
    pixels = np.random.default_rng(seed).integers(0, 256, (*size, 3), dtype=np.uint8)
    return Prepared(pixels, size, size)


def faulty_actor(folder: Path) -> ActorClass[ExpertHost]:
    """Experts that look into `folder` before they act: `<exchange>-<client>` there names what goes wrong.

    `die`, `stop` and `delay` (once each), `hang`, `fail`, `nan`. Defined in here so that it travels to the workers by
    value.
    """

    class Faulty(ExpertHost):
        def __init__(self, spec: Any, files: Any) -> None:
            self.spec = spec
            self._misbehave("start")
            super().__init__(spec, files)

        def _misbehave(self, exchange: str) -> float:
            """A factor for what is sent: 1, or NaN."""
            for client in self.spec.clients:
                order = folder / f"{exchange}-{client}"
                what = order.read_text() if order.exists() else ""
                if what in ("die", "stop"):
                    order.unlink()
                    os.kill(os.getpid(), signal.SIGKILL if what == "die" else signal.SIGSTOP)
                if what == "delay":
                    order.unlink()
                    time.sleep(1.5)
                while what == "hang" and order.exists():
                    time.sleep(0.05)
                if what == "fail":
                    raise RuntimeError("as ordered")
                if what == "nan":
                    return float("nan")
            return 1.0

        def read(self, message: Read) -> HostStatistic:
            self._misbehave("read")
            return super().read(message)

        def forward(self, message: Forward, features_BDhw: Array) -> HostReport:
            features = (features_BDhw * self._misbehave("forward")).astype(features_BDhw.dtype)
            return super().forward(message, features)

        def transmit(self, message: Transmit) -> Array:
            return super().transmit(message) * self._misbehave("transmit")

        def renew(self, message: Renew) -> Any:
            self._misbehave("renew")
            return super().renew(message)

        @ray.method(concurrency_group="experts")  # as the one that it stands for
        def probe(self) -> Any:
            self._misbehave("probe")
            return super().probe()

        def visible_gpus(self) -> str:
            return os.environ.get("CUDA_VISIBLE_DEVICES", "")

    return host_actor(Faulty)


class Service:
    """A whole system with its event loop in a thread, so that tests are plain functions."""

    def __init__(self, checkpoint: Path, config: Config, faults: Path) -> None:
        self.config, self.faults = config, faults
        faults.mkdir(exist_ok=True)
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        self.system = System(checkpoint, config, expert_actor=faulty_actor(faults))
        begun = time.monotonic()
        self.hosts = self.system.start()
        self.started_s = time.monotonic() - begun
        self.batches: list[int] = []
        self.calls: list[int] = []  # between actors, of each batch
        self.run(self._enter())
        self.reference = Segmenter.load(checkpoint, config)

    async def _enter(self) -> None:
        self.supervisor = Supervisor(self.system, self.hosts)
        self.orchestrator = Orchestrator(self.system, self.supervisor, on_batch=self._count)
        await self.orchestrator.__aenter__()

    def _count(self, size: int, calls: int) -> None:
        self.batches.append(size)
        self.calls.append(calls)

    def run(self, work: Coroutine[Any, Any, Any], within_s: float = 120) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(within_s)

    def settings(self, *, renew: bool = False, top_k: int = 2, whose: Any = EVERYBODY, **channel: Any) -> Settings:
        routing = self.config.routing.model_copy(update={"top_k": top_k})
        return Settings(routing, self.config.channel.model_copy(update=channel), renew, whose)

    async def ask(
        self, seed: int, *, deadline_s: float | None = None, size: tuple[int, int] = (64, 64), **kw: Any
    ) -> ImageResult:
        settings = self.settings(**kw)
        image = picture(seed, size)
        return await self.orchestrator.segment(image, id=seed, settings=settings, deadline_s=deadline_s)

    def segment(self, seed: int, **kw: Any) -> ImageResult:
        """One request."""
        return self.run(self.ask(seed, **kw))

    def segment_many(self, seeds: Any, **kw: Any) -> list[Any]:
        """Requests all at once; errors come back as values."""

        async def all_at_once() -> list[Any]:
            return await asyncio.gather(*(self.ask(seed, **kw) for seed in seeds), return_exceptions=True)

        return self.run(all_at_once())

    def expected(self, seed: int, size: tuple[int, int] = (64, 64), *, clients: Any = None, **channel: Any) -> Any:
        """What the in-process model answers, with its own clients or others."""
        model, image = self.reference.model, picture(seed, size)
        with torch.inference_mode():
            features = self.reference.backbone(to_tensor([image.padded]))
            return collaborate(
                model.query(features),
                features,
                [seed],
                clients or model.clients,
                routing_config=self.config.routing,
                channel=self.settings(**channel).channel,
                seed=self.config.seed,
                shared=model.shared,
            )

    def agrees(self, answer: ImageResult, expected: Any) -> bool:
        """Whether an answer is the expected one, to rounding in float32."""
        logits = expected.logits_BChw[0].numpy()
        return bool(np.abs(answer.logits_Chw - logits).max() <= 1e-4 * np.abs(logits).max())

    @property
    def records(self) -> list[HostRecord]:
        """Of every host."""
        return list(self.supervisor.hosts.records.values())

    def owner(self, client: int) -> HostCalls:
        """The host that owns a client."""
        return next(r.host.calls for r in self.records if r.host.owner and client in r.host.clients)

    def fingerprint(self, client: int) -> bytes:
        """Of a client's checkpoint file."""
        return hashlib.blake2b(self.system.file_of(client), digest_size=16).digest()

    def memory(self, client: int) -> tuple[int, bytes, bytes]:
        """Version, prototypes and importance of the owner's FRL, as the bits they are."""
        content = self.owner(client).snapshots((client,)).get()[client]
        snapshot = parse_snapshot(content, self.fingerprint(client))
        assert snapshot is not None
        return snapshot.version, snapshot.prototypes_Md.tobytes(), snapshot.importance_M.tobytes()

    def status(self) -> list[ExpertStatus]:
        return self.supervisor.status()

    def order(self, exchange: str, client: int, what: str) -> Path:
        """Make a client misbehave at an exchange."""
        path = self.faults / f"{exchange}-{client}"
        path.write_text(what)
        return path

    def kill(self, *clients: int) -> None:
        """kill -9 of the actors of some clients."""
        for pid in [self.status()[client].pid for client in clients]:
            assert pid is not None
            os.kill(pid, signal.SIGKILL)

    def wait(self, condition: Callable[[], bool], within_s: float = 30) -> float:
        """Seconds until it holds; fails when it never does."""
        started = time.monotonic()
        while not condition():
            assert time.monotonic() - started < within_s, "waited in vain"
            time.sleep(0.05)
        return time.monotonic() - started

    def all_up(self) -> bool:
        return all(expert.state == "up" for expert in self.status())

    def close(self) -> None:
        for order in self.faults.iterdir():
            order.unlink()
        self.run(self.orchestrator.__aexit__())
        self.loop.call_soon_threadsafe(self.loop.stop)


@pytest.fixture(scope="module")
def own_ray() -> Iterator[None]:
    """One cluster for all tests of a module."""
    with cluster(cpus=2):
        yield


@pytest.fixture(scope="session")
def serve() -> Callable[..., Any]:
    """`with serve(folder, **blocks) as service`: a system of the tiny configuration on the connected cluster."""

    @contextmanager
    def start(folder: Path, **blocks: dict[str, Any]) -> Iterator[Service]:
        config = tiny(**blocks)
        service = Service(write_checkpoint(folder / "checkpoint", config), config, folder / "faults")
        yield service
        service.close()

    return start


@pytest.fixture(scope="session")
def make_system() -> Callable[..., System]:
    """A system of the tiny configuration with differences, not started yet."""

    def make(folder: Path, **blocks: dict[str, Any]) -> System:
        config = tiny(**blocks)
        return System(write_checkpoint(folder / "checkpoint", config), config, expert_actor=faulty_actor(folder))

    return make
