"""A comparison from plan to table: what it takes as done, what it refuses, and what it writes."""

import csv
import importlib
import json
import linecache
import os
import shutil
import sys
from dataclasses import replace

import pytest

from airmoe_ray.baselines.registry import find_methods
from airmoe_ray.config import Config
from airmoe_ray.errors import UserError
from airmoe_ray.experiments.compare.outputs import write_outputs
from airmoe_ray.experiments.compare.plan import begin_comparison, make_plan, usable
from airmoe_ray.experiments.compare.records import own_sources, read_records, settings_hash, write_record
from airmoe_ray.experiments.compare.run_cell import run_cell
from airmoe_ray.experiments.paper_figures import MAIN, SWEEPS
from tests.airmoe_ray.training.tiny_runs import airmoe, tiny, tiny_config


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Two methods, two seeds, an epoch each."""
    folder = tmp_path_factory.mktemp("compared")
    config = tiny_config(folder, **{"train.epochs": 1})
    begin_comparison(folder / "out", config, "quickstart")
    plan = make_plan(config, find_methods("airmoe,vit-aspp"), seeds=2)
    for cell in plan.cells:
        run_cell(cell, folder / "out", draws=2)
    return folder, config, plan


def test_the_hash_knows_results_from_places_and_machines(tmp_path):
    base = tiny_config(tmp_path)

    def other(**changes):
        return settings_hash(tiny_config(tmp_path, **changes))

    assert settings_hash(base) == other(
        **{"data.cache_dir": "elsewhere", "train.threads": 2, "seed": 3, "serve.queue": 5}
    )
    assert settings_hash(base) == other(**{"train.lambda_lb": Config().train.lambda_lb})
    assert settings_hash(base) != other(**{"train.lambda_lb": 0.5})
    assert settings_hash(base) != other(**{"routing.rule": "random"})


def test_tables_say_what_the_records_say(made):
    folder, _, plan = made
    done = read_records(folder / "out" / "records")
    assert set(done) == {cell.key for cell in plan.cells}
    rows = write_outputs(plan, done, folder / "out", title="two methods")
    assert [(row.method, row.channel) for row in rows] == [("airmoe", "ideal"), ("airmoe", "air"), ("vit-aspp", "none")]
    scores = [done[cell.key].scores["air"]["miou"] for cell in plan.cells if cell.method == "airmoe"]
    assert rows[1].scores["miou"].mean == pytest.approx(sum(scores) / 2)
    first = done[plan.cells[0].key]
    assert first.scores["air"]["draws"] == 2
    assert (first.counts("air")[:, 1] == 2 * first.counts("ideal")[:, 1]).all()  # every image has crossed twice
    assert (first.counts("air")[:, 0] % 2).any()  # and not the same way
    with (folder / "out" / "table.csv").open() as file:
        stored = list(csv.DictReader(file))
    assert float(stored[1]["miou"]) == pytest.approx(rows[1].scores["miou"].mean, abs=1e-3)
    with (folder / "out" / "paired.csv").open() as file:
        gaps = list(csv.DictReader(file))
    assert [(gap["reference"], gap["method"], gap["channel"]) for gap in gaps] == [
        ("airmoe", "vit-aspp", "ideal"),
        ("airmoe", "vit-aspp", "air"),
    ]
    expected = rows[2].scores["miou"].mean - rows[1].scores["miou"].mean
    assert float(gaps[1]["difference"]) == pytest.approx(expected, abs=1e-3)
    assert (folder / "out" / "curves.png").stat().st_size > 10_000
    assert "| AirMoE | air |" in (folder / "out" / "table.md").read_text()


def test_a_run_that_was_stopped_halfway_ends_like_one_that_was_not(made, tmp_path):
    folder, _, _ = made
    config = tiny_config(folder)  # two epochs
    (cell,) = make_plan(config, find_methods("linear-moe"), seeds=1).cells
    whole = run_cell(cell, tmp_path / "whole", draws=1)

    def stop(row):
        if row["epoch"] == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_cell(cell, tmp_path / "halves", draws=1, after_epoch=stop)
    assert not list((tmp_path / "halves").glob("records/*"))
    resumed = run_cell(cell, tmp_path / "halves", draws=1)
    assert resumed.per_image == whole.per_image


def test_finished_runs_are_not_made_again_and_tables_can_be_had_without_training(made, tmp_path):
    folder, _, _ = made
    shutil.copytree(folder / "out" / "records", tmp_path / "docs" / "results" / "tiny")
    settings = tiny(**{"train.epochs": 1, "data.cache_dir": folder / "cache"})
    told = airmoe(
        "compare", *settings, "--methods", "airmoe,vit-aspp", "--seeds", 2, "--draws", 2, "--json", cwd=tmp_path
    )
    assert told.code == 0, told.err
    assert "4 runs of 2 methods; 4 are done already" in told.err
    assert len(json.loads(told.out)["rows"]) == 3
    empty = airmoe("compare", *settings, "--methods", "random", "--table-only", "--out", "other", cwd=tmp_path)
    assert (empty.code, empty.err.splitlines()[-1]) == (2, "airmoe: other: no run is done yet; leave --table-only away")


def test_a_record_of_other_images_classes_or_draws_does_not_stand_for_a_run(made):
    folder, _, plan = made
    done = read_records(folder / "out" / "records")
    assert usable(done, plan.cells, draws=2).keys() == done.keys()
    draws_matter = [key[0] for key in usable(done, plan.cells, draws=3)]
    assert set(draws_matter) == {"vit-aspp"}  # which crosses no channel
    first = plan.cells[0].key
    for name, value in (("images", 5), ("train_images", 1), ("classes", ["road"])):
        other = {**done, first: replace(done[first], data={**done[first].data, name: value})}
        assert usable(other, plan.cells, draws=2).keys() == done.keys() - {first}
    assert sum(done[first].sequences) == done[first].data["images"]


def test_of_two_records_of_a_run_the_one_made_last_counts_whatever_its_file_s_time(made, tmp_path):
    folder, _, plan = made
    record = read_records(folder / "out" / "records")[plan.cells[0].key]
    assert record.made
    late = write_record(tmp_path, replace(record, made="2030-01-01T00:00:00+00:00", commit="late"))
    early = write_record(tmp_path, replace(record, made="2020-01-01T00:00:00+00:00", commit="early"))
    os.utime(late, (0, 0))
    os.utime(early)
    assert read_records(tmp_path)[record.key].commit == "late"


def test_code_of_one_s_own_is_part_of_the_hash(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    hashes = []
    for number in (1, 2):
        (tmp_path / "hashed_rule.py").write_text(f"class Rule:\n    number = {number}{'0' * number}\n")
        sys.modules.pop("hashed_rule", None)
        importlib.invalidate_caches()
        linecache.clearcache()
        hashes.append(settings_hash(tiny_config(tmp_path, **{"routing.rule": "hashed_rule:Rule"})))
    assert hashes[0] != hashes[1]
    ours = tiny_config(tmp_path, **{"routing.rule": "airmoe_ray.baselines.linear_moe:LinearGate"})
    assert not own_sources(ours)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--methods", "airmoo"], "--methods airmoo: unknown method; did you mean airmoe?"),
        (["--seeds", "0"], "--seeds 0: expected 1 or more"),
        (["--seeds", "-2"], "--seeds -2: expected 1 or more"),
        (
            ["--set", "train.mode=federated", "--set", "train.engine=ray"],
            "train.mode = federated: runs of a comparison",
        ),
        (["--out", "full"], "full: holds something else than a comparison; choose another --out"),
        (["--out", "other"], "other: holds a comparison with other settings"),
    ],
)
def test_what_cannot_be_compared_is_told_in_a_line(tmp_path, arguments, message):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").touch()
    begin_comparison(tmp_path / "other", tiny_config(tmp_path, **{"train.lr": 0.5}), "mine")
    told = airmoe("compare", *tiny(), *arguments, cwd=tmp_path)
    assert told.code == 2
    assert message in told.err.splitlines()[-1]


def test_a_broken_record_and_a_run_of_other_settings_are_named(made, tmp_path):
    folder, _, plan = made
    (tmp_path / "records").mkdir()
    (tmp_path / "records" / "airmoe.seed0.x.y.json").write_text('{"format": 1')
    with pytest.raises(UserError, match="not a record of a comparison"):
        read_records(tmp_path / "records")
    cell = plan.cells[0]
    shutil.copytree(plan.cells[1].folder(folder / "out"), cell.folder(tmp_path))
    with pytest.raises(UserError, match="was begun with other settings"):
        run_cell(cell, tmp_path, draws=1)


def test_the_paper_s_figures_obey_what_means_over_classes_must():
    for rows in MAIN.values():
        for miou, mf1, mpre, mrec in rows.values():
            assert miou <= mf1 <= 100 * 2 * miou / (100 + miou)
            assert mpre is None or (miou <= min(mpre, mrec) and mf1 <= (mpre + mrec) / 2)
    defaults = zip(SWEEPS.values(), (10, 5, 16, 0.01, 1e-4), strict=True)
    assert len({sweep.rows[value] for sweep, value in defaults}) == 1
