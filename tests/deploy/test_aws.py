"""`ray up cluster.yaml` against a stand-in for AWS (moto): what it makes there, who may reach it, and that it all ends.

Nothing there answers ssh: `ssh` and `rsync` are scripts that note what they were told. What runs on real machines is
tested in tests/cluster.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import boto3
import pytest
import yaml
from ray.autoscaler._private.aws.config import bootstrap_aws
from ray.autoscaler._private.providers import _get_node_provider
from ray.autoscaler._private.util import prepare_config
from ray.autoscaler.v2.instance_manager.config import FileConfigReader
from ray.autoscaler.v2.instance_manager.node_provider import NodeProviderAdapter
from ray.autoscaler.v2.scheduler import ResourceDemandScheduler, SchedulingRequest
from ray.autoscaler.v2.schema import AutoscalerInstance
from ray.autoscaler.v2.utils import ResourceRequestUtil
from ray.core.generated.autoscaler_pb2 import NodeState, NodeStatus
from ray.core.generated.instance_manager_pb2 import Instance, NodeKind

from api.cli.doctor.aws import check_account
from api.cli.doctor.cluster_file import check_schema, read_documents
from api.cli.doctor.results import CheckResult
from tests.object_store import empty_account

ROOT = Path(__file__).parents[2]
ACCOUNT = ROOT / "configs/cluster/aws-account.yaml"
OPERATORS, ASKERS = "198.51.100.7/32", "198.51.100.0/24"
REGION, ZONE = "us-west-2", "us-west-2a"
# as an image that has a home answers `docker inspect`; everything else succeeds and says nothing
_SSH = """#!/bin/sh
printf '%s\\n' "$*" >> "$(dirname "$0")/told"
case "$*" in *Config.Env*) echo '["HOME=/home/airmoe"]';; *meminfo*) cat /proc/meminfo;; esac
"""


@dataclass
class Operator:
    """Someone at a laptop with an AWS account."""

    folder: Path
    environment: dict[str, str]

    @property
    def file(self) -> Path:
        return self.folder / "cluster.yaml"

    def ray(self, *command: object) -> str:
        done = subprocess.run(
            [Path(sys.executable).with_name("ray"), *map(str, command)],
            cwd=self.folder, env=self.environment, capture_output=True, text=True, check=False, timeout=180,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return done.stdout

    def told(self) -> str:
        """What nodes were told over ssh."""
        return (self.folder / "bin/told").read_text()


@pytest.fixture(scope="module")
def account() -> Iterator[dict[str, str]]:
    """An account with nothing in it but its default network; the variables that lead there."""
    with pytest.MonkeyPatch.context() as patch, empty_account() as address:
        variables = {
            "AWS_ENDPOINT_URL": f"http://{address}",
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_DEFAULT_REGION": REGION,
            "AWS_EC2_METADATA_DISABLED": "true",
        }
        for name, value in variables.items():
            patch.setenv(name, value)
        yield variables


@pytest.fixture(scope="module")
def outputs(account: dict[str, str]) -> dict[str, str]:
    """Of the template, deployed in a network beside the default one, which has a subnet in the zone as well."""
    ec2 = boto3.client("ec2")
    assert ec2.describe_subnets(Filters=[{"Name": "availability-zone", "Values": [ZONE]}])["Subnets"]
    network = ec2.create_vpc(CidrBlock="10.7.0.0/16")["Vpc"]["VpcId"]
    subnet = ec2.create_subnet(VpcId=network, CidrBlock="10.7.0.0/20", AvailabilityZone=ZONE)["Subnet"]
    ec2.modify_subnet_attribute(SubnetId=subnet["SubnetId"], MapPublicIpOnLaunch={"Value": True})
    given = {"Vpc": subnet["VpcId"], "Subnet": subnet["SubnetId"], "Operators": OPERATORS, "Askers": ASKERS}
    formation = boto3.client("cloudformation")
    formation.create_stack(
        StackName="airmoe",
        TemplateBody=ACCOUNT.read_text(),
        Parameters=[{"ParameterKey": key, "ParameterValue": value} for key, value in given.items()],
        Capabilities=["CAPABILITY_NAMED_IAM"],
    )
    stack = formation.describe_stacks(StackName="airmoe")["Stacks"][0]
    assert stack["StackStatus"] == "CREATE_COMPLETE"
    return {output["OutputKey"]: output["OutputValue"] for output in stack["Outputs"]}


@pytest.fixture(scope="module")
def operator(account: dict[str, str], outputs: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Operator:
    """The shipped file with this account's values in place of the example's, and all that it sends."""
    folder = tmp_path_factory.mktemp("aws")
    image = boto3.client("ec2").describe_images(Owners=["amazon"])["Images"][0]["ImageId"]
    text = (ROOT / "cluster.yaml").read_text().replace("ami-00000000000000000", image)
    text = text.replace("sg-00000000000000000", outputs["Group"])
    text = text.replace("files.example.org:/", outputs["Folder"]).replace("registry.example.org", "registry.internal")
    (folder / "cluster.yaml").write_text(text.replace("cluster_name: airmoe", f"cluster_name: airmoe-{os.getpid()}"))
    for name in ("home/.ray/auth_token", "home/.airmoe/api_key", "runs/quickstart/checkpoint/config.json"):
        (folder / name).parent.mkdir(parents=True)
        (folder / name).write_text("s" * 32)
    (folder / "bin").mkdir()
    for name in ("ssh", "rsync"):
        (folder / "bin" / name).write_text(_SSH)
        (folder / "bin" / name).chmod(0o755)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "AIRMOE_"))}
    path = f"{folder}/bin:{os.environ['PATH']}"
    return Operator(folder, kept | account | {"HOME": f"{folder}/home", "PATH": path, "RAY_USAGE_STATS_ENABLED": "0"})


@pytest.fixture(scope="module")
def up(operator: Operator) -> Operator:
    operator.ray("up", "-y", "--no-config-cache", operator.file)
    return operator


def instances(kind: str) -> list[dict[str, Any]]:
    """Instances that run, of the head or of workers, by Ray's own tag."""
    tags = [{"Name": "tag:ray-node-type", "Values": [kind]}, {"Name": "instance-state-name", "Values": ["running"]}]
    found = boto3.client("ec2").describe_instances(Filters=tags)["Reservations"]
    return [instance for reservation in found for instance in reservation["Instances"]]


def who_may_reach(instance: dict[str, Any]) -> dict[str, list[str]]:
    """Port -> addresses or groups, over all groups of an instance."""
    groups = [group["GroupId"] for group in instance["SecurityGroups"]]
    found: dict[str, list[str]] = {}
    for group in boto3.client("ec2").describe_security_groups(GroupIds=groups)["SecurityGroups"]:
        for rule in group["IpPermissions"]:
            sources = [one["CidrIp"] for one in rule["IpRanges"]] + [one["GroupId"] for one in rule["UserIdGroupPairs"]]
            found.setdefault(str(rule.get("FromPort", "all")), []).extend(sources)
    return found


def doctor(operator: Operator, old: str = "", new: str = "") -> dict[str, CheckResult]:
    """What doctor finds in the account, of the file with one change."""
    text = operator.file.read_text()
    assert old in text
    mine = operator.folder / "mine.yaml"
    mine.write_text(text.replace(old, new) if old else text)
    return {one.check: one for one in check_account(check_schema(mine, read_documents(mine)[0]))}


def test_doctor_finds_in_the_account_what_the_file_names(operator: Operator, outputs: dict[str, str]) -> None:
    found = doctor(operator)
    assert {name: one.ok for name, one in found.items()} == dict.fromkeys(
        ["security group", "subnet", "roles", "machine image", "quota"], True
    )
    assert found["security group"].message == f"{outputs['Group']}, open to those it names"
    assert found["roles"].message == "instance profiles airmoe-head, airmoe-worker"
    assert found["quota"].message.startswith("cannot be looked at with these credentials")  # the stand-in has none


@pytest.mark.parametrize(
    ("old", "new", "check", "words"),
    [
        (
            "availability_zone: us-west-2a",
            "availability_zone: us-west-2b",
            "subnet",
            "has no subnet in us-west-2b that",
        ),
        ("airmoe-worker", "airmoe-wroker", "roles", "airmoe-wroker not found (NoSuchEntity); deploy configs/cluster"),
        ("ImageId: ami-", "ImageId: ami-1", "machine image", "does not exist (InvalidAMIID"),
        ("[sg-", "[sg-1", "security group", "does not exist (InvalidGroup.NotFound)"),
    ],
)
def test_what_the_account_does_not_have_is_told(operator: Operator, old: str, new: str, check: str, words: str) -> None:
    found = doctor(operator, old, new)[check]
    assert not found.ok
    assert words in found.message


def test_a_file_without_a_group_and_a_group_that_is_open_to_everybody_are_told(
    operator: Operator, outputs: dict[str, str]
) -> None:
    line = next(line for line in operator.file.read_text().splitlines() if "SecurityGroupIds: [" in line)
    assert "Ray would make a group that lets everybody try ssh" in doctor(operator, line)["security group"].message
    network = boto3.client("ec2").describe_security_groups(GroupIds=[outputs["Group"]])["SecurityGroups"][0]["VpcId"]
    group = boto3.resource("ec2").create_security_group(GroupName="open", Description="open", VpcId=network)
    group.authorize_ingress(IpProtocol="tcp", FromPort=8000, ToPort=8000, CidrIp="0.0.0.0/0")
    assert doctor(operator, outputs["Group"], group.id)["security group"].ok  # who asks needs the key
    group.authorize_ingress(IpProtocol="tcp", FromPort=22, ToPort=22, CidrIp="0.0.0.0/0")
    told = doctor(operator, outputs["Group"], group.id)["security group"]
    group.delete()
    assert (told.ok, f"{group.id}: port 22 open to everybody" in told.message) == (False, True)


def test_a_quota_that_is_too_small_is_told_with_the_command_that_asks_for_more(
    operator: Operator, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Quotas:
        def get_service_quota(self, *, QuotaCode: str, **_: str) -> dict[str, Any]:
            few = {"QuotaName": "All G and VT Spot Instance Requests", "Value": 8.0}
            return {"Quota": few if QuotaCode == "L-3819A6DF" else {"QuotaName": "others", "Value": 64.0}}

    real = boto3.client
    monkeypatch.setattr(
        boto3, "client", lambda name, **given: Quotas() if name == "service-quotas" else real(name, **given)
    )
    told = doctor(operator)["quota"]
    assert not told.ok
    assert "All G and VT Spot Instance Requests: 8 vCPUs allowed, 16 needed at most" in told.message
    assert "--quota-code L-3819A6DF --desired-value 16" in told.message


def test_the_head_is_made_on_demand_with_its_own_role(up: Operator) -> None:
    (head,) = instances("head")
    assert head["InstanceType"] == "g5.xlarge"
    assert head.get("InstanceLifecycle") is None
    assert head["IamInstanceProfile"]["Arn"].endswith("instance-profile/airmoe-head")
    assert head["Placement"]["AvailabilityZone"] == ZONE


def test_ssh_and_http_are_open_to_whom_the_account_names_and_to_nobody_else(up: Operator) -> None:
    (head,) = instances("head")
    reach = who_may_reach(head)
    (group,) = (group["GroupId"] for group in head["SecurityGroups"])
    assert reach.pop("22") == [OPERATORS]
    assert reach.pop("8000") == [ASKERS]
    assert [source for sources in reach.values() for source in sources] == [group]


def test_ray_makes_no_group_of_its_own_and_none_is_open_to_everybody(up: Operator, outputs: dict[str, str]) -> None:
    ec2 = boto3.client("ec2")
    groups = ec2.describe_security_groups()["SecurityGroups"]
    assert [group["GroupId"] for group in groups if group["GroupName"] != "default"] == [outputs["Group"]]
    rules = [rule for group in groups for rule in group["IpPermissions"]]
    assert "0.0.0.0/0" not in [source["CidrIp"] for rule in rules for source in rule["IpRanges"]]
    (ours,) = (group for group in groups if group["GroupId"] == outputs["Group"])
    assert instances("head")[0]["VpcId"] == ours["VpcId"]


def test_roles_may_do_what_the_template_says(up: Operator) -> None:
    iam = boto3.client("iam")
    policy = iam.get_role_policy(RoleName="airmoe-head", PolicyName="autoscaler")["PolicyDocument"]
    actions = json.dumps(policy)
    assert "ec2:RunInstances" in actions
    assert "airmoe-worker" in actions  # whom it may pass on
    assert iam.list_role_policies(RoleName="airmoe-worker")["PolicyNames"] == ["airmoe-bucket"]
    for role in ("airmoe-head", "airmoe-worker"):
        policies = {one["PolicyName"] for one in iam.list_attached_role_policies(RoleName=role)["AttachedPolicies"]}
        assert policies <= {"AmazonEC2ContainerRegistryReadOnly"}  # Ray's own role would have full access to EC2 and S3


def test_secrets_and_run_are_mounted_into_the_home_of_the_image(up: Operator) -> None:
    started = next(line for line in up.told().splitlines() if "docker run" in line)
    for target in (".ray/auth_token", "airmoe/api_key", "airmoe/run/checkpoint"):
        assert f":/home/airmoe/{target} " in started
    assert "-v /mnt/airmoe:/shared" in started
    assert "--read-only" in started


def test_the_shared_folder_is_the_accounts(up: Operator, outputs: dict[str, str]) -> None:
    folder = outputs["Folder"].partition(".")[0]
    assert [one["FileSystemId"] for one in boto3.client("efs").describe_file_systems()["FileSystems"]] == [folder]
    assert f"{outputs['Folder']} /mnt/airmoe" in up.told()


def test_experts_that_wait_for_gpus_make_the_autoscaler_launch_spot_workers(up: Operator) -> None:
    head = as_the_head_has_it(up)
    assert head.get_cached_autoscaling_config().get_docker_config("expert")["image"].startswith("registry.internal/")
    assert launch(head, waiting=10 * [{"GPU": 0.25, "CPU": 0.1}]) == {"expert": 3}
    worker = instances("worker")[0]
    assert worker["InstanceLifecycle"] == "spot"
    assert worker["IamInstanceProfile"]["Arn"].endswith("instance-profile/airmoe-worker")
    assert worker["SecurityGroups"] == instances("head")[0]["SecurityGroups"]


def as_the_head_has_it(up: Operator) -> FileConfigReader:
    """The file as `ray up` fills it in and sends it to the head."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", up.environment["HOME"])
        patch.chdir(up.folder)
        filled_in = bootstrap_aws(prepare_config(yaml.safe_load(up.file.read_text())))
    path = up.folder / "ray_bootstrap_config.yaml"
    path.write_text(yaml.safe_dump(filled_in))
    return FileConfigReader(str(path), skip_content_hash=True)


def head_whose_gpu_the_cloud_has() -> AutoscalerInstance:
    (cloud_id,) = (one["InstanceId"] for one in instances("head"))
    state = NodeState(
        node_id=b"head",
        ray_node_type_name="head",
        instance_id=cloud_id,
        status=NodeStatus.RUNNING,
        total_resources={"CPU": 4, "GPU": 1},
        available_resources={"CPU": 3.8},
    )
    instance = Instance(
        instance_id="head", instance_type="head", status=Instance.RAY_RUNNING, node_kind=NodeKind.HEAD,
        cloud_instance_id=cloud_id, node_id="head",
    )  # fmt: skip
    return AutoscalerInstance(ray_node=state, im_instance=instance, cloud_instance_id=cloud_id)


def launch(head: FileConfigReader, waiting: list[dict[str, float]]) -> dict[str, int]:
    """What Ray's scheduler wants for these demands, launched by its provider; node type -> how many."""
    config = head.get_cached_autoscaling_config()
    reply = ResourceDemandScheduler().schedule(
        SchedulingRequest(
            node_type_configs=config.get_node_type_configs(),
            max_num_nodes=config.get_max_num_nodes(),
            resource_requests=ResourceRequestUtil.group_by_count([ResourceRequestUtil.make(one) for one in waiting]),
            current_instances=[head_whose_gpu_the_cloud_has()],
            disable_launch_config_check=True,
        )
    )
    assert not reply.infeasible_resource_requests
    wanted = {request.instance_type: request.count for request in reply.to_launch}
    provider = _get_node_provider(config.get_provider_config(), config.get_config("cluster_name"), use_cache=False)
    adapter = NodeProviderAdapter(provider, head)
    adapter.launch(shape=wanted, request_id="one")
    until = time.monotonic() + 60
    while not instances("worker"):  # Ray asks for one to three, and the stand-in takes the least of it
        assert time.monotonic() < until, adapter.poll_errors()
        time.sleep(0.2)
    return wanted


def test_ray_down_ends_every_instance(up: Operator) -> None:
    assert instances("head")
    up.ray("down", "-y", up.file)
    assert instances("head") + instances("worker") == []
