"""`airmoe cache` on real folders: one complete, one half built, one of another version, and what is not ours."""

import json
import os
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from airmoe_ray.errors import UserError
from airmoe_ray.features.cache_folder import CHUNK, About, chunk_file, hold, write_about
from api.cli.main import app

COMPLETE, HALF, OLD = "0" * 16, "1" * 16, "2" * 16


@pytest.fixture
def root(tmp_path) -> Path:
    """40 images are two chunks; the half-built one has the first. Ages: now, ten days, sixty days."""
    root = tmp_path / "cache"
    about = About("camvid", "/data/[camvid]", CHUNK + 8, "hflip", 256, "embedded", "float16", 320, 8)
    for name, chunks in ((COMPLETE, (0, 1)), (HALF, (0,))):
        hold(root / name).close()
        write_about(root / name, about)
        for chunk in chunks:
            chunk_file(root / name, chunk).write_bytes(bytes(1_000_000))
    (root / OLD).mkdir()
    (root / OLD / "meta.json").write_text("{}")
    (root / "notes").mkdir()
    (root / "file").write_text("mine")
    for path, days in ((root / HALF / "lock", 10), (root / OLD, 60)):
        os.utime(path, (time.time() - 86400 * days,) * 2)
    return root


def airmoe(root: Path, *arguments: str, answer: str = ""):
    return CliRunner().invoke(app, ["cache", "--set", f"data.cache_dir={root}", *arguments], input=answer)


def names(root: Path) -> set[str]:
    return {path.name for path in root.iterdir()}


def test_it_lists_what_is_there_and_nothing_else(root):
    rows = json.loads(airmoe(root, "--json").stdout)
    assert [Path(row["folder"]).name for row in rows] == [COMPLETE, HALF, OLD]
    assert [row["state"] for row in rows] == ["complete", "partial", "unknown"]
    assert [row["images_done"] for row in rows] == [CHUNK + 8, CHUNK, 0]
    assert rows[0]["view"] == "hflip"
    assert rows[0]["bytes"] // 1000 == 2000
    table = airmoe(root).stdout
    assert "/data/[camvid]" in table
    assert "32 of 40" in table
    assert "3 in" in table


def test_a_cache_in_use_is_shown_and_stays(root):
    with hold(root / COMPLETE):
        assert json.loads(airmoe(root, "--json").stdout)[0]["in_use"]
        outcome = json.loads(airmoe(root, "--prune", "--all", "--yes", "--json").stdout)
    assert [Path(row["folder"]).name for row in outcome["in_use"]] == [COMPLETE]
    assert names(root) == {COMPLETE, "notes", "file"}


@pytest.mark.parametrize(
    ("options", "left"),
    [
        (["--all"], set()),
        (["--partial"], {COMPLETE}),
        (["--older-than", "30d"], {COMPLETE, HALF}),
        (["--older-than", "1w"], {COMPLETE}),
        (["--older-than", "5w", "--partial"], {COMPLETE, HALF}),
    ],
)
def test_prune_removes_what_was_chosen(root, options, left):
    assert airmoe(root, "--prune", "--yes", *options).exit_code == 0
    assert names(root) == left | {"notes", "file"}


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--prune"], "--prune wants either"),
        (["--prune", "--all", "--partial"], "--prune wants either"),
        (["--all"], "add --prune"),
        (["--prune", "--older-than", "soon"], "--older-than soon: expected a number"),
        (["--prune", "--all"], "add --yes"),
    ],
)
def test_nothing_is_removed_on_a_mistake_or_unasked(root, options, told):
    result = airmoe(root, *options, answer="y\n")
    assert isinstance(result.exception, UserError)
    assert told in str(result.exception)
    assert names(root) == {COMPLETE, HALF, OLD, "notes", "file"}


def test_an_empty_place_is_no_mistake(tmp_path):
    assert "no cached features" in airmoe(tmp_path / "nowhere").stdout
    assert airmoe(tmp_path / "nowhere", "--prune", "--all").exit_code == 0
