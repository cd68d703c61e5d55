"""`airmoe report` through the real command line, and its page in a real browser without a network."""

import json
import math
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, sync_playwright

from airmoe_ray.config_file import load_config
from airmoe_ray.experiments.compare.plan import begin_comparison
from airmoe_ray.experiments.compare.table import PAIRED, paired_csv
from api.cli.main import run

QUICK = ("--set", "data.val_count=6", "--set", "train.threads=1")
ROW = {"loss": 1.5, "ce": 1.4, "shared": 1.2, "miou": 20.0, "miou_ideal": 21.0, "images_per_s": 9.0, "seconds": 1.0}
ROW |= {"mf1": 30.0, "mf1_ideal": 31.0}
TABLE = """method,label,channel,seeds,interval_over,miou,miou_low,miou_high,miou_paper,mf1,parameters,active,uplink_bits
airmoe,AirMoE,air,2,seeds,61.234,60.1,62.3,72.43,70.1,1985760,422292,20618
vit-aspp,ViT+ASPP <one head>,none,2,seeds,59.9,58.0,61.0,68.12,69.0,189000,189000,0
"""
# ViT+ASPP is worse than AirMoE by 1.334
PAIR = ("airmoe", "vit-aspp", "air", -1.334, -2.2, -0.4, 0.012, 0.024, "methods", 2, 16, 16)


@pytest.fixture
def airmoe(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Run a command in this process: exit code, stdout, stderr."""

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["airmoe", *arguments])
        with pytest.raises(SystemExit) as ended:
            run()
        captured = capsys.readouterr()
        return int(ended.value.code or 0), captured.out, captured.err

    return call


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    chromium = shutil.which("chromium")
    if not chromium:
        pytest.skip("no chromium; `make test-deps` installs it")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def trained(run_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small run under a name that would be markup, with a log of two epochs and half a row."""
    folder = tmp_path_factory.mktemp("runs") / "a<b>run"
    shutil.copytree(run_folder / "checkpoint", folder / "checkpoint")
    rows = [json.dumps({"epoch": epoch, **ROW}) for epoch in (1, 2)]
    (folder / "metrics.jsonl").write_text("\n".join([*rows, '{"epoch": 3, "lo']))
    return folder


def comparison(folder: Path) -> Path:
    (folder / "records").mkdir(parents=True)
    (folder / "table.csv").write_text(TABLE)
    (folder / "paired.csv").write_text(paired_csv([dict(zip(PAIRED, PAIR, strict=True))]))
    for method, miou in (("airmoe", 61.0), ("vit-aspp", 59.0)):
        curve = [{"epoch": epoch, "miou": miou + epoch, "mf1": miou + 9} for epoch in (1, 2)]
        data = {"name": "scenes", "split": "test", "images": 16}
        record = {
            "method": method,
            "label": method,
            "seed": 0,
            "settings": "ab",
            "commit": "cd",
            "data": data,
            "curve": curve,
        }
        (folder / "records" / f"{method}.seed0.json").write_text(json.dumps(record))
    return folder


@pytest.fixture(scope="module")
def page_of_run(trained: Path) -> Path:
    """The page, made once by a command."""
    from typer.testing import CliRunner

    from api.cli.main import app

    result = CliRunner().invoke(app, ["report", "--run", str(trained), *QUICK])
    assert result.exit_code == 0, result.output
    return trained / "report.html"


def test_the_page_says_what_eval_says(airmoe, trained: Path, page_of_run: Path) -> None:
    code, told, _ = airmoe("eval", "--run", str(trained), "--json", *QUICK)
    scores, text = json.loads(told), page_of_run.read_text()
    assert code == 0
    assert f"<b>{scores['miou']:.1f}</b>" in text
    for name, row in scores["per_class"].items():
        cells = "".join(f"<td>{'absent' if value is None else f'{value:.1f}'}</td>" for value in row.values())
        assert f"<td>{name}</td>{cells}" in text
    # the confusion matrix is that of the scores, and every image has a best client
    pixels = scores["confusion"][0]["pixels"]
    road = 100 * pixels[0][0] / (sum(pixels[0]) + sum(row[0] for row in pixels) - pixels[0][0])
    assert road == pytest.approx(scores["per_class"]["road"]["iou"])
    assert sum(map(sum, scores["routing"]["top_by_domain"])) == 6
    # the name is text, the half row is none, and the run says that it is not finished
    assert "a&lt;b&gt;run" in text
    assert "a<b>run" not in text
    assert "2 of 6 epochs" in text
    assert "Validation, mIoU" in text
    assert "Validation, mF1" in text
    # a client that sent labels instead, at the entropy of what was predicted
    predicted = [sum(column) for column in zip(*pixels, strict=True)]
    shares = [count / sum(predicted) for count in predicted if count]
    entropy = -sum(share * math.log2(share) for share in shares)
    assert f"entropy-coded, H = {entropy:.2f} bit per cell" in text


def test_the_page_holds_all_that_it_needs(page_of_run: Path) -> None:
    text = page_of_run.read_text()
    links = set(re.findall(r"""(?:src|href|url)\s*[=(]\s*["']?([^"')\s>]{1,24})""", text))
    assert links
    assert all(link.startswith("data:image/") for link in links)
    assert "<script" not in text
    for heading in (
        "Training",
        "Classes and domains",
        "Examples",
        "Routing",
        "Tokens and prototypes",
        "Channel and ledger",
    ):
        assert f"<h2>{heading}</h2>" in text
    assert text.count("data:image/") % 4 == 0  # image, truth, prediction, overlay of each domain


def test_a_browser_shows_it_offline_in_light_and_dark_and_prints_it(browser: Browser, page_of_run: Path) -> None:
    grounds, trouble = {}, []
    for scheme in ("light", "dark"):
        context = browser.new_context(color_scheme=scheme, offline=True, viewport={"width": 1000, "height": 700})
        page = context.new_page()
        page.on("request", lambda request: request.url.startswith(("file:", "data:")) or trouble.append(request.url))
        page.on("console", lambda message: trouble.append(message.text))
        page.goto(page_of_run.as_uri())
        broken = "[...document.images].filter(i => !i.complete || !i.naturalWidth).length"
        assert page.evaluate(broken) == 0
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        grounds[scheme] = page.evaluate("getComputedStyle(document.body).backgroundColor")
        if scheme == "dark":  # paper is white whatever the screen is
            printed = page.pdf(prefer_css_page_size=True, print_background=True)
            assert len(re.findall(rb"/Type\s*/Page\b", printed)) >= 3
            page.emulate_media(media="print")
            assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
        context.close()
    assert grounds["light"] == "rgb(255, 255, 255)"
    assert grounds["dark"] != grounds["light"]
    assert trouble == []


def test_a_comparison_gets_its_table_its_differences_and_its_curves(airmoe, tmp_path: Path) -> None:
    folder = comparison(tmp_path / "cmp")
    code, told, _ = airmoe("report", "--run", str(folder), "--out", str(tmp_path / "new" / "page.html"))
    text = (tmp_path / "new" / "page.html").read_text()
    assert code == 0
    assert "page.html" in told
    assert "<td>61.2</td><td>[60.1, 62.3]</td>" in text
    assert "ViT+ASPP &lt;one head&gt;" in text
    assert "vit-aspp: -1.33 [-2.20, -0.40]" in text
    assert "mIoU less that of airmoe, air channel" in text
    assert "right of the dashed line the method is better" in text
    assert text.count("<polyline") == 4  # two methods, two scores: there is no curves.png
    (folder / "curves.png").write_bytes(b"picture")
    airmoe("report", "--run", str(folder))
    text = (folder / "report.html").read_text()
    assert "<polyline" not in text
    assert "data:image/png;base64,cGljdHVyZQ==" in text


def broken_log(folder: Path, trained: Path) -> None:
    shutil.copytree(trained / "checkpoint", folder / "checkpoint")
    (folder / "metrics.jsonl").write_text('nonsense\n{"epoch": 1, "loss": 1}\n')


def single_model(folder: Path, trained: Path) -> None:
    shutil.copytree(trained / "checkpoint", folder / "checkpoint")
    settings = folder / "checkpoint" / "config.yaml"
    settings.write_text(
        settings.read_text().replace("model: airmoe", "model: airmoe_ray.baselines.single.segnet:SegNet")
    )


def half_a_sweep(folder: Path, trained: Path) -> None:
    begin_comparison(folder / "c", load_config("quickstart"), "quickstart", kind="sweeps")
    (folder / "c" / "records").mkdir()


MISTAKES = {
    "a single model": (
        single_model,
        "is of a single model, airmoe_ray.baselines.single.segnet:SegNet, without clients",
    ),
    "sweeps": (
        lambda folder, trained: ((folder / "records").mkdir(), (folder / "sweeps.md").write_text("x")),
        "holds sweeps, which have a page of their own; read",
    ),
    "half a sweep": (half_a_sweep, "holds sweeps, which have a page of their own; read"),
    "nothing there": (lambda folder, trained: None, "neither a run folder nor a shipped model"),
    "something else": (
        lambda folder, trained: (folder / "notes.txt").write_text("x"),
        "no checkpoint here; train first",
    ),
    "half a run": (
        lambda folder, trained: (folder / "metrics.jsonl").write_text(json.dumps({"epoch": 1, **ROW})),
        "no checkpoint here; train first",
    ),
    "a broken log": (broken_log, "line 1 is not a row of a training log"),
    "no finished run": (lambda folder, trained: (folder / "records").mkdir(), "without any finished run"),
    "a broken record": (
        lambda folder, trained: (comparison(folder / "c"), (folder / "c" / "records" / "x.json").write_text("{}")),
        "not a record of a comparison",
    ),
    "another table": (
        lambda folder, trained: (comparison(folder / "c"), (folder / "c" / "table.csv").write_text("a,b\n1,2\n")),
        "has no column label",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_line(airmoe, trained: Path, tmp_path: Path, mistake: str) -> None:
    make, expected = MISTAKES[mistake]
    folder = tmp_path / "given"
    if mistake != "nothing there":
        folder.mkdir()
        make(folder, trained)
    given = folder / "c" if (folder / "c").is_dir() else folder
    code, told, complaint = airmoe("report", "--run", str(given))
    assert code == 2
    assert told == ""
    assert expected in complaint
    assert complaint.count("\n") == 1
    assert not list(tmp_path.rglob("report.*"))


def test_a_place_that_cannot_be_written_to_is_found_before_the_work(airmoe, trained: Path, tmp_path: Path) -> None:
    code, _, complaint = airmoe("report", "--run", str(trained), "--out", str(tmp_path))
    assert code == 2
    assert "is a folder; name a file" in complaint
    assert complaint.count("\n") == 1
