"""The pods of a file for KubeRay: head, workers and front end, and the secrets and claims they need."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

Document = dict[str, Any]


@dataclass(frozen=True)
class Pod:
    """One kind of pod."""

    name: str
    role: Literal["head", "worker", "front"]
    spec: Document
    start: dict[str, str]  # options of its `ray start`, by name

    @property
    def main(self) -> Document:
        """The container that runs Ray."""
        return self.spec["containers"][0]

    @property
    def containers(self) -> list[Document]:
        """All of them, those that run first included."""
        return [*(self.spec.get("initContainers") or []), *self.spec["containers"]]

    @property
    def command(self) -> str:
        """Command and arguments of the main container."""
        return " ".join([*(self.main.get("command") or []), *(self.main.get("args") or [])])

    @property
    def claims(self) -> dict[str, str]:
        """Claims of volumes, each with the folder that the main container sees it as."""
        volumes = {
            volume["name"]: volume["persistentVolumeClaim"]["claimName"]
            for volume in self.spec.get("volumes") or []
            if "persistentVolumeClaim" in volume
        }
        mounts = self.main.get("volumeMounts") or []
        return {volumes[mount["name"]]: mount["mountPath"] for mount in mounts if mount["name"] in volumes}

    @property
    def ports(self) -> dict[str, int]:
        """Named ports of the main container."""
        return {port["name"]: port["containerPort"] for port in self.main.get("ports") or [] if "name" in port}


def clusters(documents: list[Document]) -> list[Document]:
    """Specifications of Ray clusters: of a RayCluster, or of a RayJob that makes its own."""
    found = [document["spec"] for document in documents if document.get("kind") == "RayCluster"]
    jobs = [document["spec"] for document in documents if document.get("kind") == "RayJob"]
    return found + [job["rayClusterSpec"] for job in jobs]


def pods(documents: list[Document]) -> Iterator[Pod]:
    """Every kind of pod in a file."""
    for cluster in clusters(documents):
        head = cluster["headGroupSpec"]
        yield Pod("head", "head", head["template"]["spec"], head.get("rayStartParams") or {})
        for group in cluster.get("workerGroupSpecs") or []:
            yield Pod(group["groupName"], "worker", group["template"]["spec"], group.get("rayStartParams") or {})
    for document in documents:
        if document.get("kind") == "Deployment":
            spec = document["spec"]["template"]["spec"]
            pod = Pod(document["metadata"]["name"], "front", spec, {})
            _, _, started = pod.command.partition("ray start")
            yield Pod(pod.name, pod.role, spec, dict(re.findall(r"--([a-z-]+)=(\S+)", started.partition("&&")[0])))


def secrets(documents: list[Document]) -> dict[str, set[str]]:
    """The secrets that pods refer to, each with its keys; none of a registry's."""
    found: dict[str, set[str]] = {}
    for cluster in clusters(documents):
        auth = cluster.get("authOptions") or {}
        if "secretName" in auth:
            found.setdefault(auth["secretName"], set()).add("auth_token")
    for pod in pods(documents):
        for container in pod.containers:
            for variable in container.get("env") or []:
                reference = (variable.get("valueFrom") or {}).get("secretKeyRef")
                if reference:
                    found.setdefault(reference["name"], set()).add(reference["key"])
        for registry in pod.spec.get("imagePullSecrets") or []:
            found.setdefault(registry["name"], set())
    return found
