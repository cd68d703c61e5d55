"""The files for Kubernetes: valid, in agreement with each other and with us, and free of what was wrong with 0.3.0's.

`v0_3_0/kuberay.yaml` is the file as it was shipped then: each check below must find something in it.
"""

import itertools
import json
import re
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from actors.cluster.placement import Node, plan
from airmoe_ray.config_file import load_config, parse_config
from api.cli.doctor.cluster_file import read_documents
from api.cli.doctor.kubernetes.manifest import check_manifest
from api.cli.doctor.kubernetes.pods import Pod, clusters, pods, secrets
from api.cli.doctor.results import CheckResult
from api.http.middleware.front_door import FrontDoor

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "configs/cluster"
SERVE, TRAIN, STORAGE, MONITORING, ALERTS = (
    FOLDER / f"kuberay{end}.yaml" for end in ("", "-train", "-storage", "-monitoring", "-alerts")
)
OLD = Path(__file__).parent / "v0_3_0/kuberay.yaml"
EVERYWHERE = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_max_direct_call_object_size": "1000000",
    "RAY_timeout_ms_task_wait_for_death_info": "0",
}

# Fields of ray.io/v1 that KubeRay knows from 1.6 on: from its published Go types and the API reference in Ray's
# documentation, as far as both could be read. Kubernetes' own types, such as a pod's template, are checked by
# kubernetes-validate
KUBERAY_FIELDS: dict[str, set[str]] = {
    "RayCluster": {"apiVersion", "kind", "metadata", "spec"},
    "RayJob": {"apiVersion", "kind", "metadata", "spec"},
    "RayClusterSpec": {
        *("authOptions", "autoscalerOptions", "enableInTreeAutoscaling", "gcsFaultToleranceOptions", "headGroupSpec"),
        *("headServiceAnnotations", "managedBy", "rayVersion", "suspend", "workerGroupSpecs"),
    },
    "AuthOptions": {"mode", "secretName", "enableK8sTokenAuth"},
    "AutoscalerOptions": {
        *("resources", "image", "imagePullPolicy", "securityContext", "idleTimeoutSeconds", "upscalingMode", "version"),
        *("env", "envFrom", "volumeMounts"),
    },
    "HeadGroupSpec": {
        *("template", "headService", "enableIngress", "rayStartParams", "serviceType"),
    },
    "WorkerGroupSpec": {
        *("suspend", "groupName", "replicas", "minReplicas", "maxReplicas", "idleTimeoutSeconds"),
        *("rayStartParams", "template", "scaleStrategy", "numOfHosts"),
    },
    "RayJobSpec": {
        *("activeDeadlineSeconds", "backoffLimit", "clusterSelector", "deletionStrategy", "entrypoint"),
        *("entrypointNumCpus", "entrypointNumGpus", "entrypointResources", "jobId", "managedBy", "metadata"),
        *("rayClusterSpec", "runtimeEnvYAML", "shutdownAfterJobFinishes"),
        *("submissionMode", "submitterConfig", "submitterPodTemplate", "suspend", "ttlSecondsAfterFinished"),
    },
}
# of the Prometheus Operator's monitoring.coreos.com/v1, those that are used
MONITOR_FIELDS = {"port", "path", "interval", "authorization", "relabelings"}


def filled_in(path: Path, folder: Path, old: str = "", new: str = "") -> Path:
    """The file with a registry of someone's own, and one more change."""
    text = path.read_text()
    assert old in text
    (folder / "mine.yaml").write_text(text.replace("registry.example.org", "registry.internal").replace(old, new))
    return folder / "mine.yaml"


@pytest.fixture
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder, and no kubectl: nobody to ask."""
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    return tmp_path


def doctor(path: Path) -> dict[str, CheckResult]:
    return {result.check: result for result in check_manifest(path, read_documents(path))}


def pod(path: Path, name: str) -> Pod:
    return next(pod for pod in pods(read_documents(path)) if pod.name == name)


# valid


@pytest.mark.parametrize("path", [SERVE, TRAIN, STORAGE], ids=lambda path: path.name)
def test_kubernetes_accepts_its_own_kinds_and_every_pod(path: Path) -> None:
    documents = read_documents(path)
    own = [document for document in documents if not document["apiVersion"].startswith("ray.io")]
    templates = [
        {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": pod.name}, "spec": pod.spec} for pod in pods(documents)
    ]
    assert own
    for document in own + templates:
        kubernetes_validate.validate(document, "1.31", strict=True)


def test_a_misspelt_field_of_a_pod_is_refused() -> None:
    spec = {**pod(SERVE, "head").spec, "securityContexts": {}}
    document = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "head"}, "spec": spec}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(document, "1.31", strict=True)


def unknown_fields(documents: list[dict[str, Any]]) -> set[str]:
    """Fields of KubeRay's objects that its reference does not list."""
    found = set()

    def look(kind: str, value: dict[str, Any]) -> None:
        found.update(f"{kind}.{field}" for field in value.keys() - KUBERAY_FIELDS[kind])

    for document in documents:
        if document["apiVersion"] == "ray.io/v1":
            look(document["kind"], document)
        if document["kind"] == "RayJob":
            look("RayJobSpec", document["spec"])
    for cluster in clusters(documents):
        look("RayClusterSpec", cluster)
        look("AuthOptions", cluster["authOptions"])
        look("AutoscalerOptions", cluster.get("autoscalerOptions", {}))
        look("HeadGroupSpec", cluster["headGroupSpec"])
        for group in cluster["workerGroupSpecs"]:
            look("WorkerGroupSpec", group)
    return found


@pytest.mark.parametrize("path", [SERVE, TRAIN], ids=lambda path: path.name)
def test_kuberay_1_6_knows_every_field(path: Path) -> None:
    documents = read_documents(path)
    assert unknown_fields(documents) == set()
    clusters(documents)[0]["headGroupSpec"]["rayStartParam"] = {}
    assert unknown_fields(documents) == {"HeadGroupSpec.rayStartParam"}
    assert all(isinstance(value, str) for pod in pods(read_documents(path)) for value in pod.start.values())


# one test for each thing that was wrong: found by doctor in the file of 0.3.0, and no more in ours


@pytest.mark.parametrize("path", [SERVE, TRAIN], ids=lambda path: path.name)
def test_doctor_finds_nothing_wrong_with_the_files(path: Path, alone: Path) -> None:
    results = doctor(filled_in(path, alone))
    assert [result.message for result in results.values() if not result.ok] == []
    assert len(results) > 6


@pytest.mark.parametrize(
    ("check", "words"),
    [
        ("users", "airmoe-front: no securityContext.fsGroup"),
        ("probes", "airmoe-front: no startupProbe"),
        ("storage", "no volume that every pod sees (head, gpu: none)"),
        ("cloud's node", "airmoe-front: its Ray node has no room for cloud and channel"),
        ("metrics", "head: Ray exports metrics on port unknown, the port named metrics is missing"),
    ],
)
def test_doctor_finds_what_was_wrong_with_the_file_of_0_3_0(check: str, words: str, alone: Path) -> None:
    result = doctor(filled_in(OLD, alone))[check]
    assert not result.ok
    assert words in result.message


@pytest.mark.parametrize(
    ("check", "old", "new", "words"),
    [
        ("users", "fsGroup: 1000", "supplementalGroups: [1000]", "head: no securityContext.fsGroup"),
        ("users", "{name: tmp, mountPath: /tmp}", "{name: tmp, mountPath: /scratch}", "no volume at /tmp"),
        ("users", "runAsUser: 1000", "runAsUser: 0", "head: runAsUser 0"),
        ("probes", "failureThreshold: 180", "failureThreshold: 60", "gives up after 600 s, the start may take 1500"),
        ("probes", "livenessProbe:", "#", "no livenessProbe"),
        ("cloud's node", "gpus_per_cloud=0", "gpus_per_cloud=0.5", "no room for cloud and channel"),
        ("cloud's node", "required", "preferred", "keeps it off nodes that may be taken away"),
        ("metrics", "metrics, containerPort: 8080", "metrics, containerPort: 8081", "port named metrics is 8081"),
        (
            "storage",
            f"{' ' * 12}- {{name: shared, mountPath: /srv/airmoe}}\n      v",
            "      v",
            "(airmoe-front: none)",
        ),
        ("token", "mode: token", "mode: disabled", "anyone in the network could run code on it"),
        ("ray", "rayVersion: 2.60.0", "rayVersion: 2.9.0", "rayVersion is 2.9.0"),
    ],
)
def test_doctor_finds_what_someone_may_break(check: str, old: str, new: str, words: str, alone: Path) -> None:
    result = doctor(filled_in(SERVE, alone, old, new))[check]
    assert not result.ok
    assert words in result.message
    assert "\n" not in result.message


def test_a_claim_that_one_node_alone_can_mount_is_told(alone: Path) -> None:
    claim = STORAGE.read_text().replace("ReadWriteMany]", "ReadWriteOnce]")
    mine = filled_in(SERVE, alone)
    mine.write_text(mine.read_text() + "---\n" + claim)
    assert "access mode ReadWriteOnce" in doctor(mine)["storage"].message


def test_a_run_at_a_url_needs_no_common_volume(alone: Path) -> None:
    mine = filled_in(TRAIN, alone, "--run /srv/airmoe/runs/cityscapes", "--run s3://bucket/runs/cityscapes")
    mine.write_text(mine.read_text().replace("- {name: shared, mountPath: /srv/airmoe}", ""))
    assert doctor(mine)["storage"].message == "runs at s3://bucket/runs/cityscapes, no common volume"


# in agreement


def test_secrets_and_claims_are_those_that_the_pages_tell_to_make() -> None:
    assert secrets(read_documents(SERVE)) == {
        "airmoe-ray-token": {"auth_token"},
        "airmoe-keys": {"api_key", "admin_token"},
    }
    (claim,) = read_documents(STORAGE)
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    for path in (SERVE, TRAIN):
        assert {name for pod in pods(read_documents(path)) for name in pod.claims} == {claim["metadata"]["name"]}


def test_the_front_end_joins_the_files_own_cluster() -> None:
    cluster = next(document for document in read_documents(SERVE) if document["kind"] == "RayCluster")
    assert pod(SERVE, "airmoe-front").start["address"] == f"{cluster['metadata']['name']}-head-svc:6379"


@pytest.mark.parametrize("path", [SERVE, TRAIN], ids=lambda path: path.name)
def test_every_pod_states_the_settings_and_is_locked_down(path: Path) -> None:
    for each in pods(read_documents(path)):
        stated = {variable["name"]: variable.get("value") for variable in each.main["env"]}
        assert EVERYWHERE.items() <= stated.items(), each.name
        assert each.spec["securityContext"]["runAsNonRoot"]
        for container in each.containers:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }


def said(pod: Pod, folder: Path, **environment: str) -> list[str]:
    """What a pod's command calls `airmoe` with, where `ray` and `airmoe` only write down what they see."""
    for program in ("ray", "airmoe"):
        (folder / program).write_text(f'#!/bin/sh\nenv > {folder}/{program}.env; printf "%s\\n" "$@" > {folder}/said\n')
        (folder / program).chmod(0o755)
    given = {"PATH": f"{folder}:/usr/bin:/bin", **environment}
    subprocess.run([*pod.main["command"], *pod.main["args"]], env=given, check=True)
    return (folder / "said").read_text().splitlines()


def settings(arguments: list[str]) -> list[str]:
    return [value for option, value in itertools.pairwise(arguments) if option == "--set"]


def test_the_front_end_answers_to_its_service_and_keeps_its_keys_from_ray(tmp_path: Path) -> None:
    front = pod(SERVE, "airmoe-front")
    arguments = said(front, tmp_path, NAMESPACE="lab", AIRMOE_API_KEY="k", AIRMOE_ADMIN_TOKEN="t")
    assert "AIRMOE" not in (tmp_path / "ray.env").read_text()
    assert "AIRMOE_API_KEY=k" in (tmp_path / "airmoe.env").read_text()
    config = parse_config({}, settings(arguments))
    door = FrontDoor(arguments[arguments.index("--host") + 1], config.serve.hosts)
    service = next(document for document in read_documents(SERVE) if document["kind"] == "Service")["metadata"]["name"]
    for host in (service, f"{service}.lab", f"{service}.lab.svc", f"{service}.lab.svc.cluster.local", "10.1.2.3:8000"):
        assert door.refusal({"method": "GET", "path": "/metrics", "headers": [(b"host", host.encode())]}) is None
    assert door.refusal({"method": "GET", "path": "/metrics", "headers": [(b"host", b"airmoe.other")]}) is not None


def test_cloud_and_channel_have_room_beside_the_front_end_and_experts_have_not(tmp_path: Path) -> None:
    front, experts = pod(SERVE, "airmoe-front"), pod(SERVE, "experts")
    config = parse_config({}, settings(said(front, tmp_path, NAMESPACE="lab")))
    gpus = experts.main["resources"]["limits"]["nvidia.com/gpu"]
    workers = [Node(cpus=3, gpus=gpus)] * clusters(read_documents(SERVE))[0]["workerGroupSpecs"][0]["maxReplicas"]
    cpus = int(front.start["num-cpus"])
    found = plan(config.cluster, 10, [Node(cpus=0, gpus=0), Node(cpus=cpus, gpus=0), *workers])
    # as `reserve` asks of the front end's own node
    assert cpus >= 2 * found.cpus
    assert found.gpus_per_cloud == 0
    # without a GPU there, no expert's bundle can go there
    assert found.gpus_per_expert > 0


def test_who_may_not_be_lost_is_kept_off_spot_nodes_and_experts_are_let_on_them() -> None:
    def terms(pod: Pod) -> list[dict[str, Any]]:
        affinity = pod.spec["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
        (term,) = affinity["nodeSelectorTerms"]  # several would be alternatives
        return term["matchExpressions"]

    assert terms(pod(SERVE, "head")) == terms(pod(SERVE, "airmoe-front")) == terms(pod(TRAIN, "head"))
    assert {term["operator"] for term in terms(pod(SERVE, "head"))} == {"NotIn"}  # also matches nodes without the label
    kept_off = {term["key"] for term in terms(pod(SERVE, "head"))}
    experts = pod(SERVE, "experts").spec
    preferred = experts["affinity"]["nodeAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
    assert {each["preference"]["matchExpressions"][0]["key"] for each in preferred} == kept_off
    assert "nvidia.com/gpu" in {toleration["key"] for toleration in experts["tolerations"]}


# training


def test_the_job_trains_as_the_command_line_understands_it_and_resumes_when_tried_again(tmp_path: Path) -> None:
    script = next(document for document in read_documents(TRAIN) if document["kind"] == "ConfigMap")["data"]["train.sh"]
    (tmp_path / "airmoe").write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    (tmp_path / "airmoe").chmod(0o755)
    script = script.replace("/srv/airmoe", str(tmp_path / "volume"))

    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    done = subprocess.run(["bash", "-c", script], env=environment, capture_output=True, text=True, check=True)
    given = done.stdout.splitlines()
    assert given[:7] == ["train", "--address", "auto", "--workers", "8", "--config", "cityscapes"]
    assert "--resume-or-begin" in given  # what it does is tested with the verb
    config = load_config("cityscapes", settings(given))
    assert config.data.root == f"{tmp_path}/volume/data/cityscapes"


def test_the_job_has_a_gpu_for_every_worker_and_its_script_where_it_is_called() -> None:
    documents = read_documents(TRAIN)
    job = next(document for document in documents if document["kind"] == "RayJob")["spec"]
    (group,) = job["rayClusterSpec"]["workerGroupSpecs"]
    script = next(document for document in documents if document["kind"] == "ConfigMap")["data"]["train.sh"]
    wanted = int(re.search(r"--workers (\d+)", script)[1])  # type: ignore[index]
    limits = pod(TRAIN, "trainers").main["resources"]["limits"]
    assert group["replicas"] == group["minReplicas"] == group["maxReplicas"] == wanted
    assert limits["nvidia.com/gpu"] == 1
    folder = next(m["mountPath"] for m in pod(TRAIN, "head").main["volumeMounts"] if m["name"] == "script")
    assert job["entrypoint"] == f"bash {folder}/train.sh"


# watching


def test_every_monitored_port_is_a_port_of_the_pods_it_selects() -> None:
    front, ray = read_documents(MONITORING)
    assert {document["apiVersion"] for document in (front, ray)} == {"monitoring.coreos.com/v1"}
    labels = next(d for d in read_documents(SERVE) if d["kind"] == "Deployment")["spec"]["template"]["metadata"][
        "labels"
    ]
    assert front["spec"]["selector"]["matchLabels"].items() <= labels.items()
    for endpoint in front["spec"]["podMetricsEndpoints"]:
        assert endpoint["port"] in pod(SERVE, "airmoe-front").ports
    for endpoint in ray["spec"]["podMetricsEndpoints"]:
        for path, name in ((SERVE, "head"), (SERVE, "experts"), (TRAIN, "head"), (TRAIN, "trainers")):
            assert endpoint["port"] in pod(path, name).ports
    for document in (front, ray):
        for endpoint in document["spec"]["podMetricsEndpoints"]:
            assert endpoint.keys() <= MONITOR_FIELDS


def test_the_front_end_is_scraped_with_its_key_under_the_jobs_that_rules_and_dashboard_know() -> None:
    endpoints = [end for document in read_documents(MONITORING) for end in document["spec"]["podMetricsEndpoints"]]
    jobs = {end["port"]: end["relabelings"] for end in endpoints}
    assert jobs == {
        "http": [{"targetLabel": "job", "replacement": "airmoe"}],
        "metrics": [{"targetLabel": "job", "replacement": "ray"}],
    }
    key = next(end for end in endpoints if end["port"] == "http")["authorization"]["credentials"]
    assert key["key"] in secrets(read_documents(SERVE))[key["name"]]


def test_the_alerts_for_kubernetes_are_those_of_the_rules() -> None:
    (document,) = read_documents(ALERTS)
    assert (document["apiVersion"], document["kind"]) == ("monitoring.coreos.com/v1", "PrometheusRule")
    names = ("airmoe.rules.yml", "airmoe.alerts.yml")
    groups = [
        group for name in names for group in yaml.safe_load((ROOT / "dashboards/rules" / name).read_text())["groups"]
    ]
    assert document["spec"]["groups"] == groups


# the Kubernetes cluster itself, of which a program plays the part: answers by command, as JSON


KUBECTL = """#!/usr/bin/python3
import json, pathlib, sys
answers = json.loads(pathlib.Path(__file__).with_name("answers.json").read_text())
command = " ".join(sys.argv[1:])
found = next((answer for words, answer in answers.items() if command.startswith(words)), {})
if isinstance(found, str):
    sys.exit(found)
print(json.dumps(found))
"""
OPERATOR = {"items": [{"spec": {"template": {"spec": {"containers": [{"image": "quay/kuberay/operator:v1.6.2"}]}}}}]}
CLAIM = {"spec": {"accessModes": ["ReadWriteMany"]}, "status": {"phase": "Bound"}}


def waiting(reason: str, message: str) -> dict[str, Any]:
    image = pod(SERVE, "head").main["image"].replace("example.org", "internal")
    status = {"containerStatuses": [{"state": {"waiting": {"reason": reason, "message": message}}}]}
    return {"metadata": {"name": "airmoe-head"}, "spec": {"containers": [{"image": image}]}, "status": status}


@pytest.mark.parametrize(
    ("answers", "check", "words"),
    [
        ({}, "kubectl", "KubeRay v1.6.2"),
        ({"version": "The connection was refused"}, "kubectl", "kubectl reaches no cluster"),
        ({"get deployments": {"items": []}}, "kubectl", "no KubeRay operator in the cluster; install 1.6"),
        (
            {"get deployments": json.loads(json.dumps(OPERATOR).replace("v1.6.2", "v1.4.0"))},
            "kubectl",
            "KubeRay operator v1.4.0, 1.6 or newer is needed",
        ),
        ({"get secret airmoe-keys": "not found"}, "kubectl", "secret airmoe-keys is not there"),
        (
            {"get pvc": "not found"},
            "kubectl",
            "claim airmoe-shared is not there; kubectl apply -f kuberay-storage.yaml",
        ),
        ({"get pvc": {"spec": {"accessModes": ["ReadWriteOnce"]}}}, "kubectl", "is ReadWriteOnce: only one node"),
        ({"apply": "no matches for kind"}, "kubectl", "the cluster refuses the file"),
        (
            {"get pods": {"items": [waiting("ErrImagePull", "pull access denied,\nrepository does not exist")]}},
            "pods",
            "pod airmoe-head: ErrImagePull: the image cannot be pulled: is it pushed, and does the pod have "
            "imagePullSecrets? (pull access denied, repository does not exist)",
        ),
        ({"get pods": {"items": [waiting("ContainerCreating", "")]}}, "pods", "1 there, none is stuck"),
    ],
)
def test_what_the_cluster_lacks_is_told_in_one_line(
    answers: dict[str, Any], check: str, words: str, alone: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (alone / "bin" / "kubectl").write_text(KUBECTL)
    (alone / "bin" / "kubectl").chmod(0o755)
    usual = {"get deployments": OPERATOR, "get pvc": CLAIM, "get pods": {"items": []}}
    (alone / "bin" / "answers.json").write_text(json.dumps(usual | answers))
    result = doctor(filled_in(SERVE, alone))[check]
    assert words in result.message
    assert "\n" not in result.message
    assert result.ok == (not answers or "none is stuck" in words)
