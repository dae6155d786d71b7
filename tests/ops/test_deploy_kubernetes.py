"""The manifests: of the schemas, of each other's names, of metrics that exist, and with time to stop."""

import re
import shutil
import sys
from functools import cache
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from jsonschema import Draft202012Validator

from jobs.common.redis_info import RedisHealth
from jobs.queues.metrics import job_family, queue_families
from jobs.queues.numbers import QueueNumbers
from tests.ops.deployed import (
    DASHBOARD_SETTINGS,
    DEPLOY,
    DRAINED_S,
    LEAVING_S,
    assert_is_a_command,
    assert_settings_exist,
    option,
)
from worker.settings import WorkerSettings

FOLDER = DEPLOY / "kubernetes"
KUBERNETES = "1.37"
OF_OPERATORS = {"ScaledObject", "PodMonitor", "PrometheusRule"}
NUMBERS = QueueNumbers({}, {}, {}, {}, RedisHealth(0, 0, ()))


@cache
def manifests() -> list[dict[str, Any]]:
    files = sorted(path for path in FOLDER.rglob("*.yaml") if path.name != "kustomization.yaml")
    return [each for path in files for each in yaml.load_all(path.read_text(), yaml.CSafeLoader)]


def found(kind: str, name: str = "") -> dict[str, Any]:
    (one,) = [
        each
        for each in manifests()
        if each["kind"] == kind and each["metadata"]["name"].endswith(name)
    ]
    return one


def pod(name: str) -> dict[str, Any]:
    return dict(found("Deployment", name)["spec"]["template"]["spec"])


def container(name: str) -> dict[str, Any]:
    (one,) = pod(name)["containers"]
    return dict(one)


@cache
def of_operators() -> Draft202012Validator:
    return Draft202012Validator(
        yaml.safe_load((Path(__file__).parent / "operator_schemas.yaml").read_text())
    )


def validate(manifest: dict[str, Any]) -> None:
    """Raise ValidationError for what Kubernetes, or the operator of its kind, would refuse or overlook."""
    if manifest["kind"] in OF_OPERATORS:
        of_operators().validate(manifest)
    else:
        kubernetes_validate.validate(manifest, KUBERNETES, strict=True)


def test_each_manifest_is_of_its_schema() -> None:
    kinds = [each["kind"] for each in manifests()]
    assert set(kinds) >= {
        "Deployment",
        "ScaledObject",
        "PodMonitor",
        "NetworkPolicy",
        "PodDisruptionBudget",
    }
    for manifest in manifests():
        validate(manifest)


def test_the_operators_rules_are_those_that_promtool_tests() -> None:
    rules = yaml.safe_load((DEPLOY / "prometheus" / "tokenmill.rules.yml").read_text())
    assert found("PrometheusRule")["spec"] == rules


def test_kustomize_finds_all_its_files_and_leaves_none_out() -> None:
    for kustomization in FOLDER.rglob("kustomization.yaml"):
        named = yaml.safe_load(kustomization.read_text())["resources"]
        folder = kustomization.parent
        assert all((folder / name).exists() for name in named)
        files = {path.name for path in folder.glob("*.yaml")} - {"kustomization.yaml"}
        assert files == {name for name in named if name.endswith(".yaml")}


def test_what_a_pod_writes_and_takes_is_bounded() -> None:
    for name in ("worker", "dashboard", "api"):
        for volume in pod(name)["volumes"]:
            assert "sizeLimit" in volume.get("emptyDir", {"sizeLimit": ""}), volume
        assert "memory" in container(name)["resources"]["limits"]
    spec = pod("worker")
    assert {each["key"] for each in spec["tolerations"]} <= container("worker")["resources"][
        "limits"
    ].keys()
    assert (
        spec["topologySpreadConstraints"][0]["labelSelector"]
        == found("Deployment", "worker")["spec"]["selector"]
    )


def test_each_pod_has_the_authority_that_its_url_names() -> None:
    (authority,) = found("ConfigMap", "ca")["data"]
    secret = found("Secret", "redis")["stringData"]
    for name in ("worker", "dashboard", "api"):
        (mount,) = [each for each in container(name)["volumeMounts"] if each["name"] == "ca"]
        assert secret[f"{name}-url"].endswith(f"?ssl_ca_certs={mount['mountPath']}/{authority}")


def test_a_job_fills_the_volume_of_models_with_the_one_that_is_served() -> None:
    (download,) = found("Job", "model")["spec"]["template"]["spec"]["containers"]
    assert download["args"][:2] == ["hf", "download"]
    assert (
        option(download["args"], "--local-dir")
        == found("ConfigMap", "worker")["data"]["TOKENMILL_MODEL"]
    )
    volumes = {
        each["name"]: each for each in found("Job", "model")["spec"]["template"]["spec"]["volumes"]
    }
    claim = volumes["models"]["persistentVolumeClaim"]["claimName"]
    assert "ReadWriteMany" in found("PersistentVolumeClaim", claim)["spec"]["accessModes"]
    assert shutil.which("hf", path=Path(sys.executable).parent), "the image has transformers' own"


def test_nobody_reaches_a_pod_that_no_policy_names() -> None:
    assert found("NetworkPolicy", "closed")["spec"] == {
        "podSelector": {},
        "policyTypes": ["Ingress"],
    }


def test_a_worker_has_time_to_hand_back_and_to_load() -> None:
    settings = found("ConfigMap", "worker")["data"]
    assert (
        pod("worker")["terminationGracePeriodSeconds"]
        >= int(settings["TOKENMILL_DRAIN_S"]) + LEAVING_S
    )
    probe = container("worker")["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] >= 1800
    assert found("Deployment", "worker")["spec"]["progressDeadlineSeconds"] > 1800


def test_an_api_server_drains_in_its_grace_and_writes_where_workers_read() -> None:
    arguments = container("api")["args"]
    pause_s = int(container("api")["lifecycle"]["preStop"]["exec"]["command"][-1])
    needed_s = pause_s + int(option(arguments, "--drain")) + DRAINED_S
    assert pod("api")["terminationGracePeriodSeconds"] >= needed_s
    root = found("ConfigMap", "worker")["data"]["TOKENMILL_DATA_ROOTS"]
    assert option(arguments, "--folder").startswith(f"{root}/")
    places = {each["name"]: each["mountPath"] for each in container("api")["volumeMounts"]}
    assert places["data"] == root
    lanes = [option(arguments, "--prompts-queue"), option(arguments, "--runs-queue")]
    assert lanes == container("worker")["args"][-2:]


def test_requests_reach_the_api_servers_through_service_and_ingress() -> None:
    spec = found("Service", "api")["spec"]
    labels = found("Deployment", "api")["spec"]["template"]["metadata"]["labels"]
    assert spec["selector"] == labels
    assert spec["ports"][0]["targetPort"] == container("api")["ports"][0]["name"]
    (rule,) = found("Ingress", "api")["spec"]["rules"]
    (path,) = rule["http"]["paths"]
    assert path["path"] == "/v1", "what else there is, such as /metrics, stays within"
    service = path["backend"]["service"]
    assert service["name"] == found("Service", "api")["metadata"]["name"]
    assert service["port"]["name"] == spec["ports"][0]["name"]


def test_what_is_started_takes_its_arguments_and_its_settings(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("worker", "dashboard", "api"):
        assert_is_a_command(container(name)["args"])
    settings = found("ConfigMap", "worker")["data"]
    assert_settings_exist(settings)
    names = {each["name"]: each.get("value") for each in container("dashboard")["env"]}
    assert_settings_exist(names, DASHBOARD_SETTINGS)
    for name, value in {**settings, "TOKENMILL_DATA_ROOTS": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    assert list(WorkerSettings.load().metrics_port) == [
        container("worker")["ports"][0]["containerPort"]
    ]


def test_secrets_settings_ports_and_selectors_are_those_that_there_are() -> None:
    secrets = {each["metadata"]["name"]: each for each in manifests() if each["kind"] == "Secret"}
    for name in ("worker", "dashboard", "api"):
        keys = [each["valueFrom"].get("secretKeyRef") for each in container(name)["env"]]
        for key in filter(None, keys):
            assert key["key"] in secrets[key["name"]]["stringData"]
        labels = found("Deployment", name)["spec"]["template"]["metadata"]["labels"]
        ports = {each["name"] for each in container(name)["ports"]}
        assert found("NetworkPolicy", name)["spec"]["podSelector"]["matchLabels"] == labels
        assert found("NetworkPolicy", name)["spec"]["ingress"][0]["ports"][0]["port"] in ports
        monitor = found("PodMonitor", name)["spec"]
        assert monitor["selector"]["matchLabels"] == labels
        assert {each["port"] for each in monitor["podMetricsEndpoints"]} <= ports
    assert (
        container("worker")["envFrom"][0]["configMapRef"]["name"]
        == found("ConfigMap", "worker")["metadata"]["name"]
    )
    assert found("ScaledObject")["spec"]["scaleTargetRef"]["name"] == "tokenmill-worker"
    assert (
        found("PodDisruptionBudget", "worker")["spec"]["selector"]
        == found("Deployment", "worker")["spec"]["selector"]
    )


def test_workers_are_scaled_by_every_lane_and_by_metrics_that_exist() -> None:
    lanes = container("worker")["args"][-2:]
    queries = [each["metadata"]["query"] for each in found("ScaledObject")["spec"]["triggers"]]
    assert [set(re.findall(r'queue="(\w+)"', query)) for query in queries] == [
        {lane} for lane in lanes
    ]
    counted = [
        each.removeprefix("--queue=")
        for each in container("dashboard")["args"]
        if "--queue" in each
    ]
    assert counted == lanes, "or nobody counts them while there is no worker"
    served = {family.name for family in (job_family({}), *queue_families(NUMBERS))}
    assert {name for query in queries for name in re.findall(r"\b(\w+)\{", query)} <= served
