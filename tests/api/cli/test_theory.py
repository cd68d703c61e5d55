"""`airmoe theory` through the real command line: its figures, its files, and mistakes as one line."""

import json
import sys
from pathlib import Path

import pytest

from api.cli.main import run


@pytest.fixture
def airmoe(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Run a command in this process: exit code, stdout, stderr."""

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["airmoe", "theory", *arguments])
        with pytest.raises(SystemExit) as ended:
            run()
        captured = capsys.readouterr()
        return int(ended.value.code or 0), captured.out, captured.err

    return call


QUICK = ("--set", "theory.seeds=2", "--set", "theory.steps=200", "--set", "theory.images=2", "--set", "train.threads=1")


def test_figures_files_and_the_constants_of_a_run(airmoe, run_folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "new" / "theory"
    code, told, _ = airmoe("--json", "--out", str(out), "--run", str(run_folder), "--set", "theory.eps=1e-6", *QUICK)
    figures = json.loads(told)
    assert code == 0
    assert figures["floor_slope_formula"]["value"] == pytest.approx(-2, abs=1e-6)
    assert figures["floor_slope_measured"]["value"] == pytest.approx(-2, abs=0.2)
    assert figures["gradient_noise_slope_measured"]["value"] == pytest.approx(-1, abs=0.1)
    assert figures["noise_variance_ratio"]["value"] == pytest.approx(1, abs=0.03)
    assert all({"value", "unit"} <= figure.keys() for figure in figures.values())
    # below the floor: no number, and the reason
    assert figures["iterations_noiseless"]["value"] is None
    assert "not certified by the bound" in figures["iterations_noiseless"]["reason"]
    assert figures["iterations_smoothed"]["value"] > 0
    # the run: what holds at its logits is within what holds everywhere, which is that of a mean over cells
    for name in ("run_loss_smoothness", "run_loss_hessian"):
        assert 0 < figures[name]["value"] <= figures[name]["everywhere"]
    everywhere = figures["run_loss_smoothness"]["everywhere"]
    assert everywhere == pytest.approx(figures["run_smoothness_of_mean"]["value"], rel=1e-4)
    assert figures["run_jacobian"]["value"] > 0
    ratio = figures["run_floor_over_gradient"]
    assert ratio["says"].startswith("vacuous" if ratio["value"] >= 1 else "not vacuous")
    assert (figures["run_iterations"]["value"] is None) == (ratio["value"] >= 1)
    assert {path.name for path in out.iterdir()} == {"theory.png", "panels.json", "panels.csv", "figures.json"}
    assert json.loads((out / "figures.json").read_text()) == figures
    assert [panel["key"] for panel in json.loads((out / "panels.json").read_text())] == list("abcdef")


def test_a_missed_target_is_exit_code_1_and_shown_in_the_table(airmoe) -> None:
    code, told, _ = airmoe("--set", "theory.seeds=2", "--set", "theory.steps=10")
    assert code == 1
    assert "floor_slope_measured" in told
    assert "missed" in told
    assert "add --out DIR" in told


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--run", "nowhere"), "nowhere"),
        (("--out", "file/below"), "--out file/below: cannot write here"),
        (("--set", "theory.eps=-1"), "theory.eps = -1"),
        (("--set", "theory.epz=1"), "did you mean theory.eps?"),
        (("--set", "channel.snr=1"), "did you mean channel.snr_db?"),
        (("--set", "channel.kind=ideal"), "set channel.kind=air"),
        (("--config", "nothing"), "no such file"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(
    airmoe, arguments: tuple[str, ...], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("not a folder")
    code, told, error = airmoe(*arguments)
    assert (code, told) == (2, "")
    assert says in error
    assert error.count("\n") == 1


def test_a_missing_matplotlib_is_noticed_before_the_work(airmoe, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, _, error = airmoe("--out", str(tmp_path / "out"))
    assert code == 2
    assert "airmoe-ray[experiments]" in error
    assert not (tmp_path / "out").exists()
