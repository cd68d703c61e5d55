"""Checks of the pods that a file for KubeRay describes. Each returns what it found, or raises what is wrong."""

import re
from collections.abc import Sequence

from airmoe_ray.config_file import parse_config
from airmoe_ray.errors import UserError
from api.cli.doctor.kubernetes.pods import Document, Pod

_URL = re.compile(r"\b(?:s3|gs|gcs|abfss?|hdfs)://[^\s'\\]+")
_SCRATCH = ("/tmp", "/dev/shm")  # what Ray writes to, whatever the root is


def users(pods: Sequence[Pod]) -> str:
    """Who the pods run as, and whether volumes and a read-only root let that user write."""
    for pod in pods:
        context = pod.spec.get("securityContext") or {}
        if pod.claims and "fsGroup" not in context:
            raise UserError(
                f"{pod.name}: no securityContext.fsGroup, and a fresh volume belongs to root: uid 1000 of the image "
                "could not write to it; set fsGroup: 1000"
            )
        if context.get("runAsUser", 1000) != 1000:
            raise UserError(f"{pod.name}: runAsUser {context['runAsUser']}, the image's files belong to 1000")
        mounted = {mount["mountPath"] for mount in pod.main.get("volumeMounts") or []}
        locked = (pod.main.get("securityContext") or {}).get("readOnlyRootFilesystem")
        if locked and (lacking := [folder for folder in _SCRATCH if folder not in mounted]):
            raise UserError(f"{pod.name}: read-only root, and no volume at {', '.join(lacking)}; mount an emptyDir")
    return f"uid 1000, and volumes are its own, in {', '.join(pod.name for pod in pods)}"


def storage(pods: Sequence[Pod], documents: Sequence[Document]) -> str:
    """One volume that every pod sees under the same path: training reads data and features, and writes runs, there."""
    places = {pod.name: pod.claims for pod in pods}
    shared = set.intersection(*({*claims.items()} for claims in places.values()))
    if not shared and (urls := [url for document in documents for url in _URL.findall(str(document))]):
        return f"runs at {urls[0]}, no common volume"
    if not shared:
        blind = [name for name, claims in places.items() if not claims] or list(places)
        raise UserError(
            f"no volume that every pod sees ({', '.join(blind)}: none): training on many nodes would find neither data "
            "nor run; mount one claim in all of them (kuberay-storage.yaml)"
        )
    for document in documents:
        modes = document.get("spec", {}).get("accessModes") or []
        if document.get("kind") == "PersistentVolumeClaim" and "ReadWriteMany" not in modes:
            raise UserError(
                f"{document['metadata']['name']}: access mode {', '.join(modes)}, and pods of many nodes mount it; "
                "ReadWriteMany, of a class that offers it"
            )
    return ", ".join(f"{claim} at {folder}" for claim, folder in sorted(shared))


def probes(front: Pod) -> str:
    """A front end that may take its time to start, and is ended soon when it hangs later."""
    settings = parse_config({}, re.findall(r"--set ([\w.]+=[\w.]+)(?=\s|$)", front.command)).cluster
    patience = settings.start_deadline_s + settings.autoscale_wait_s
    probe = front.main.get("startupProbe")
    if probe is None:
        raise UserError(
            f"{front.name}: no startupProbe: the liveness probe would end it while it waits for nodes, or come too "
            f"late for one that hangs; add one with periodSeconds x failureThreshold over {patience:g}"
        )
    given = probe.get("periodSeconds", 10) * probe.get("failureThreshold", 3)
    if given < patience:
        raise UserError(
            f"{front.name}: startupProbe gives up after {given} s, the start may take {patience:g} "
            "(cluster.start_deadline_s and autoscale_wait_s); raise failureThreshold"
        )
    if not front.main.get("livenessProbe"):
        raise UserError(f"{front.name}: no livenessProbe: a front end that hangs would stay; add one on /livez")
    return f"{given} s to start"


def steady(front: Pod) -> str:
    """Cloud and channel beside the front end, on a node that nobody takes away: without them no image is answered."""
    share = re.search(r"cluster\.gpus_per_cloud=([\d.]+)", front.command)
    gpus = float(share[1]) if share else None
    if int(front.start.get("num-cpus", 0)) < 1 or (gpus != 0 and int(front.start.get("num-gpus", 0)) < 1):
        raise UserError(
            f"{front.name}: its Ray node has no room for cloud and channel: they would live among experts, and losing "
            "that node stops every answer; give `ray start` --num-cpus (and --num-gpus, or cluster.gpus_per_cloud=0)"
        )
    affinity = ((front.spec.get("affinity") or {}).get("nodeAffinity") or {}).get(
        "requiredDuringSchedulingIgnoredDuringExecution"
    )
    if not affinity and not front.spec.get("nodeSelector"):
        raise UserError(
            f"{front.name}: neither affinity nor nodeSelector keeps it off nodes that may be taken away (spot); losing "
            "its node stops every answer"
        )
    return f"cloud and channel live in {front.name}, off spot nodes"


def metrics(pods: Sequence[Pod]) -> str:
    """Ray's own metrics: a port that is named, exported, and the same in both places."""
    for pod in pods:
        exported, named = pod.start.get("metrics-export-port"), pod.ports.get("metrics")
        if exported is None or named is None or int(exported) != named:
            raise UserError(
                f"{pod.name}: Ray exports metrics on port {exported or 'unknown'}, the port named metrics is "
                f"{named or 'missing'}; state metrics-export-port and a port of that name, or nothing can scrape them"
            )
    return "Ray's metrics on a named port of every pod"
