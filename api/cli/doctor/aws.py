"""What a file for AWS needs of the account: security group, subnets, roles, machine images, a quota for its instances.

Where these credentials may not look, that is said and nothing more: those of `ray up` may be others.
"""

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

from airmoe_ray.errors import UserError
from api.cli.doctor.cluster_file import ClusterFile
from api.cli.doctor.results import CheckResult, run_check

_REFUSED = ("UnauthorizedOperation", "AccessDenied", "AccessDeniedException", "NoSuchResourceException")
_STACK = "deploy configs/cluster/aws-account.yaml"
# quotas of EC2, in virtual CPUs, by an instance type's first letter: on demand, spot
_QUOTAS = {"g": ("L-DB2E81BA", "L-3819A6DF"), "p": ("L-417A185B", "L-7212CCBC")}
_STANDARD = ("L-1216C47A", "L-34B43A08")
Kind = dict[str, Any]
Ask = Callable[[str], Any]  # boto3's client of a service


def check_account(file: ClusterFile) -> list[CheckResult]:
    """What the account has of all that the file names."""
    import boto3  # type: ignore[import-not-found,unused-ignore]
    from botocore.config import Config  # type: ignore[import-untyped,import-not-found,unused-ignore]

    patience = Config(connect_timeout=5, read_timeout=20, retries={"max_attempts": 2})
    ask = partial(boto3.client, region_name=file.tree["provider"].get("region"), config=patience)
    checks: dict[str, Callable[[ClusterFile, Ask], str]] = {
        "security group": _group,
        "subnet": _subnet,
        "roles": _roles,
        "machine image": _machine_image,
        "quota": _quota,
    }
    return [run_check(name, partial(_told, check, file, ask)) for name, check in checks.items()]


def _told(check: Callable[[ClusterFile, Ask], str], file: ClusterFile, ask: Ask) -> str:
    """Run a check; what AWS answers instead is told in its own words."""
    from botocore.exceptions import (  # type: ignore[import-untyped,import-not-found,unused-ignore]
        BotoCoreError,
        ClientError,
    )

    try:
        return check(file, ask)
    except ClientError as error:
        code, message = (error.response["Error"].get(key, "") for key in ("Code", "Message"))
        if code in _REFUSED:
            return f"cannot be looked at with these credentials ({code})"
        raise UserError(f"{message.rstrip('.')} ({code}); {_STACK}, or correct the file") from None
    except BotoCoreError as error:
        raise UserError(f"AWS cannot be asked: {str(error).splitlines()[0]}") from None


def _kinds(file: ClusterFile) -> dict[str, Kind]:
    return {name: kind.get("node_config") or {} for name, kind in file.tree["available_node_types"].items()}


def _groups(file: ClusterFile, ask: Ask) -> list[dict[str, Any]]:
    for name, node in _kinds(file).items():
        if not node.get("SecurityGroupIds"):
            raise UserError(
                f"{name} has no SecurityGroupIds: Ray would make a group that lets everybody try ssh; {_STACK}, and "
                "put in its output Group"
            )
    ids = sorted({one for node in _kinds(file).values() for one in node["SecurityGroupIds"]})
    found: list[dict[str, Any]] = ask("ec2").describe_security_groups(GroupIds=ids)["SecurityGroups"]
    return found


def _group(file: ClusterFile, ask: Ask) -> str:
    """Whoever asks needs the key; nothing else may be open to everybody."""
    groups = _groups(file, ask)
    for group in groups:
        for rule in group["IpPermissions"]:
            sources = {one.get("CidrIp") or one.get("CidrIpv6") for one in (*rule["IpRanges"], *rule["Ipv6Ranges"])}
            ports = (rule.get("FromPort"), rule.get("ToPort"))
            if sources & {"0.0.0.0/0", "::/0"} and ports != (file.served.port, file.served.port):
                which = "all ports" if ports[0] in (None, -1) else f"port {ports[0]}"
                raise UserError(f"{group['GroupId']}: {which} open to everybody; name who may (Operators of the stack)")
    return f"{', '.join(group['GroupId'] for group in groups)}, open to those it names"


def _subnet(file: ClusterFile, ask: Ask) -> str:
    """Where Ray will make the nodes."""
    provider, network = file.tree["provider"], _groups(file, ask)[0]["VpcId"]
    filters = [{"Name": "vpc-id", "Values": [network]}, {"Name": "state", "Values": ["available"]}]
    if zones := str(provider.get("availability_zone") or ""):
        filters.append({"Name": "availability-zone", "Values": [zone.strip() for zone in zones.split(",")]})
    found = ask("ec2").describe_subnets(Filters=filters)["Subnets"]
    usable = [one for one in found if provider.get("use_internal_ips") or one["MapPublicIpOnLaunch"]]
    if not usable:
        raise UserError(
            f"{network}, the security group's network, has no subnet in {zones or provider.get('region')} that gives "
            "out public addresses; change availability_zone, or let one do so (MapPublicIpOnLaunch)"
        )
    return f"{', '.join(one['SubnetId'] for one in usable)} in {network}"


def _roles(file: ClusterFile, ask: Ask) -> str:
    profiles = [(node.get("IamInstanceProfile") or {}).get("Name") for node in _kinds(file).values()]
    names = sorted({name for name in profiles if name})
    for name in names:
        ask("iam").get_instance_profile(InstanceProfileName=name)
    return f"instance profiles {', '.join(names)}" if names else "none named; Ray makes its own"


def _machine_image(file: ClusterFile, ask: Ask) -> str:
    ids = sorted({str(node["ImageId"]) for node in _kinds(file).values() if node.get("ImageId")})
    ask("ec2").describe_images(ImageIds=ids)
    return f"{', '.join(ids)} in {file.tree['provider'].get('region')}"


def _quota(file: ClusterFile, ask: Ask) -> str:
    """Virtual CPUs that the account may run at once: a fresh one has none for instances with GPUs."""
    wanted: Counter[str] = Counter()
    for name, kind in file.tree["available_node_types"].items():
        node = kind.get("node_config") or {}
        if "InstanceType" not in node:
            raise UserError(f"{name} has no InstanceType in its node_config; name one")
        is_head = name == file.tree["head_node_type"]
        count = 1 if is_head else int(kind.get("max_workers", file.tree.get("max_workers", 0)))
        about = ask("ec2").describe_instance_types(InstanceTypes=[node["InstanceType"]])["InstanceTypes"][0]
        spot = (node.get("InstanceMarketOptions") or {}).get("MarketType") == "spot"
        code = _QUOTAS.get(node["InstanceType"][0], _STANDARD)[spot]
        wanted[code] += count * about["VCpuInfo"]["DefaultVCpus"]
    for code, needed in wanted.items():
        quota = ask("service-quotas").get_service_quota(ServiceCode="ec2", QuotaCode=code)["Quota"]
        if quota["Value"] < needed:
            raise UserError(
                f"{quota['QuotaName']}: {quota['Value']:g} vCPUs allowed, {needed} needed at most; lower max_workers, "
                "or ask for more (aws service-quotas request-service-quota-increase --service-code ec2 --quota-code "
                f"{code} --desired-value {needed})"
            )
    return f"{sum(wanted.values())} vCPUs may run"
