"""What a comparison consists of: a run for each method, seed and, where whole sequences are left out, each of them."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from airmoe_ray.baselines.method import Method, Setting, changed
from airmoe_ray.baselines.registry import find_method
from airmoe_ray.config import Config, DataConfig
from airmoe_ray.config_file import to_yaml
from airmoe_ray.data import open_dataset
from airmoe_ray.data.base import SegmentationDataset
from airmoe_ray.errors import UserError
from airmoe_ray.experiments.compare.channels import scored_channels
from airmoe_ray.experiments.compare.records import Record, settings_hash, told_settings
from airmoe_ray.features.backbone import load_backbone

SPLIT = "test"  # what methods are scored on; never looked at for a choice, as the last epoch is what counts
_NOTE = "comparison.json"

Kind = Literal["comparison", "sweeps"]
Key = tuple[str, int, str]  # of a run: method, seed, hash of its settings


@dataclass(frozen=True)
class Cell:
    """One run to be made: a method by its name, and its own settings with the seed in them."""

    method: str
    config: Config
    point: str = ""  # of a sweep: the setting and its value

    @property
    def key(self) -> Key:
        """As of its record."""
        return self.method, self.config.seed, settings_hash(self.config)

    @property
    def title(self) -> str:
        """For people."""
        fold = f" without {'+'.join(self.config.data.hold_out)}" if self.config.data.hold_out else ""
        return f"{self.point or self.method}, seed {self.config.seed}{fold}"

    def folder(self, out: Path) -> Path:
        """Where the run is."""
        method, seed, settings = self.key
        return out / "runs" / f"{method.replace(':', '_')}.seed{seed}.{settings}"


@dataclass(frozen=True)
class Plan:
    """All runs, in the order in which they are made: every method once before any gets its next seed."""

    base: Config
    methods: list[Method]
    cells: list[Cell]
    left_out: dict[str, str]  # methods that make no sense here, and why

    def rows(self, done: Mapping[Key, Record]) -> dict[str, list[list[Record]]]:
        """Finished runs by method: a list per seed, of one record per fold; seeds that lack a fold are left out."""
        rows: dict[str, list[list[Record]]] = {}
        for method in self.methods:
            by_seed: dict[int, list[Record | None]] = {}
            for cell in self.cells:
                if cell.method == method.key:
                    by_seed.setdefault(cell.config.seed, []).append(done.get(cell.key))
            whole = [[r for r in found if r is not None] for found in by_seed.values() if None not in found]
            if whole:
                rows[method.key] = whole
        return rows


def make_plan(base: Config, methods: Sequence[Method], *, seeds: int) -> Plan:
    """The runs of a comparison; every mistake in settings or data is found here."""
    if seeds < 1:
        raise UserError(f"--seeds {seeds}: expected 1 or more")
    if base.train.mode == "federated":
        raise UserError("train.mode = federated: runs of a comparison are one process each; set train.mode=joint")
    folds = _folds(base)
    settings = [setting_of(fold) for fold in folds]
    left_out = {}
    for method in methods:
        reasons = [method.refusal(fold, setting) for fold, setting in zip(folds, settings, strict=True)]
        if reason := next((reason for reason in reasons if reason), None):
            left_out[method.key] = reason
    kept = [method for method in methods if method.key not in left_out]
    if not kept:
        name, reason = next(iter(left_out.items()))
        raise UserError(f"--methods {name}: {reason}; name another")
    cells = [
        Cell(method.key, changed(method.configure(fold, setting), {"seed": base.seed + seed}))
        for seed in range(seeds)
        for fold, setting in zip(folds, settings, strict=True)
        for method in kept
    ]
    return Plan(base, kept, cells, left_out)


def data_facts(data: DataConfig) -> dict[str, Any]:
    """What tells one folder of images from another: settings name a dataset, and not which files are there."""
    scored = open_dataset(data, SPLIT)
    return {
        "images": len(scored),
        "train_images": len(open_dataset(data, "train")),
        "classes": list(scored.classes.names),
    }


def usable(done: Mapping[Key, Record], cells: Sequence[Cell], *, draws: int) -> dict[Key, Record]:
    """Those of the stored records that stand for a run of these: same images, same classes, same channels and draws."""
    facts: dict[str, dict[str, Any]] = {}
    found = {}
    for cell in cells:
        record = done.get(cell.key)
        if record is None:
            continue
        data = cell.config.data
        if (text := data.model_dump_json()) not in facts:
            facts[text] = data_facts(data)
        channels = scored_channels(cell.config.channel, crosses=method_of(cell).air)
        wanted = {name: 1 if channel.kind == "ideal" else draws for name, channel in channels.items()}
        same = all(record.data.get(name) == value for name, value in facts[text].items())
        if same and wanted == {name: scores.get("draws") for name, scores in record.scores.items()}:
            found[cell.key] = record
    return found


def setting_of(config: Config) -> Setting:
    """What methods may need to know of data and backbone."""
    train, scored = open_dataset(config.data, "train"), open_dataset(config.data, SPLIT)
    return Setting(
        feature_dim=load_backbone(config.backbone).dim,
        classes=len(train.classes.names),
        domains=len(_present(train)),
        unseen_domains=not _present(scored) <= _present(train) or train.domains != scored.domains,
    )


def _present(dataset: SegmentationDataset) -> set[str]:
    """Domains that occur."""
    return {dataset.domains[d] for d in {dataset.domain_of(i) for i in range(len(dataset))}}


def _folds(base: Config) -> list[Config]:
    """The configuration, or one for each sequence that is left out in turn."""
    if base.data.protocol != "leave_one_out" or base.data.hold_out:
        return [base]
    sequences = open_dataset(base.data, "all").domains
    return [changed(base, {"data.hold_out": [name]}) for name in sequences]


def begin_comparison(out: Path, base: Config, name: str, *, kind: Kind = "comparison") -> None:
    """Make the folder, or find out that it holds the same comparison; anything else is refused."""
    note = out / _NOTE
    own = {"kind": kind, "config": name, "settings": settings_hash(base), "told": told_settings(base)}
    if note.is_file():
        try:
            found = json.loads(note.read_text())
        except ValueError:
            raise UserError(f"{note}: cannot be read; choose another --out") from None
        if found.get("settings") != own["settings"]:
            raise UserError(
                f"{out}: holds a comparison with other settings ({found.get('config')}, {found.get('settings')}), "
                f"these are {own['settings']}; choose another --out"
            )
        return
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out}: holds something else than a comparison; choose another --out")
    try:
        out.mkdir(parents=True, exist_ok=True)
        (out / "base.yaml").write_text(to_yaml(base))
        note.write_text(json.dumps(own, indent=1) + "\n")
    except OSError as error:
        raise UserError(f"{out}: cannot write here ({error.strerror}); choose another --out") from None


def kind_of(folder: Path) -> Kind:
    """What a folder of runs is for; older ones do not tell, and are comparisons."""
    try:
        return "sweeps" if json.loads((folder / _NOTE).read_text()).get("kind") == "sweeps" else "comparison"
    except (OSError, ValueError, AttributeError):
        return "comparison"


def method_of(cell: Cell) -> Method:
    """The method that a cell runs."""
    return find_method(cell.method)
