"""The chart, the plain manifests and the Dockerfile: what can be checked without a cluster."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import tomli
import yaml
from kubernetes.client import models

from agl_core import __version__
from agl_core.app import load
from agl_core.config import read_config

ROOT = Path(__file__).parents[2]
CHART = ROOT / "deploy" / "helm" / "agl-lite"
BASE = ROOT / "deploy" / "kustomize" / "base"
KEYS = ("AGL_ALGORITHM_KEY", "AGL_CONTROLLER_KEY", "AGL_VIEWER_KEY", "AGL_TOKEN_KEY")

# All that the code does on the API server, and no more.
RIGHTS = {
    ("batch", "jobs"): {"create", "get", "list", "watch", "delete"},
    ("", "pods"): {"list", "watch", "delete"},
    ("", "pods/log"): {"get"},
    ("", "events"): {"list"},
    ("", "secrets"): {"create"},
    ("coordination.k8s.io", "leases"): {"create", "get", "update"},
}

MODELS = {
    "Service": models.V1Service,
    "Deployment": models.V1Deployment,
    "ServiceAccount": models.V1ServiceAccount,
    "Role": models.V1Role,
    "RoleBinding": models.V1RoleBinding,
    "PodDisruptionBudget": models.V1PodDisruptionBudget,
    "NetworkPolicy": models.V1NetworkPolicy,
    "ConfigMap": models.V1ConfigMap,
    "Secret": models.V1Secret,
}


def faults_of(value: Any, type_name: str, path: str) -> Iterator[str]:
    """What in a value is not as the OpenAPI models of the client have it."""
    if value is None:
        return
    if type_name.startswith("List["):
        if not isinstance(value, list):
            yield f"{path}: not a list"
            return
        for place, item in enumerate(value):
            yield from faults_of(item, type_name[5:-1], f"{path}[{place}]")
    elif type_name.startswith("Dict["):
        if not isinstance(value, dict):
            yield f"{path}: not an object"
            return
        for name, item in value.items():
            yield from faults_of(item, type_name[5:-1].split(", ")[1], f"{path}.{name}")
    elif (model := getattr(models, type_name, None)) is not None and hasattr(
        model, "openapi_types"
    ):
        if not isinstance(value, dict):
            if type_name != "IntOrString":
                yield f"{path}: not an object"
            return
        fields = {wire: model.openapi_types[name] for name, wire in model.attribute_map.items()}
        for name, item in value.items():
            if name not in fields:
                yield f"{path}.{name}: unknown"
            else:
                yield from faults_of(item, fields[name], f"{path}.{name}")
    else:
        wanted = {"str": str, "int": int, "bool": bool, "float": (int, float)}.get(type_name)
        if wanted is not None and not isinstance(value, wanted):
            yield f"{path}: {value!r} is no {type_name}"


def faults_in(documents: list[dict[str, Any]]) -> list[str]:
    found = []
    for item in documents:
        name = f"{item['kind']}/{item['metadata']['name']}"
        found += faults_of(item, MODELS[item["kind"]].__name__, name)
    return found


def plain_manifests() -> list[dict[str, Any]]:
    listed = yaml.safe_load((BASE / "kustomization.yaml").read_text())["resources"]
    return [
        item for name in listed for item in yaml.safe_load_all((BASE / name).read_text()) if item
    ]


def one(documents: list[dict[str, Any]], kind: str, name: str) -> dict[str, Any]:
    (found,) = [d for d in documents if d["kind"] == kind and d["metadata"]["name"] == name]
    return found


def rights_of(role: dict[str, Any]) -> dict[tuple[str, str], set[str]]:
    return {
        (group, resource): set(rule["verbs"])
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
    }


@pytest.fixture(scope="module")
def rendered() -> list[dict[str, Any]]:
    """What the chart becomes with its own values."""
    helm = shutil.which("helm")
    if helm is None:
        pytest.skip("helm is not installed")
    command = [helm, "template", "agl", str(CHART), "--namespace", "rl"]
    text = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    return [item for item in yaml.safe_load_all(text) if item]


def test_the_check_finds_faults() -> None:
    bad = {"kind": "Service", "metadata": {"name": "x", "lables": {}}, "spec": {"ports": {"a": 1}}}
    assert faults_in([bad]) == [
        "Service/x.metadata.lables: unknown",
        "Service/x.spec.ports: not a list",
    ]


def test_plain_manifests_are_what_the_api_server_takes() -> None:
    assert faults_in(plain_manifests()) == []


def test_chart_renders_what_the_api_server_takes(rendered: list[dict[str, Any]]) -> None:
    assert faults_in(rendered) == []
    assert {(d["kind"]) for d in rendered} >= {d["kind"] for d in plain_manifests()}


def test_every_file_of_the_base_is_listed_and_there() -> None:
    listed = yaml.safe_load((BASE / "kustomization.yaml").read_text())
    named = {*listed["resources"], *listed["configMapGenerator"][0]["files"], "kustomization.yaml"}
    assert {path.name for path in BASE.iterdir()} == named


def test_controller_has_the_rights_that_it_uses_and_no_other() -> None:
    role = one(plain_manifests(), "Role", "agl-lite-controller")
    assert rights_of(role) == RIGHTS
    text = (CHART / "templates" / "rbac.yaml").read_text()
    rules = re.search(r"^rules:\n((?:  - .*\n)+)", text, re.MULTILINE)
    assert rules is not None
    assert rights_of({"rules": yaml.safe_load(rules.group(1))}) == RIGHTS


@pytest.mark.parametrize("name", ["service.toml", "controller.toml"])
def test_configuration_passes_the_loader(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for key in KEYS:
        monkeypatch.setenv(key, f"the value of {key}")
    loaded = load(read_config(BASE / name))
    assert loaded.settings.plugins.enabled


def test_charts_configuration_passes_the_loader(
    rendered: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for key in KEYS:
        monkeypatch.setenv(key, f"the value of {key}")
    for name, text in one(rendered, "ConfigMap", "agl")["data"].items():
        path = tmp_path / name
        path.write_text(text)
        assert load(read_config(path)).settings.plugins.enabled


@pytest.mark.parametrize("name", ["agl-lite", "agl-lite-controller"])
def test_pods_have_the_least_rights_and_get_their_keys_from_the_secret(name: str) -> None:
    pod = one(plain_manifests(), "Deployment", name)["spec"]["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    (container,) = pod["containers"]
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert all("secretKeyRef" in entry["valueFrom"] for entry in container["env"])
    assert container["livenessProbe"]
    assert container["resources"]["limits"]["memory"]


def test_service_may_end_its_calls_before_it_is_killed() -> None:
    pod = one(plain_manifests(), "Deployment", "agl-lite")["spec"]["template"]["spec"]
    grace = tomli.loads((BASE / "service.toml").read_text())["server"]["grace_seconds"]
    assert pod["terminationGracePeriodSeconds"] > grace


def test_agents_reach_the_service_and_names_alone() -> None:
    policy = one(plain_manifests(), "NetworkPolicy", "agl-lite-agents")["spec"]
    assert policy["podSelector"]["matchLabels"]["app.kubernetes.io/managed-by"] == "agl-lite"
    assert set(policy["policyTypes"]) == {"Ingress", "Egress"}
    assert policy["ingress"] == []
    ports = [{port["port"] for port in rule["ports"]} for rule in policy["egress"]]
    assert ports == [{8080}, {53}]
    assert all(rule["to"] for rule in policy["egress"])


def test_chart_is_of_this_version_and_its_values_fit_its_schema() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert (chart["version"], chart["appVersion"]) == (__version__, __version__)
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    schema = json.loads((CHART / "values.schema.json").read_text())
    jsonschema.validate(values, schema)
    values["service"]["replicas"] = 2
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(values, schema)


def test_templates_use_values_that_exist_and_blocks_are_closed() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    for path in (CHART / "templates").iterdir():
        text = path.read_text()
        for dotted in re.findall(r"\.Values\.([A-Za-z.]+)", text):
            found: Any = values
            for name in dotted.split("."):
                assert name in found, f"{path.name}: .Values.{dotted}"
                found = found[name]
        opened = re.findall(r"\{\{-?\s*(if|range|with|define)\b", text)
        closed = re.findall(r"\{\{-?\s*end\b", text)
        assert len(opened) == len(closed), path.name
        defined = re.findall(r'define "([^"]+)"', (CHART / "templates" / "_names.tpl").read_text())
        assert set(re.findall(r'include "([^"]+)"', text)) <= set(defined), path.name


def test_image_is_built_in_stages_and_runs_as_nobody_special() -> None:
    lines = (ROOT / "deploy" / "Dockerfile").read_text().splitlines()
    stages = [line for line in lines if line.startswith("FROM ")]
    assert len(stages) == 2
    last = lines[lines.index(stages[-1]) :]
    (user,) = [line for line in last if line.startswith("USER ")]
    assert user == "USER 10001:10001"
    assert not any("pip install" in line for line in last)
    copied = {word for line in lines if line.startswith("COPY ") for word in line.split()[1:-1]}
    for name in copied - {"--from=build", "/opt/agl"}:
        assert (ROOT / name).exists(), name
    allowed = (ROOT / ".dockerignore").read_text().splitlines()
    assert {line[1:] for line in allowed if line.startswith("!")} == copied - {
        "--from=build",
        "/opt/agl",
    }
