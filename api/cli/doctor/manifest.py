"""Checks a manifest for KubeRay: its objects, images, versions and secrets must agree with each other and with us."""

import importlib.metadata
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from airmoe_ray.errors import UserError
from api.cli.doctor.cluster_file import examples_left
from api.cli.doctor.results import CheckResult, CommandError, run_check

_KINDS = {"RayCluster": "ray.io/v1", "Deployment": "apps/v1", "Service": "v1"}
_KUBECTL_S = 20


def check_manifest(path: Path, documents: list[dict[str, Any]]) -> list[CheckResult]:
    """Results of all checks; if the file itself is wrong, of that one alone."""
    results = [run_check("file", lambda: _objects(path, documents))]
    if not results[0].ok:
        return results
    results += [
        run_check("images", lambda: _images(documents)),
        run_check("ray", lambda: _versions(documents)),
        run_check("token", lambda: _token(documents)),
        run_check("service", lambda: _service(documents)),
        run_check("kubectl", lambda: _kubectl(path, documents)),
    ]
    return results


def pods(documents: list[dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Name and specification of every kind of pod in a manifest."""
    for document in documents:
        spec = document.get("spec") or {}
        if document["kind"] == "RayCluster":
            yield "head", spec["headGroupSpec"]["template"]["spec"]
            for group in spec.get("workerGroupSpecs") or []:
                yield group["groupName"], group["template"]["spec"]
        elif document["kind"] == "Deployment":
            yield document["metadata"]["name"], spec["template"]["spec"]


def secrets(documents: list[dict[str, Any]]) -> dict[str, set[str]]:
    """The secrets that pods refer to, each with its keys."""
    found: dict[str, set[str]] = {}
    for document in documents:
        auth = (document.get("spec") or {}).get("authOptions") or {}
        if "secretName" in auth:
            found.setdefault(auth["secretName"], set()).add("auth_token")
    for _, pod in pods(documents):
        for container in pod["containers"]:
            for variable in container.get("env") or []:
                reference = (variable.get("valueFrom") or {}).get("secretKeyRef")
                if reference:
                    found.setdefault(reference["name"], set()).add(reference["key"])
    return found


def _objects(path: Path, documents: list[dict[str, Any]]) -> str:
    for kind, version in _KINDS.items():
        found = [document for document in documents if document.get("kind") == kind]
        if not found:
            raise UserError(f"{path}: no {kind}; expected a RayCluster, and a Deployment and Service of the front end")
        for document in found:
            if document.get("apiVersion") != version:
                raise UserError(f"{path}: {kind} has apiVersion {document.get('apiVersion')}, expected {version}")
    try:
        count = len(list(pods(documents)))
    except (KeyError, TypeError) as error:
        raise UserError(f"{path}: {error} is missing in a pod's description") from None
    return f"{path}: {len(documents)} objects, {count} kinds of pods"


def _images(documents: list[dict[str, Any]]) -> str:
    if left := examples_left(documents):
        raise UserError(f"{', '.join(left)}: still the example's; put in your own registry")
    found = {container["image"].rpartition(":")[0] for _, pod in pods(documents) for container in pod["containers"]}
    if len(found) != 1:
        raise UserError(
            f"pods use different images ({', '.join(sorted(found))}); Ray and the project must be the same in all"
        )
    return f"all pods use {found.pop()}"


def _versions(documents: list[dict[str, Any]]) -> str:
    ours = importlib.metadata.version("ray")
    given = next(document["spec"].get("rayVersion") for document in documents if document["kind"] == "RayCluster")
    if given != ours:
        raise UserError(f"rayVersion is {given}, the image installs {ours}; set it to {ours}")
    return f"rayVersion {given}"


def _token(documents: list[dict[str, Any]]) -> str:
    cluster = next(document for document in documents if document["kind"] == "RayCluster")
    auth = cluster["spec"].get("authOptions") or {}
    if auth.get("mode") != "token":
        raise UserError("RayCluster has no spec.authOptions.mode: token; anyone in the network could run code on it")
    front = [pod for document in documents if document["kind"] == "Deployment" for _, pod in pods([document])]
    names = {
        variable["name"] for pod in front for container in pod["containers"] for variable in container.get("env") or []
    }
    if lacking := {"RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "AIRMOE_API_KEY"} - names:
        raise UserError(f"the front end has no {', '.join(sorted(lacking))}; it could not join, or would not listen")
    return "needs the secrets " + ", ".join(
        f"{name} ({', '.join(sorted(keys))})" for name, keys in secrets(documents).items()
    )


def _service(documents: list[dict[str, Any]]) -> str:
    service = next(document for document in documents if document["kind"] == "Service")
    deployments = [document for document in documents if document["kind"] == "Deployment"]
    wanted = service["spec"]["selector"]
    matched = [d for d in deployments if wanted.items() <= d["spec"]["template"]["metadata"]["labels"].items()]
    if not matched:
        raise UserError(f"the Service selects {wanted}, no Deployment has these labels")
    return f"port {service['spec']['ports'][0]['port']} leads to {matched[0]['metadata']['name']}"


def _kubectl(path: Path, documents: list[dict[str, Any]]) -> str:
    """Ask the Kubernetes cluster itself whether it takes the file, where kubectl is installed."""
    if shutil.which("kubectl") is None:
        return "not installed here: what is in the Kubernetes cluster cannot be checked"
    _call(["kubectl", "version"], "kubectl reaches no cluster; choose one with `kubectl config use-context`")
    for name in secrets(documents):
        _call(["kubectl", "get", "secret", name], f"secret {name} is not there; docs/cluster.md says how to make it")
    _call(
        ["kubectl", "apply", "--dry-run=server", "-f", str(path)], "the cluster refuses the file; is KubeRay installed?"
    )
    return "the cluster accepts the file, and has the secrets"


def _call(command: list[str], meaning: str) -> None:
    shown = " ".join(command)
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_KUBECTL_S)
    except subprocess.TimeoutExpired:
        raise CommandError(f"no answer within {_KUBECTL_S} s; is the cluster up?", shown, "") from None
    if done.returncode != 0:
        raise CommandError(meaning, shown, done.stderr or done.stdout)
