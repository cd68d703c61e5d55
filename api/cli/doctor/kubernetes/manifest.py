"""Checks a file for KubeRay: its objects, images, versions and secrets must agree with each other and with us."""

import importlib.metadata
from collections.abc import Callable
from pathlib import Path

from airmoe_ray.errors import UserError
from api.cli.doctor import image
from api.cli.doctor.cluster_file import examples_left
from api.cli.doctor.kubernetes import kubectl, pod_checks
from api.cli.doctor.kubernetes.pods import Document, Pod, clusters, pods, secrets
from api.cli.doctor.results import CheckResult, run_check

_VERSIONS = {"RayCluster": "ray.io/v1", "RayJob": "ray.io/v1", "Deployment": "apps/v1", "Service": "v1"}
_SERVES = ("RayCluster", "Deployment", "Service")  # or a RayJob alone, which trains


def check_manifest(path: Path, documents: list[Document]) -> list[CheckResult]:
    """Results of all checks; if the file itself is wrong, of that one alone."""
    results = [run_check("file", lambda: _objects(path, documents))]
    if not results[0].ok:
        return results
    all_pods = list(pods(documents))
    fronts = [pod for pod in all_pods if pod.role == "front"]
    checks: dict[str, Callable[[], str]] = {
        "images": lambda: _images(documents, all_pods),
        "registry": lambda: image.pullable(sorted({c["image"] for pod in all_pods for c in pod.containers})),
        "ray": lambda: _versions(documents),
        "token": lambda: _token(documents, fronts),
        "users": lambda: pod_checks.users(all_pods),
        "storage": lambda: pod_checks.storage(all_pods, documents),
        "metrics": lambda: pod_checks.metrics(all_pods),
    }
    if fronts:
        checks |= {
            "service": lambda: _service(documents),
            "probes": lambda: pod_checks.probes(fronts[0]),
            "cloud's node": lambda: pod_checks.steady(fronts[0]),
        }
    results += [run_check(name, check) for name, check in checks.items()]
    if not kubectl.installed():
        unseen = "not installed here: what is in the Kubernetes cluster cannot be checked"
        return [*results, CheckResult("kubectl", True, unseen)]
    results.append(run_check("kubectl", lambda: kubectl.accepts(path, documents)))
    return [*results, run_check("pods", lambda: kubectl.stuck(documents))] if results[-1].ok else results


def _objects(path: Path, documents: list[Document]) -> str:
    kinds = {document.get("kind") for document in documents}
    if "RayJob" not in kinds and (lacking := [kind for kind in _SERVES if kind not in kinds]):
        raise UserError(
            f"{path}: no {lacking[0]}; expected a RayCluster, a Deployment and a Service for the front end, or a RayJob"
        )
    for document in documents:
        wanted = _VERSIONS.get(document.get("kind", ""), document.get("apiVersion"))
        if document.get("apiVersion") != wanted:
            raise UserError(
                f"{path}: {document['kind']} has apiVersion {document.get('apiVersion')}, expected {wanted}"
            )
    try:
        count = len(list(pods(documents)))
    except (KeyError, TypeError) as error:
        raise UserError(f"{path}: {error} is missing in a pod's description") from None
    return f"{path}: {len(documents)} objects, {count} kinds of pods"


def _images(documents: list[Document], all_pods: list[Pod]) -> str:
    if left := examples_left(documents):
        raise UserError(f"{', '.join(left)}: still the example's; put in your own registry")
    found = {container["image"].rpartition(":")[0] for pod in all_pods for container in pod.containers}
    if len(found) != 1:
        raise UserError(
            f"pods use different images ({', '.join(sorted(found))}); Ray and the project must be the same in all"
        )
    return f"all pods use {found.pop()}"


def _versions(documents: list[Document]) -> str:
    ours = importlib.metadata.version("ray")
    for cluster in clusters(documents):
        given = cluster.get("rayVersion")
        if given != ours:
            raise UserError(f"rayVersion is {given}, the image installs {ours}; set it to {ours}")
    return f"rayVersion {ours}"


def _token(documents: list[Document], fronts: list[Pod]) -> str:
    for cluster in clusters(documents):
        if (cluster.get("authOptions") or {}).get("mode") != "token":
            raise UserError("no authOptions.mode: token in a Ray cluster; anyone in the network could run code on it")
    for front in fronts:
        names = {variable["name"] for variable in front.main.get("env") or []}
        if lacking := {"RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "AIRMOE_API_KEY"} - names:
            raise UserError(
                f"the front end has no {', '.join(sorted(lacking))}; it could not join, or would not listen"
            )
    needed = secrets(documents)
    return "needs the secrets " + ", ".join(f"{name} ({', '.join(sorted(keys))})" for name, keys in needed.items())


def _service(documents: list[Document]) -> str:
    service = next(document for document in documents if document["kind"] == "Service")
    deployments = [document for document in documents if document["kind"] == "Deployment"]
    wanted = service["spec"]["selector"]
    matched = [d for d in deployments if wanted.items() <= d["spec"]["template"]["metadata"]["labels"].items()]
    if not matched:
        raise UserError(f"the Service selects {wanted}, no Deployment has these labels")
    return f"port {service['spec']['ports'][0]['port']} leads to {matched[0]['metadata']['name']}"
