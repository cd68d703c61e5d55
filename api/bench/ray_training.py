"""Ray Train against this process, by turns of seconds: one trains while the other is stopped.

Ray Train takes half a minute to start, and in that time a shared machine changes its speed by more than what is to be
measured. So one run stays throughout, and its processes are held while it is not their turn.
"""

import json
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from actors.training.ray_train import train_on_ray
from airmoe_ray.config import Config
from airmoe_ray.runtime.progress import Silent
from airmoe_ray.training.run import open_run, train_epoch
from api.bench.figures import by_turns

_TURN = 4  # epochs; on Ray the first one, which the pause is in, does not count
_POLL_S = 0.1


def turns_with_ray(config: Config, folder: Path, rounds: int) -> list[tuple[float, float]]:
    """Images per second of one worker on Ray Train, and of this process, in every round."""
    here = replace(open_run(config, folder / "here", resume=False, report=Silent()), validation=None)

    def local_rate() -> float:
        return _rate([train_epoch(here, 0, Silent()) for _ in range(1, _TURN)])

    on_ray = HeldRun(config, folder / "ray", turns=rounds)
    try:
        on_ray.rate()  # Ray is still busy with starting
        pairs = by_turns(on_ray.rate, local_rate, rounds)
    finally:
        on_ray.go_on()
    on_ray.thread.join()
    return pairs


class HeldRun:
    """A run on Ray Train, with one worker, that gets on only during its turns."""

    def __init__(self, config: Config, folder: Path, *, turns: int) -> None:
        train = config.train.model_copy(update={"epochs": (turns + 1) * _TURN})
        self.config, self.folder = config.model_copy(update={"train": train}), folder
        self.others = {process.pid for process in _ray_processes()}
        self.held: list[psutil.Process] = []
        self.thread = threading.Thread(target=self._train, daemon=True)
        self.thread.start()

    def rate(self) -> float:
        """Images per second of one turn."""
        end = len(self._rows()) + _TURN
        self.go_on()
        while len(rows := self._rows()) < end:
            if not self.thread.is_alive():
                raise RuntimeError("training on Ray ended early")
            time.sleep(_POLL_S)
        self.held = [process for process in _ray_processes() if process.pid not in self.others]
        for process in self.held:
            process.suspend()
        return _rate(rows[end - _TURN + 1 : end])

    def go_on(self) -> None:
        """Its turn, or its end."""
        for process in self.held:
            process.resume()
        self.held = []

    def _train(self) -> None:
        train_on_ray(self.config, self.folder, workers=1, resume=False, report=Silent())

    def _rows(self) -> list[dict[str, Any]]:
        metrics = self.folder / "metrics.jsonl"
        lines = metrics.read_text().splitlines(keepends=True) if metrics.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]


def _rate(rows: Sequence[dict[str, Any]]) -> float:
    """Images per second over several epochs."""
    images = sum(row["images_per_s"] * row["seconds"] for row in rows)
    return float(images / sum(row["seconds"] for row in rows))


def _ray_processes() -> list[psutil.Process]:
    """Ray's workers, that this process has started: not its raylet, which must go on counting heartbeats."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            if process.cmdline()[:1] and process.cmdline()[0].startswith("ray::"):
                found.append(process)
        except psutil.Error:
            continue
    return found
