"""Runs of seconds, by the command line and by call."""

import io
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import pytest

from airmoe_ray.config import Config
from airmoe_ray.config_file import load_config
from api.cli.main import run

AIRMOE = Path(sys.executable).parent / "airmoe"
TINY = {
    "data.image_size": 64,
    "data.train_count": 20,
    "data.val_count": 10,
    "experts.count": 5,
    "experts.hidden": 16,
    "experts.width": 16,
    "train.epochs": 2,
    "train.batch_size": 5,
    "train.engine": "local",
}


@dataclass
class Outcome:
    """What a command line left behind."""

    code: int
    out: str
    err: str


def airmoe(*arguments: object, cwd: Path) -> Outcome:
    """The entry point of the console script, in this process: starting Python and torch anew takes seconds."""
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.chdir(cwd)
        patch.setattr(sys, "argv", ["airmoe", *map(str, arguments)])
        try:
            run()
        except SystemExit as stop:
            code = stop.code
    return Outcome(int(code or 0), out.getvalue(), err.getvalue())


def tiny(**more: object) -> list[str]:
    return [part for key, value in (TINY | more).items() for part in ("--set", f"{key}={value}")]


def tiny_config(tmp_path: Path, **more: object) -> Config:
    settings = TINY | {"data.cache_dir": tmp_path / "cache"} | more
    return load_config("quickstart", [f"{key}={value}" for key, value in settings.items()])
