"""One rule for all names: a folder that is there, else a shipped model, else a line that says what there is."""

import os
from pathlib import Path

import pytest

from airmoe_ray.errors import CheckpointError
from airmoe_ray.storage import shipped
from airmoe_ray.storage.shipped import find_model, shipped_names


@pytest.fixture
def box(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installation that ships `street` and `alley`, in a working folder of its own."""
    folder = tmp_path / "site-packages" / "shipped"
    for name in ("street", "alley"):
        (folder / name).mkdir(parents=True)
        (folder / name / "model.json").touch()
    (folder / "TERMS.md").touch()
    monkeypatch.setattr(shipped, "shipped_folder", lambda: folder)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return folder


def checkpoint(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "model.json").touch()
    return folder


def test_a_shipped_name_leads_into_the_package_and_its_state_into_the_working_folder(box):
    place = find_model("street")
    assert place.checkpoint == box / "street"
    assert place.state.resolve() == Path.cwd() / ".airmoe" / "state" / "street"
    assert shipped_names() == ["alley", "street"]


def test_a_folder_comes_before_a_shipped_name_and_keeps_its_own_state(box):
    run = Path("street")
    checkpoint(run / "checkpoint")
    assert find_model("street") == shipped.ModelPlace(run / "checkpoint", run / "state")
    assert find_model(run) == find_model("street")


def test_a_run_has_a_last_and_a_best_checkpoint_and_may_be_given_by_either_folder(box):
    last = checkpoint(Path("run/checkpoint"))
    with pytest.raises(CheckpointError, match="run: has no best checkpoint"):
        find_model("run", best=True)
    best = checkpoint(Path("run/checkpoint-best"))
    assert find_model("run", best=True).checkpoint == best
    assert find_model("run").checkpoint == last
    assert find_model("run/checkpoint") == shipped.ModelPlace(last, last.resolve().parent / "state")


def test_a_swap_that_a_kill_cut_short_is_finished_first(box):
    checkpoint(Path("run/checkpoint.ready"))
    assert find_model("run").checkpoint.is_dir()


@pytest.mark.parametrize(("name", "told"), [
    ("stret", "stret: neither a run folder nor a shipped model; did you mean street?"),
    ("boulevard", "shipped are alley, street"),
    ("runs/none", "shipped are alley, street"),
])  # fmt: skip
def test_an_unknown_name_is_told_with_the_known_ones(box, name, told):
    with pytest.raises(CheckpointError) as caught:
        find_model(name)
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_installation_without_models_says_how_to_get_one(box, monkeypatch):
    monkeypatch.setattr(shipped, "shipped_folder", lambda: box / "nowhere")
    with pytest.raises(CheckpointError, match=r"street: .*ships none: train one"):
        find_model("street")


def test_a_folder_without_a_checkpoint_is_told_and_what_it_hides(box):
    Path("street").mkdir()
    with pytest.raises(CheckpointError, match=r"street: no checkpoint here; .*rename it to reach the shipped street"):
        find_model("street")
    Path("empty").mkdir()
    with pytest.raises(CheckpointError, match=r"empty: no checkpoint here; train first.*holds one$"):
        find_model("empty")


def test_a_hub_id_is_fetched_and_a_path_of_this_machine_is_not_sought_there(box, monkeypatch, tmp_path):
    asked: list[str] = []
    monkeypatch.setattr(shipped, "fetch_from_hub", lambda name: asked.append(name) or tmp_path / "cached")
    place = find_model("someone/street")
    assert (asked, place.checkpoint) == (["someone/street"], tmp_path / "cached")
    assert place.state.resolve() == Path.cwd() / ".airmoe" / "state" / "someone--street"
    Path("models").mkdir()
    for name in ("runs/quickstart", "models/street", "someone", "a/b/c"):
        with pytest.raises(CheckpointError, match=f"{name}: neither a run folder nor a shipped model"):
            find_model(name)
    with pytest.raises(CheckpointError, match="someone/street: a model of the hub has one checkpoint"):
        find_model("someone/street", best=True)
    assert asked == ["someone/street"]


def test_a_shipped_model_has_no_other_checkpoint(box):
    with pytest.raises(CheckpointError, match="street: a shipped model has one checkpoint"):
        find_model("street", best=True)


def test_what_ships_is_found_in_the_package(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for name in shipped_names():
        place = find_model(name)
        assert place.checkpoint.is_relative_to(Path(shipped.__file__).parents[1] / "shipped")
        size = sum(os.path.getsize(path) for path in place.checkpoint.rglob("*.safetensors"))
        assert size < 12e6
        assert {"config.yaml", "model.json", "CARD.md"} <= {path.name for path in place.checkpoint.iterdir()}
