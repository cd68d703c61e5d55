"""Why 0.3.0's image and AWS file did not come up: a check for each cause, which our files pass and those do not.

The files of 0.3.0 are kept in `v0_3_0`. Kubernetes' part is in test_kubernetes.py; that the causes are gone where
things run is seen by test_image.py and tests/cluster/test_aws_file.py.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
USER = "1000"


@dataclass(frozen=True)
class Files:
    """A Dockerfile and the cluster file that runs its image."""

    folder: Path

    @property
    def cluster(self) -> dict[str, Any]:
        return dict(yaml.safe_load((self.folder / "cluster.yaml").read_text()))

    def images(self) -> dict[str, list[str]]:
        """Instructions of every target that nodes run, those of its bases first."""
        text = re.sub(r"^#.*\n", "", (self.folder / "Dockerfile").read_text(), flags=re.M).replace("\\\n", "")
        stages: dict[str, list[str]] = {}
        for stage in re.split(r"^(?=FROM )", text, flags=re.M)[1:]:
            first, *lines = [line for line in stage.splitlines() if line]
            base, name = re.fullmatch(r"FROM (\S+) AS (\w+)", first).groups()  # type: ignore[union-attr]
            stages[name] = [*stages.get(base, [first]), *lines]
        return {name: lines for name, lines in stages.items() if "EXPOSE 8000" in lines}


OURS, OLD = Files(ROOT), Files(Path(__file__).with_name("v0_3_0"))


def no_home(files: Files) -> list[str]:
    """Images that run as a user and do not say where its home is: Ray then mounts everything into /root."""
    return [
        name
        for name, lines in files.images().items()
        if f"USER {USER}" in lines and not any(re.match(r"ENV .*\bHOME=", line) for line in lines)
    ]


def folders_of_root(files: Files) -> list[str]:
    """Folders that something is mounted into, which the engine would make as root, where the user could not write."""
    mounted = [PurePosixPath(target) for target in files.cluster["file_mounts"]]
    needed = {str(parent) for target in mounted for parent in target.parents if str(parent) not in (".", "~")}
    found = []
    for name, lines in files.images().items():
        made = re.findall(rf"install -d -o {USER} -g {USER} ([^&]*)", " ".join(lines))
        owned = {part.replace("/home/airmoe", "~") for part in " ".join(made).split()}
        found += [f"{name}: {folder}" for folder in sorted(needed - owned)]
    return found


def silent_start(files: Files) -> list[str]:
    """Last commands of `ray up` that end whether or not the front end comes up."""
    last = str(files.cluster["head_start_ray_commands"][-1]).rstrip()
    return [last] if last.endswith("&") else []


def no_boto3(files: Files) -> list[str]:
    """Images without what the autoscaler on the head imports."""
    whole = (files.folder / "Dockerfile").read_text()
    named = re.search(r"boto3|\['aws'\]|\[[\w,]*\baws\b[\w,]*\]", whole)
    return [] if named else list(files.images())


def floating_versions(files: Files) -> list[str]:
    """Bases whose Python may be another one tomorrow: nodes of two days would not join each other."""
    default = re.search(r"^ARG BASE=(\S+)", (files.folder / "Dockerfile").read_text(), re.M)
    bases = {lines[0].split()[1] for lines in files.images().values()}
    named = {default[1] if default and base == "${BASE}" else base for base in bases}
    return [base for base in named if not re.match(r"python:\d+\.\d+\.\d+", base)]


def no_common_folder(files: Files) -> list[str]:
    """Nodes that have no folder in common, and so nowhere to train."""
    given = " ".join(files.cluster["docker"]["run_options"])
    return [] if re.search(r"-v \S+:/shared", given) else ["no folder that all nodes see"]


def cloud_may_be_taken_away(files: Files) -> list[str]:
    """Kinds of workers that cloud and channel may end up on, as the head has no room for them."""
    kinds = files.cluster["available_node_types"]
    head = kinds["head"]
    stays = head["resources"]["CPU"] > 0 and "InstanceMarketOptions" not in head["node_config"]
    return [] if stays else [name for name in kinds if name != "head"]


def unseen_nodes(files: Files) -> list[str]:
    """Commands that start Ray without its metrics, or without the list of nodes for Prometheus."""
    lists = [commands for key, commands in files.cluster.items() if key.endswith("start_ray_commands")]
    starts = [command for commands in lists for command in commands if "ray start" in command]
    seen = [c for c in starts if "--metrics-export-port" in c and "--include-dashboard=false" not in c]
    return [command for command in starts if command not in seen]


@pytest.mark.parametrize(
    "cause",
    [
        no_home,
        folders_of_root,
        silent_start,
        no_boto3,
        floating_versions,
        no_common_folder,
        cloud_may_be_taken_away,
        unseen_nodes,
    ],
)
def test_a_cause_is_gone_and_would_be_found_again(cause: Callable[[Files], list[str]]) -> None:
    assert cause(OURS) == []
    assert cause(OLD) != []
