"""`airmoe eval` of a mix: what was trained on is not scored unless asked for, and that is said."""

import json
from pathlib import Path

from airmoe_ray.data.scenes import CLASSES
from tests.airmoe_ray.data.support import put_flat
from tests.api.support import airmoe


def test_images_that_were_trained_on_are_not_scored_and_named_in_a_line(run_folder: Path, tmp_path: Path) -> None:
    for place in ("here", "there"):
        put_flat(tmp_path / "mine", f"{place}/a", f"{place}/b")
    put_flat(tmp_path / "all", "a")
    for folder in ("mine", "all"):
        (tmp_path / folder / "classes.txt").write_text("road\n")
    parts = [
        {"name": "scenes"},
        {"name": "folder", "root": "mine", "title": "mine", "hold_out": ["there"]},
        {"name": "folder", "root": "all", "title": "trained"},
    ]
    settings = ("data.name=mix", f"data.root={tmp_path}", "data.val_count=2", f"data.classes={[*CLASSES.names]}")
    mixed = [text for setting in (*settings, f"data.parts={json.dumps(parts)}") for text in ("--set", setting)]
    done = airmoe("eval", "--run", run_folder, "--json", *mixed)
    assert done.returncode == 0, done.stderr
    scores = json.loads(done.stdout)
    assert scores["images"] == 2 + 2
    assert {name: row["images"] for name, row in scores["per_domain"].items() if "mine" in name} == {"mine/there": 2}
    assert {name: row["images"] for name, row in scores["per_part"].items()} == {"scenes": 2, "mine": 2}
    assert scores["not_scored"]["parts"] == ["trained"]
    assert "not scored: trained, whose images were all trained on" in done.stderr
