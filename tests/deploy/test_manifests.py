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
from agl_k8s import doctor

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


def test_doctor_asks_for_the_rights_that_the_role_gives() -> None:
    asked = {
        (group, f"{resource}/{part}" if part else resource): set(verbs)
        for group, resource, part, verbs in (*doctor.RIGHTS, doctor.LEASE_RIGHTS)
    }
    assert asked == RIGHTS


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


def tool(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed")
    return found


def helm(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [tool("helm"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def render(*arguments: str, name: str = "agl") -> list[dict[str, Any]]:
    """What the chart becomes."""
    done = helm("template", name, str(CHART), "--namespace", "rl", *arguments)
    assert done.returncode == 0, done.stderr
    return [item for item in yaml.safe_load_all(done.stdout) if item]


@pytest.fixture(scope="module")
def rendered() -> list[dict[str, Any]]:
    """What the chart becomes with its own values."""
    return render()


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


EVERYTHING = """
image: {repository: registry.example/agl-lite, tag: "9", pullPolicy: Always}
imagePullSecrets: [{name: registry}]
config: |
  [gateway]
  retries = 1
service:
  port: 9000
  graceSeconds: 5
  env: [{name: JUDGE_KEY, valueFrom: {secretKeyRef: {name: judge, key: key}}}]
  nodeSelector: {pool: cpu}
  tolerations: [{key: only, operator: Exists}]
controller:
  replicas: 3
  env: [{name: HTTPS_PROXY, value: "http://proxy:3128"}]
  settings: |
    timeout_seconds = 60
  nodeSelector: {pool: cpu}
  tolerations: [{key: only, operator: Exists}]
existingSecret: mine
agents:
  namespace: sandbox
  instance: team-a
  maxActive: 7
  settings: |
    infra_retries = 1
    image_failures = 0
  job: |
    image = "registry.example/agent:1"
    resources = { limits = { memory = "1Gi" } }
networkPolicy:
  agentEgress: [{to: [{ipBlock: {cidr: 10.0.0.0/8}}]}]
"""


class TestChartWithEverything:
    @pytest.fixture(scope="class")
    @classmethod
    def found(cls, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
        values = tmp_path_factory.mktemp("values") / "values.yaml"
        values.write_text(EVERYTHING)
        return render("--values", str(values), name="a.release")

    def test_api_server_takes_it(self, found: list[dict[str, Any]]) -> None:
        assert faults_in(found) == []

    def test_configuration_has_it(
        self, found: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for key in KEYS:
            monkeypatch.setenv(key, f"the value of {key}")
        loaded = {}
        for name, text in one(found, "ConfigMap", "a-release")["data"].items():
            (tmp_path / name).write_text(text)
            loaded[name] = load(read_config(tmp_path / name))
        assert loaded["service.toml"].settings.gateway.retries == 1
        settings = loaded["controller.toml"].settings
        assert settings.controller.timeout_seconds == 60
        assert settings.controller.url == "http://a-release.rl.svc:9000"
        table = tomli.loads((tmp_path / "controller.toml").read_text())["plugins"]["k8s"]
        assert table == {
            "namespace": "sandbox",
            "instance": "team-a",
            "max_active": 7,
            "infra_retries": 1,
            "image_failures": 0,
            "job": {
                "image": "registry.example/agent:1",
                "resources": {"limits": {"memory": "1Gi"}},
            },
        }

    def test_rights_and_policy_are_where_the_agents_are(self, found: list[dict[str, Any]]) -> None:
        for kind, name in (
            ("Role", "a-release-controller"),
            ("RoleBinding", "a-release-controller"),
            ("NetworkPolicy", "a-release-agents"),
        ):
            assert one(found, kind, name)["metadata"]["namespace"] == "sandbox"
        (subject,) = one(found, "RoleBinding", "a-release-controller")["subjects"]
        assert subject["namespace"] == "rl"
        policy = one(found, "NetworkPolicy", "a-release-agents")["spec"]
        assert policy["podSelector"]["matchLabels"]["agl-lite/instance"] == "team-a"
        (service,) = policy["egress"][0]["to"]
        assert service["namespaceSelector"]["matchLabels"] == {"kubernetes.io/metadata.name": "rl"}
        assert policy["egress"][2] == {"to": [{"ipBlock": {"cidr": "10.0.0.0/8"}}]}

    def test_pods_have_it(self, found: list[dict[str, Any]]) -> None:
        for name, variable in (("a-release", "JUDGE_KEY"), ("a-release-controller", "HTTPS_PROXY")):
            pod = one(found, "Deployment", name)["spec"]["template"]["spec"]
            (container,) = pod["containers"]
            assert variable in [entry["name"] for entry in container["env"]]
            assert container["image"] == "registry.example/agl-lite:9"
            assert (pod["nodeSelector"], len(pod["tolerations"])) == ({"pool": "cpu"}, 1)
            assert pod["imagePullSecrets"] == [{"name": "registry"}]
        assert not [d for d in found if d["kind"] == "Secret"]


def test_chart_is_clean_to_its_own_linter() -> None:
    done = helm("lint", "--strict", str(CHART))
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("service.replica=2", "replica"),
        ("service.replicas=2", "replicas"),
        ("agents.instance=Team_A", "instance"),
        ("networkpolicy.enabled=false", "networkpolicy"),
    ],
)
def test_values_that_mean_nothing_are_refused(setting: str, said: str) -> None:
    done = helm("template", "agl", str(CHART), "--set", setting)
    assert done.returncode != 0
    assert said in done.stderr


@pytest.mark.parametrize(
    ("release", "name"), [("7b", "agl-7b"), ("a.b", "a-b"), ("x" * 53, "x" * 40)]
)
def test_names_are_ones_that_a_service_may_have(release: str, name: str) -> None:
    assert one(render(name=release), "Service", name)


@pytest.mark.parametrize("name", ["agl", "agl-controller"])
def test_charts_pods_are_hardened_as_the_plain_ones_are(
    rendered: list[dict[str, Any]], name: str
) -> None:
    plain_name = name.replace("agl", "agl-lite", 1)
    plain = one(plain_manifests(), "Deployment", plain_name)["spec"]["template"]["spec"]
    pod = one(rendered, "Deployment", name)["spec"]["template"]["spec"]
    for part in ("securityContext", "terminationGracePeriodSeconds", "enableServiceLinks"):
        assert pod[part] == plain[part], part
    ((container,), (plain_container,)) = pod["containers"], plain["containers"]
    for part in ("securityContext", "livenessProbe", "args", "resources"):
        assert container[part] == plain_container[part], part
    assert container.get("readinessProbe") == plain_container.get("readinessProbe")


def test_parts_can_be_switched_off() -> None:
    found = render(
        "--set", "networkPolicy.enabled=false", "--set", "podDisruptionBudget.enabled=false"
    )
    assert not {d["kind"] for d in found} & {"NetworkPolicy", "PodDisruptionBudget"}


def test_overlay_builds_and_names_its_configuration_by_content() -> None:
    overlay = ROOT / "deploy" / "kustomize" / "overlays" / "example"
    done = subprocess.run(
        [tool("kubectl"), "kustomize", str(overlay)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = [item for item in yaml.safe_load_all(done.stdout) if item]
    assert faults_in(found) == []
    (config,) = [d["metadata"]["name"] for d in found if d["kind"] == "ConfigMap"]
    assert config.startswith("agl-lite-")
    for deployment in (d for d in found if d["kind"] == "Deployment"):
        volumes = deployment["spec"]["template"]["spec"]["volumes"]
        assert config in [volume.get("configMap", {}).get("name") for volume in volumes]


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
