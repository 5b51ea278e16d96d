"""deploy/kubernetes: valid by Kubernetes' own schemas, and consistent with each other and with the servers' options."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import kubernetes_validate
import promql_parser
import pytest
from manifests import (
    KUBERNETES,
    ROOT,
    SERVERS,
    container,
    deployment,
    objects,
    options_of,
    patched,
    pod,
    resources,
)
from plansmith.serving.metrics.families import FAMILIES

_CUSTOM = {"ServiceMonitor", "Kustomization"}  # not of Kubernetes itself
_PATCHES = {"image-volume.yaml", "gpu.yaml"}
_VERSIONS = ("1.34.0", "1.37.0")
_KILL_S = 5  # between the end of a drain and the end of the process, with room


def _builtin() -> list[tuple[str, dict[str, Any]]]:
    found = []
    for path in sorted(KUBERNETES.rglob("*.yaml")):
        if path.name in _PATCHES or path.name == "prometheus-adapter.yaml":
            continue
        found += [
            (str(path.relative_to(KUBERNETES)), one) for one in objects(path) if one["kind"] not in _CUSTOM
        ]
    return found


@pytest.mark.parametrize("version", _VERSIONS)
def test_every_object_is_valid(version: str) -> None:
    found = _builtin()
    assert len(found) >= 11
    for name, one in found:
        try:
            kubernetes_validate.validate(one, version, strict=True)
        except kubernetes_validate.ValidationError as error:
            pytest.fail(f"{name}: {error.message} at {list(error.path)}")


def test_a_misspelled_field_is_not_valid() -> None:
    one = copy.deepcopy(deployment("triton"))
    one["spec"]["template"]["spec"]["terminationGraceSeconds"] = 5
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(one, _VERSIONS[-1], strict=True)


@pytest.mark.parametrize("name", sorted(_PATCHES))
def test_patches_fit(name: str) -> None:
    base = deployment("triton")
    (patch,) = objects(KUBERNETES / "triton" / name)
    assert patch["metadata"]["name"] == base["metadata"]["name"]
    made = patched(base, patch)
    kubernetes_validate.validate(made, _VERSIONS[-1], strict=True)
    spec = made["spec"]["template"]["spec"]
    if name == "gpu.yaml":
        assert spec["containers"][0]["resources"]["limits"] == {"memory": "8Gi", "nvidia.com/gpu": "1"}
    else:
        (models,) = [one for one in spec["volumes"] if one["name"] == "models"]
        assert set(models) == {"name", "image"} and len(spec["volumes"]) == len(pod("triton")["volumes"])


@pytest.mark.parametrize("server", SERVERS)
def test_options_exist_and_a_drain_fits_into_the_grace_period(server: str, environ: dict[str, str]) -> None:
    one = container(server)
    options = options_of(one["args"], environ)
    drain_s = float(options["--exit-timeout" if server == "triton" else "--drain-seconds"])
    wait_s = one["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert wait_s >= 5
    assert pod(server)["terminationGracePeriodSeconds"] >= wait_s + drain_s + _KILL_S
    assert options["--host"] == "0.0.0.0"
    if server == "openai":
        assert options["--threads"] == one["resources"]["requests"]["cpu"]


@pytest.mark.parametrize("server", SERVERS)
def test_a_container_is_locked_up(server: str) -> None:
    spec, one = pod(server), container(server)
    assert spec["securityContext"]["runAsNonRoot"] and spec["securityContext"]["runAsUser"] > 0
    assert spec["securityContext"]["seccompProfile"]["type"] == "RuntimeDefault"
    assert spec["automountServiceAccountToken"] is False
    own = one["securityContext"]
    assert own["readOnlyRootFilesystem"] and own["allowPrivilegeEscalation"] is False
    assert own["capabilities"]["drop"] == ["ALL"]
    tag = one["image"].rpartition(":")[2]
    assert tag != "latest" and "/" not in tag
    assert one["resources"]["limits"]["memory"] and one["resources"]["requests"]["cpu"]


@pytest.mark.parametrize("server", SERVERS)
def test_mounts_and_volumes_belong_together(server: str) -> None:
    mounts = {one["name"]: one for one in container(server)["volumeMounts"]}
    volumes = {one["name"]: one for one in pod(server)["volumes"]}
    assert mounts.keys() == volumes.keys()
    assert mounts["models"]["readOnly"] and mounts["models"]["mountPath"] == "/models"
    assert any(arg.startswith("/models/") for arg in container(server)["args"])
    for name in mounts.keys() - {"models"}:
        assert volumes[name]["emptyDir"]["sizeLimit"], f"{name} may fill the node's disk"
    claims = [one["metadata"]["name"] for one in objects(KUBERNETES / "models.yaml")]
    assert volumes["models"]["persistentVolumeClaim"]["claimName"] in claims
    if server == "triton":
        places = {one["mountPath"] for one in mounts.values() if not one.get("readOnly")}
        (state_dir,) = [
            arg.partition("=")[2] for arg in container(server)["args"] if arg.startswith("--state-dir")
        ]
        assert {state_dir, "/dev/shm", "/tmp"} == places
        assert volumes["shm"]["emptyDir"]["medium"] == "Memory"


@pytest.mark.parametrize("server", SERVERS)
def test_names_of_ports_and_labels_meet(server: str) -> None:
    kinds = resources(server)
    labels = deployment(server)["spec"]["template"]["metadata"]["labels"]
    ports = {one["name"]: one["containerPort"] for one in container(server)["ports"]}
    probes = [
        container(server)[name]
        for name in ("startupProbe", "readinessProbe", "livenessProbe")
        if name in container(server)
    ]
    assert {one["httpGet"]["port"] for one in probes} == {"http"}
    selectors = [deployment(server)["spec"]["selector"]["matchLabels"]]
    selectors += [one["spec"]["selector"]["matchLabels"] for one in kinds["PodDisruptionBudget"]]
    selectors += [one["spec"]["podSelector"]["matchLabels"] for one in kinds.get("NetworkPolicy", ())]
    selectors += [one["spec"]["selector"] for one in kinds["Service"]]
    for selector in selectors:
        assert selector and selector.items() <= labels.items()
    for service in kinds["Service"]:
        for port in service["spec"]["ports"]:
            assert ports[port["targetPort"]] == port["port"]
    (scaler,) = kinds["HorizontalPodAutoscaler"]
    assert scaler["spec"]["scaleTargetRef"]["name"] == deployment(server)["metadata"]["name"]
    assert scaler["spec"]["minReplicas"] <= deployment(server)["spec"]["replicas"]


@pytest.mark.parametrize("server", SERVERS)
def test_prometheus_finds_one_service_and_the_name_that_the_alerts_expect(server: str) -> None:
    kinds = resources(server)
    (monitor,) = kinds["ServiceMonitor"]
    wanted = monitor["spec"]["selector"]["matchLabels"].items()
    (service,) = [one for one in kinds["Service"] if wanted <= one["metadata"]["labels"].items()]
    (endpoint,) = monitor["spec"]["endpoints"]
    assert endpoint["port"] in [one["name"] for one in service["spec"]["ports"]]
    job = service["metadata"]["labels"][monitor["spec"]["jobLabel"]]
    assert f'job="{job}"' in (ROOT / "docs" / "dashboards" / "alerts.yml").read_text()
    if server == "openai":
        (key,) = [one["valueFrom"]["secretKeyRef"] for one in container(server)["env"]]
        assert endpoint["authorization"]["credentials"] == key


def test_autoscalers_ask_for_metrics_that_there_are() -> None:
    (values,) = objects(KUBERNETES / "prometheus-adapter.yaml")
    rules = {one["name"]["as"]: one for one in values["rules"]["custom"]}
    families = {one.name: one for one in FAMILIES}
    for rule in rules.values():
        query = rule["metricsQuery"].replace("<<.LabelMatchers>>", 'pod="a"').replace("<<.GroupBy>>", "pod")
        for text in (rule["seriesQuery"], query):
            for selector in _selectors(promql_parser.parse(text)):
                family = families[selector.name]
                (state,) = [one.value for one in selector.matchers.matchers if one.name == "state"]
                assert state in family.values, f"{selector.name} has no state {state}"
    for server in SERVERS:
        (scaler,) = resources(server)["HorizontalPodAutoscaler"]
        asked = {one["pods"]["metric"]["name"] for one in scaler["spec"]["metrics"]}
        assert asked == rules.keys()


def _selectors(expression: Any) -> list[Any]:
    if isinstance(expression, promql_parser.VectorSelector):
        return [expression]
    parts = [
        getattr(expression, name)
        for name in ("lhs", "rhs", "expr")
        if getattr(expression, name, None) is not None
    ]
    assert parts, f"nothing is read of {expression}"
    return [found for part in parts for found in _selectors(part)]


def test_every_file_is_listed() -> None:
    for server in SERVERS:
        (listed,) = objects(KUBERNETES / server / "kustomization.yaml")
        files = {one.name for one in (KUBERNETES / server).iterdir()} - {"kustomization.yaml"} - _PATCHES
        assert files == set(listed["resources"])
    for name in _PATCHES:
        assert Path(KUBERNETES / "triton" / name).is_file()
