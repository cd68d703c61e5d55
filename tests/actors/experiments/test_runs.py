"""Comparisons and sweeps by the command line, on a Ray of their own."""

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.airmoe_ray.training.tiny_runs import AIRMOE, TINY
from tests.api.support import wait_for

BROKEN = """
from torch import nn


class Broken(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.layer = nn.Conv2d(3, classes, 1)

    def forward(self, images):
        return self.layer(images) * float("nan")
"""
_TINY = {key: value for key, value in TINY.items() if key != "train.engine"}


def command(*arguments: object, **more: object) -> list[str]:
    settings = [part for key, value in (_TINY | more).items() for part in ("--set", f"{key}={value}")]
    return [str(AIRMOE), *map(str, arguments), *settings]


def test_a_killed_comparison_goes_on_and_one_failure_does_not_stop_the_others(tmp_path):
    (tmp_path / "mine.py").write_text(BROKEN)
    asked = command("compare", "--methods", "mine:Broken,airmoe", "--parallel", 1, "--json", **{"train.epochs": 30})
    process = subprocess.Popen(asked, cwd=tmp_path, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    log = wait_for(
        lambda: [p for p in tmp_path.glob("runs/*/runs/airmoe*/metrics.jsonl") if p.stat().st_size], timeout_s=120
    )
    assert log, "a run has begun"
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert wait_for(lambda: not _growing(log[0]), timeout_s=60), "its run has ended with it"
    epochs = len(log[0].read_text().splitlines())
    assert epochs < 30
    told = subprocess.run(asked, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=300)
    assert told.returncode == 1, told.stderr
    found = json.loads(told.stdout)
    assert [row["method"] for row in found["rows"]] == ["airmoe", "airmoe"]
    assert "the loss is not finite" in found["failed"]["mine:Broken, seed 0"]
    rows = [json.loads(line)["epoch"] for line in log[0].read_text().splitlines()]
    assert rows == list(range(1, 31))


def _growing(path: Path) -> bool:
    before = path.stat().st_size
    os.sync()
    return wait_for(lambda: path.stat().st_size != before, timeout_s=3)


@pytest.mark.slow
def test_a_sweep_on_tune_writes_its_page_and_is_not_made_again(tmp_path):
    asked = command("ablate", "--seeds", 2, "--json", **{"train.epochs": 1, "train.lambda_frl": "0.0,0.1"})
    told = subprocess.run(asked, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=600)
    assert told.returncode == 0, told.stderr
    first, second = json.loads(told.stdout)["sweeps"]["train.lambda_frl"]
    assert first["value"] == 0.0
    assert second["figures"]["prototype_norm"]["mean"] < first["figures"]["prototype_norm"]["mean"]
    assert "the paper's Table VII" in (tmp_path / "runs" / "ablate-quickstart" / "sweeps.md").read_text()
    again = subprocess.run(asked, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120)
    assert "0 are to be made" in again.stderr
