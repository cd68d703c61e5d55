"""What doctor says of machines, images and storage: each finding in one line, from what was seen there."""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import pytest

from airmoe_ray.config import Config
from airmoe_ray.errors import UserError
from airmoe_ray.storage.bucket import shown
from api.cli.doctor import folders, image, machine_checks, storage
from api.cli.doctor.cluster_file import ClusterFile
from api.cli.doctor.results import CommandError
from api.cli.doctor.ssh import Folder, Machine
from tests.object_store import ObjectStore, object_store

RAY = metadata.version("ray")


def machine(address: str = "10.0.0.10", **facts: str) -> Machine:
    return Machine(address, {"ray": RAY, "python": "3.11.9", "torch": "2.13.0", "user": "me", **facts})


# versions


def test_hosts_of_one_python_and_ray_agree() -> None:
    assert machine_checks.agree([machine("a"), machine("b")]) == f"Python 3.11.9, Ray {RAY} on all hosts"


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"python": "3.11.2"}, "Python 3.11.2 on b; 3.11.9 on a, c: Ray lets a node join only if"),
        ({"ray": "2.60.9"}, f"Ray {RAY} on a, c; 2.60.9 on b: Ray lets a node join only if"),
    ],
)
def test_a_host_that_differs_in_the_patch_level_is_named(facts: dict[str, str], words: str) -> None:
    with pytest.raises(UserError) as told:
        machine_checks.agree([machine("a"), machine("b", **facts), machine("c")])
    assert words in str(told.value)


def test_before_the_installation_the_systems_python_is_compared() -> None:
    hosts = [Machine(name, {"system_python": version}) for name, version in (("a", "3.11.2"), ("b", "3.12.1"))]
    with pytest.raises(UserError, match=r"Python 3\.11\.2 on a; 3\.12\.1 on b"):
        machine_checks.agree(hosts)


# drivers


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"cards": "2"}, "2 NVIDIA cards and no nvidia-smi: the driver is missing"),
        ({"driver": "470.82.01", "gpus": "1", "cuda": "12.8"}, "driver 470.82.01 is too old for torch's CUDA 12.8"),
        ({"driver": "525.60.13", "gpus": "1", "cuda": "13.0"}, "which needs 580.65.06 or newer"),
        ({"driver": "570.10", "gpus": "1"}, "torch 2.13.0 there is a CPU build"),
    ],
)
def test_a_driver_that_torch_cannot_use_is_told(facts: dict[str, str], words: str) -> None:
    with pytest.raises(UserError) as told:
        machine_checks.driver(machine(**facts))
    assert words in str(told.value)


def test_a_driver_that_is_new_enough_is_fine_and_no_card_needs_none() -> None:
    assert machine_checks.driver(machine(driver="525.60.13", gpus="1", cuda="12.8")) == "driver 525.60.13, CUDA 12.8"
    assert machine_checks.driver(machine(driver="580.100", gpus="1", cuda="13.0")) == "driver 580.100, CUDA 13.0"
    assert machine_checks.driver(machine(cards="0", driver="")) == "no NVIDIA card"


# folders


def test_a_folder_of_another_owner_is_told_with_the_owner() -> None:
    seen = Machine("a", {"user": "me"}, folders={"~/airmoe": Folder(writable=False, owner="root:root", mode="755")})
    needs = [folders.Need("~/airmoe", "`ray up` writes there", write=True, optional=True)]
    with pytest.raises(UserError, match=r"~/airmoe: not writable for me: it belongs to root:root \(mode 755\)"):
        folders.check(seen, needs)
    assert folders.check(Machine("a"), needs) == "~/airmoe"  # `ray up` will make it


def test_folders_that_must_be_there_are_those_of_the_settings() -> None:
    file = ClusterFile(Path("c.yaml"), {"head_start_ray_commands": ["airmoe serve --run ~/r"], "file_mounts": {}})
    config = Config.model_validate(
        {"cluster": {"storage": "/mnt/frl"}, "data": {"name": "camvid", "root": "/mnt/data"}}
    )
    needs = folders.needed(file, config, is_head=True, with_dataset=True, storage="/mnt/runs")
    found = {need.folder: (need.write, need.shared) for need in needs if not need.optional}
    assert found == {
        "~/r/checkpoint": (False, False),
        "/mnt/runs": (True, True),
        "/mnt/frl": (True, True),
        "/mnt/data": (False, False),
    }
    at_url = folders.needed(file, None, is_head=False, with_dataset=True, storage="s3://bucket/runs")
    assert [need.folder for need in at_url if not need.optional] == []


# images, of which a program plays docker's part


DOCKER = """#!/bin/bash
case "$1 $2" in
  "image inspect") [[ ${@: -1} == "$HERE" ]] || exit 1; [[ $* == *Config.Env* ]] && echo "$ENVIRONMENT"; exit 0;;
  "manifest inspect") [[ $3 == */pushed:* ]] || { echo "denied: requested access is denied" >&2; exit 1; };;
  "run --rm") echo "$FOUND";;
esac
"""


@pytest.fixture
def docker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    (tmp_path / "docker").write_text(DOCKER)
    (tmp_path / "docker").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("HERE", "r/mine:1")
    monkeypatch.setenv("ENVIRONMENT", json.dumps(["PATH=/bin", "HOME=/home/airmoe"]))
    monkeypatch.setenv("FOUND", f"uid 1000\npython 3.11.9\nray {RAY}\nboto3 1.0")
    return monkeypatch


def look() -> image.Image:
    found = image.look_into("r/mine:1", ["~/airmoe"])
    assert found is not None
    return found


def test_an_image_that_cannot_be_pulled_is_told_with_what_docker_said(docker: pytest.MonkeyPatch) -> None:
    assert image.pullable(["r/mine:1", "r/pushed:1"]) == "r/mine:1, r/pushed:1: here, or at the registry"
    with pytest.raises(CommandError, match="r/secret:1 is neither here nor at its registry for us") as told:
        image.pullable(["r/secret:1"])
    assert "denied" in told.value.output


def test_an_image_that_is_not_here_is_not_looked_into(docker: pytest.MonkeyPatch) -> None:
    assert image.look_into("r/pushed:1", []) is None


def test_a_good_image_is_told_so(docker: pytest.MonkeyPatch) -> None:
    assert image.check(look(), is_aws_head=True) == f"r/mine:1: uid 1000, Python 3.11.9, Ray {RAY}"


@pytest.mark.parametrize(
    ("variable", "value", "words"),
    [
        ("ENVIRONMENT", "[]", "no ENV HOME: Ray would mount token, key and checkpoint into /root"),
        ("FOUND", f"uid 1000\nlocked /home/airmoe/airmoe root:root\nray {RAY}", "uid 1000 cannot write there"),
        ("FOUND", f"uid 1000\nmissing /home/airmoe/airmoe/run\nray {RAY}", "(missing): uid 1000 cannot write there"),
        ("FOUND", "uid 1000\npython 3.11.9\nray 2.9.0\nboto3 1.0", f"Ray 2.9.0, here {RAY}"),
        ("FOUND", f"uid 1000\npython 3.11.9\nray {RAY}", "no boto3, which the autoscaler on the head imports"),
    ],
)
def test_what_a_head_of_aws_lacks_is_told(variable: str, value: str, words: str, docker: pytest.MonkeyPatch) -> None:
    docker.setenv(variable, value)
    with pytest.raises(UserError) as told:
        image.check(look(), is_aws_head=True)
    assert words in str(told.value)


def test_images_of_two_pythons_are_told() -> None:
    images = [
        image.Image(name, "/home/airmoe", {"python": python}) for name, python in (("a", "3.11.2"), ("b", "3.11.9"))
    ]
    with pytest.raises(UserError, match=r"Python 3\.11\.2 in a; 3\.11\.9 in b"):
        image.agree(images)


# storage, against an S3 on loopback that knows users and permissions


@dataclass(frozen=True)
class Store:
    """A bucket that looks at keys, and those of someone who may write there, and of someone who may only read."""

    place: ObjectStore
    writer: tuple[str, str]
    reader: tuple[str, str]

    def url(self, bucket: str = "runs", port: int | None = None) -> str:
        host, _, own = self.place.address.partition(":")
        return ObjectStore(f"{host}:{port or own}").url("cityscapes", bucket=bucket)


@pytest.fixture(scope="module")
def store() -> Iterator[Store]:
    with object_store() as place:
        store = Store(place, place.make_user("writer", "s3:*"), place.make_user("reader", "s3:Get*"))
        place.check_keys(yes=True)
        yield store


@pytest.fixture
def as_user(store: Store, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", store.writer[0])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", store.writer[1])
    return monkeypatch


def told(url: str) -> str:
    with pytest.raises(UserError) as error:
        storage.writable_from_here(url)
    assert "\n" not in str(error.value)
    assert "endpoint_override" not in str(error.value)
    print(error.value)
    return str(error.value)


def test_a_bucket_that_can_be_written_to_is_told_so(store: Store, as_user: pytest.MonkeyPatch) -> None:
    assert storage.writable_from_here(store.url()) == "s3://runs/cityscapes can be written to from this machine"


def test_a_key_that_may_only_read_is_told(store: Store, as_user: pytest.MonkeyPatch) -> None:
    as_user.setenv("AWS_ACCESS_KEY_ID", store.reader[0])
    as_user.setenv("AWS_SECRET_ACCESS_KEY", store.reader[1])
    assert "s3://runs/cityscapes: no permission; allow GetObject, PutObject" in told(store.url())


def test_an_unknown_key_and_a_wrong_secret_are_told(store: Store, as_user: pytest.MonkeyPatch) -> None:
    as_user.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    assert "the secret does not belong to the key" in told(store.url())
    as_user.setenv("AWS_ACCESS_KEY_ID", "AKIAUNKNOWN")
    assert "the store does not know this key" in told(store.url())


def test_a_bucket_that_is_not_there_is_told(store: Store, as_user: pytest.MonkeyPatch) -> None:
    assert "there is no such bucket" in told(store.url(bucket="nowhere"))


def test_an_address_where_nobody_answers_is_told(store: Store, as_user: pytest.MonkeyPatch) -> None:
    assert "cannot be reached; check address and network" in told(store.url(port=9))


def test_a_kind_of_storage_that_nobody_knows_is_told() -> None:
    assert "not a URL that pyarrow or fsspec can open" in told("tape://library/7")


def test_a_url_that_carries_a_key_is_shown_without_it() -> None:
    assert shown("s3://key:secret@bucket/runs?x=y") == "s3://bucket/runs"
