"""Asks a Kubernetes cluster, through kubectl, whether a file can live there. Changes nothing."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

from airmoe_ray.errors import UserError
from api.cli.doctor.kubernetes.pods import Document, pods, secrets
from api.cli.doctor.results import CommandError

OLDEST_OPERATOR = (1, 6)
_KUBECTL_S = 20
_STUCK = {
    "ErrImagePull": "the image cannot be pulled: is it pushed, and does the pod have imagePullSecrets?",
    "ImagePullBackOff": "the image cannot be pulled: is it pushed, and does the pod have imagePullSecrets?",
    "InvalidImageName": "that is no name of an image",
    "CreateContainerConfigError": "a secret or a key of one is missing",
    "CrashLoopBackOff": "it ends as soon as it starts: kubectl logs --previous",
    "Unschedulable": "no node has room for it",
}


def installed() -> bool:
    """Whether there is a kubectl to ask."""
    return shutil.which("kubectl") is not None


def accepts(path: Path, documents: list[Document]) -> str:
    """The cluster answers, has the operator, the secrets and the volumes, and takes the file."""
    _call(["version"], "kubectl reaches no cluster; choose one with `kubectl config use-context`")
    operator = _operator()
    for name in secrets(documents):
        _call(["get", "secret", name], f"secret {name} is not there; docs/cluster.md says how to make it")
    for claim in sorted({claim for pod in pods(documents) for claim in pod.claims}):
        _check_claim(claim, _call(["get", "pvc", claim, "-o", "json"], f"claim {claim} is not there; {_MAKE_CLAIM}"))
    _call(["apply", "--dry-run=server", "-f", str(path)], "the cluster refuses the file; is KubeRay installed?")
    return f"the cluster accepts the file, and has secrets and volumes; KubeRay {operator}"


def stuck(documents: list[Document]) -> str:
    """Pods of an earlier `kubectl apply` that cannot start, with Kubernetes' own reason."""
    told = _call(["get", "pods", "-o", "json"], "kubectl may not list pods; ask for that right")
    images = {container["image"] for pod in pods(documents) for container in pod.containers}
    found = [pod for pod in json.loads(told)["items"] if images & {c["image"] for c in pod["spec"]["containers"]}]
    for pod in found:
        for reason, message in _reasons(pod):
            if reason in _STUCK:
                said = re.sub(r"\s+", " ", message)[:160]
                raise UserError(f"pod {pod['metadata']['name']}: {reason}: {_STUCK[reason]} ({said})")
    return f"{len(found)} there, none is stuck"


_MAKE_CLAIM = "kubectl apply -f kuberay-storage.yaml"


def _operator() -> str:
    """Version of the KubeRay operator."""
    told = _call(
        ["get", "deployments", "-A", "-o", "json", "-l", "app.kubernetes.io/name=kuberay-operator"],
        "kubectl may not look for the KubeRay operator",
    )
    images = [
        container["image"]
        for deployment in json.loads(told)["items"]
        for container in deployment["spec"]["template"]["spec"]["containers"]
    ]
    found = re.search(r":v?(\d+)\.(\d+)[\w.-]*$", images[0]) if images else None
    oldest = ".".join(map(str, OLDEST_OPERATOR))
    if not images:
        raise UserError(f"no KubeRay operator in the cluster; install {oldest} or newer (helm chart kuberay-operator)")
    if found and (int(found[1]), int(found[2])) < OLDEST_OPERATOR:
        raise UserError(f"KubeRay operator {images[0].rpartition(':')[2]}, {oldest} or newer is needed (authOptions)")
    return images[0].rpartition(":")[2]


def _check_claim(name: str, told: str) -> None:
    claim = json.loads(told)
    modes, phase = claim["spec"].get("accessModes") or [], (claim.get("status") or {}).get("phase")
    if "ReadWriteMany" not in modes:
        raise UserError(f"claim {name} is {', '.join(modes)}: only one node could mount it; ReadWriteMany is needed")
    if phase == "Lost":
        raise UserError(f"claim {name} has lost its volume; delete it, and {_MAKE_CLAIM}")


def _reasons(pod: dict[str, Any]) -> list[tuple[str, str]]:
    """Why a pod waits: reason and message, of its containers and of the scheduler."""
    status = pod.get("status") or {}
    waiting = [
        container["state"]["waiting"]
        for part in ("initContainerStatuses", "containerStatuses")
        for container in status.get(part) or []
        if "waiting" in (container.get("state") or {})
    ]
    refused = [condition for condition in status.get("conditions") or [] if condition.get("reason") in _STUCK]
    return [(each.get("reason", ""), each.get("message", "")) for each in [*waiting, *refused]]


def _call(arguments: list[str], meaning: str) -> str:
    command = ["kubectl", *arguments]
    shown = " ".join(command)
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_KUBECTL_S)
    except subprocess.TimeoutExpired:
        raise CommandError(f"no answer within {_KUBECTL_S} s; is the cluster up?", shown, "") from None
    if done.returncode != 0:
        raise CommandError(meaning, shown, done.stderr or done.stdout)
    return done.stdout
