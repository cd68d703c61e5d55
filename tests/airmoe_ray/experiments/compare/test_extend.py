"""The examples of docs/extend.md, run as they stand there."""

import re
import sys
from pathlib import Path

import pytest

from airmoe_ray.baselines.registry import find_methods
from airmoe_ray.errors import CheckpointError, UserError
from airmoe_ray.experiments.compare.plan import make_plan
from airmoe_ray.experiments.compare.run_cell import run_cell
from airmoe_ray.inference.segmenter import Segmenter
from tests.airmoe_ray.training.tiny_runs import airmoe, tiny_config

PAGE = Path(__file__).parents[4] / "docs" / "extend.md"
MOST_LINES = 40


@pytest.fixture
def written(tmp_path, monkeypatch) -> Path:
    """The page's files in a working folder."""
    blocks = re.findall(r"```python\n# (\w+\.py)\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert [name for name, _ in blocks] == ["my_rule.py", "my_net.py"]
    for name, code in blocks:
        assert len(code.splitlines()) <= MOST_LINES, name
        (tmp_path / name).write_text(code)
        monkeypatch.delitem(sys.modules, name.removesuffix(".py"), raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    return tmp_path


def test_the_page_s_rule_and_network_run_beside_airmoe_and_are_scored(written):
    config = tiny_config(written, **{"train.epochs": 1, "data.train_count": 11})  # 11: a last batch of one image
    plan = make_plan(config, find_methods("my_rule:NearestCentre,my_net:TinyNet"), seeds=1)
    rule, network = (run_cell(cell, written / "out", draws=2) for cell in plan.cells)
    assert rule.scores.keys() == {"ideal", "air"}
    assert network.scores.keys() == {"ideal"}
    assert rule.size["active"] < rule.size["trained"]  # K of N experts
    assert network.size["trained"] == network.size["active"] > 0
    assert not network.scores["ideal"]["communication"]["air_channel_uses"]
    # a gate at the cloud: a fade bit per client, and c_j of the routed
    bits = rule.scores["ideal"]["communication"]
    assert bits["uplink_routing_bits"] == config.experts.count
    assert bits["uplink_report_bits"] == 32 * config.routing.top_k

    folders = [cell.folder(written / "out") for cell in plan.cells]
    kept = Segmenter.load(folders[0] / "checkpoint")
    assert kept.model.gate is not None
    assert type(kept.model.gate).__name__ == "NearestCentre"
    with pytest.raises(CheckpointError, match="single model, my_net:TinyNet, without clients"):
        Segmenter.load(folders[1] / "checkpoint")
    again = airmoe("eval", "--run", folders[1], "--json", cwd=written)
    assert again.code == 0, again.err
    assert f'"miou": {network.scores["ideal"]["miou"]}' in again.out


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("my_rule:Nearest", "no such class"),
        ("nowhere:X", "cannot import nowhere"),
        ("pathlib:Path", "expected a Gate, a torch module from images to logits, or a Method"),
        ("airmo", "unknown method; did you mean airmoe?"),
        ("vit-aspp+head", "leave [+]head away"),
        (",", "no method is named"),
    ],
)
def test_a_name_that_is_no_method_is_told_in_a_line(written, name, message):
    with pytest.raises(UserError, match=message):
        find_methods(name)
