"""Which runs a sweep asks for, and what its page says of them."""

import numpy as np
import pytest

from airmoe_ray.config_file import load_config
from airmoe_ray.errors import UserError
from airmoe_ray.experiments.ablate.plot import draw_sweeps
from airmoe_ray.experiments.ablate.sweeps import paper_sweeps, parse_sweeps, split_overrides
from airmoe_ray.experiments.ablate.table import as_csv, as_markdown, points_of, verdict
from airmoe_ray.experiments.ablate.words import about_model, remarks_of
from airmoe_ray.experiments.compare.channels import AIR, scored_channels
from airmoe_ray.experiments.compare.records import Record, pack

BASE = load_config("camvid-short")


def record(seed: int, right: float, *, norm: float = 1.0) -> Record:
    """Forty images of three classes; each pixel is right with some probability."""
    rng = np.random.default_rng(seed)
    hit_SC = rng.binomial(300, right, size=(40, 3))
    missed_SC = 300 - hit_SC
    predicted_SC = hit_SC + (missed_SC[:, [1, 2, 0]] + missed_SC[:, [2, 0, 1]]) // 2
    packed = pack(np.stack([hit_SC, np.full_like(hit_SC, 300), predicted_SC], axis=1))
    scores = {"air": {"routing": {"balancedness": 0.9, "least_load": 0.5}}}
    return Record(
        "airmoe",
        seed,
        "x",
        "c",
        "AirMoE",
        "AirMoE",
        {},
        [],
        {"name": "camvid", "images": 40},
        {},
        {},
        [],
        scores,
        {"air": packed},
        {},
        {"norm": norm},
    )


def test_settings_of_several_values_are_told_from_lists():
    overrides = ["data.views=[identity,hflip]", "routing.eps=0.02,0.05", "seed=3", "data.hold_out=[a,b]"]
    assert split_overrides(overrides) == ([overrides[0], "seed=3", overrides[3]], ["routing.eps=0.02,0.05"])


def test_a_sweep_has_a_run_for_each_value_and_seed_and_changes_nothing_else():
    (sweep,) = parse_sweeps(BASE, "none", ["routing.eps=0.02,0.05"])
    cells = sweep.cells(BASE, seeds=2)
    assert [(value, cell.config.routing.eps, cell.config.seed) for value, cell in cells] == [
        (0.02, 0.02, 0),
        (0.05, 0.05, 0),
        (0.02, 0.02, 1),
        (0.05, 0.05, 1),
    ]
    assert cells[1][1].config == BASE  # the default is the configuration itself
    assert len({cell.key for _, cell in cells}) == 4


def test_k_is_swept_in_training_as_well():
    cells = paper_sweeps(BASE)["K"].cells(BASE, seeds=1)
    assert [cell.config.train.routing(cell.config.routing).top_k for _, cell in cells] == [3, 4, 5, 6]


def test_a_list_of_a_papers_setting_is_the_papers_sweep_with_these_values():
    (swept,) = parse_sweeps(BASE, "none", ["routing.top_k=3,5"])
    assert swept.values == [3, 5]
    assert (swept.also, swept.if_flat, swept.moves) == (
        paper_sweeps(BASE)["K"].also,
        paper_sweeps(BASE)["K"].if_flat,
        ("nmse_db",),
    )
    assert [cell.config.train.routing(cell.config.routing).top_k for _, cell in swept.cells(BASE, seeds=1)] == [3, 5]


def test_values_are_those_of_the_configuration_however_they_are_written():
    (swept,) = parse_sweeps(BASE, "none", ["train.lambda_frl=1e-4,8e-4"])  # YAML takes both for text
    assert swept.values == [1e-4, 8e-4]
    assert all(value in swept.paper.rows for value in swept.values)


def test_a_sweep_of_the_channel_is_scored_on_each_value_s_own():
    (swept,) = parse_sweeps(BASE, "none", ["channel.snr_db=0,20"])
    channels = [scored_channels(cell.config.channel, crosses=True) for _, cell in swept.cells(BASE, seeds=1)]
    assert [list(found) for found in channels] == [["ideal", "air", "own"], ["ideal", "air"]]
    assert channels[0]["own"].snr_db == 0
    assert channels[1]["air"] == AIR
    assert list(scored_channels(swept.cells(BASE, seeds=1)[0][1].config.channel, crosses=False)) == ["ideal"]
    assert "each value is trained and scored on its own channel" in about_model(BASE, [swept])[1]


@pytest.mark.parametrize(
    ("names", "message"), [("k", "--sweep k: expected all, none, or some of N, K"), ("none", "nothing to sweep")]
)
def test_a_sweep_that_is_none_is_told(names, message):
    with pytest.raises(UserError, match=message):
        parse_sweeps(BASE, names, [])


def test_a_page_says_flat_and_why_or_what_differs(tmp_path):
    sweep = paper_sweeps(BASE)["lambda_frl"]
    flat = points_of(
        sweep, {0.0: [record(s, 0.7, norm=3.0) for s in range(3)], 1e-4: [record(s + 9, 0.7) for s in range(3)]}
    )
    assert flat[1].against_first is None  # other seeds: nothing is paired
    same = {0.0: [record(s, 0.7) for s in range(3)], 1e-4: [record(s, 0.7, norm=0.5) for s in range(3)]}
    points = points_of(sweep, same)
    assert verdict(sweep, points).startswith("Flat: no value is shown to differ from 0.0")
    assert "L_FRL has no gradient by the experts" in verdict(sweep, points)
    better = points_of(sweep, {0.0: [record(s, 0.70) for s in range(3)], 1e-4: [record(s, 0.75) for s in range(3)]})
    assert verdict(sweep, better).startswith("train.lambda_frl = 0.0001 differs from 0.0 by +")
    remarks = remarks_of([(sweep, sweep.cells(BASE, seeds=1))], train_images=509)
    page = as_markdown([(sweep, points)], title="one", about=about_model(BASE, [sweep]), remarks=remarks)
    assert "Swept: AirMoE, cloud's head (with a head at the cloud" in page
    assert "Scored on 20 dB air with Rayleigh fading." in page
    assert "0 % at 0, 0.51 % at 0.0001" in page  # 8 epochs of 32 steps: 1 - (1 - 2e-5)^256
    assert "| 0.0001 |" in page
    assert "44.74 / 55.99 / 68.30 / 53.47" in page
    assert "train.lambda_frl,0.0001,prototype_norm,0.5," in as_csv([(sweep, points)])
    draw_sweeps([(sweep, points)], tmp_path / "sweeps.png")
    assert (tmp_path / "sweeps.png").stat().st_size > 5000
