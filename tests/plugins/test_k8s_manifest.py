"""What layers of users make of a Job: never a crash, never something else in silence.

The manifests themselves, names and merging are looked at in ``k8s/test_manifest.py``.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agl_core.config import build_settings, read_config
from agl_core.errors import ConfigError, Invalid
from agl_core.interfaces import Work
from agl_core.records import Rollout, RolloutConfig
from agl_k8s.config import JobLayer, K8sConfig
from agl_k8s.manifest import build_job, build_secret
from agl_k8s.merge import merge
from agl_k8s.names import job_name, rollout_id_of
from agl_k8s.testing.kinds import kind_of
from agl_k8s.testing.pod_env import expand
from agl_k8s.testing.schema import read_object

GOLDEN = Path(__file__).parents[1] / "data" / "k8s" / "manifests"
PLAIN = K8sConfig(job=JobLayer(image="registry.example/agent:1"))


def build(
    config: RolloutConfig | None = None,
    *,
    settings: K8sConfig = PLAIN,
    rollout_id: str = "demo",
    task: Any = None,
) -> dict[str, Any]:
    rollout = Rollout(rollout_id=rollout_id, input=task, config=config or RolloutConfig())
    return build_job(settings, Work(rollout=rollout, agent_url="http://agl:8080", token="t"))


def pod_of(job: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = job["spec"]["template"]["spec"]
    return found


def main_of(job: dict[str, Any]) -> dict[str, Any]:
    (found,) = pod_of(job)["containers"]
    return dict(found)


def env_of(container: dict[str, Any]) -> dict[str, str]:
    """What the container sees of its literal variables, expanded as the kubelet does it."""
    seen = {"AGL_ATTEMPT_ID": "u-1"}
    for entry in container["env"]:
        if "value" in entry:
            seen[entry["name"]] = expand(entry["value"], seen)
    return seen


def pod_patch(**pod: Any) -> dict[str, Any]:
    return {"spec": {"template": {"spec": pod}}}


def main_patch(**main: Any) -> dict[str, Any]:
    return pod_patch(containers=[{"name": "agent", **main}])


# --- any patch at all ----------------------------------------------------------------------------

WORDS = ["name", "agent", "env", "value", "containers", "securityContext", "capabilities"]
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.sampled_from([*WORDS, "$", ""]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(WORDS), inner),
    max_leaves=5,
)
PATHS = [
    ("metadata",),
    ("metadata", "labels"),
    ("spec",),
    ("spec", "podFailurePolicy"),
    ("spec", "template"),
    ("spec", "template", "metadata"),
    ("spec", "template", "metadata", "annotations"),
    ("spec", "template", "spec"),
    ("spec", "template", "spec", "volumes"),
    ("spec", "template", "spec", "initContainers"),
    ("spec", "template", "spec", "containers"),
]
IN_MAIN = ["name", "image", "env", "volumeMounts", "securityContext", "resources", "command"]


@given(
    st.sampled_from(PATHS),
    VALUES,
    st.dictionaries(st.sampled_from(IN_MAIN), VALUES, max_size=3),
    st.sampled_from(["env", "url", "file"]),
)
def test_any_patch_gives_a_job_or_is_refused(
    path: tuple[str, ...], value: Any, main: dict[str, Any], delivery: Any
) -> None:
    patch: dict[str, Any] = {path[-1]: value}
    for name in reversed(path[:-1]):
        patch = {name: patch}
    for one in (patch, main_patch(**main)):
        try:
            job = build(RolloutConfig(job_patch=one, input_delivery=delivery))
        except Invalid:
            continue
        assert main_of(job)["env"][0]["name"] == "AGL_ATTEMPT_ID"


@pytest.mark.parametrize(
    ("patch", "path"),
    [
        ({"spec": 5}, "spec to 5"),
        ({"spec": {"template": None}}, r"spec\.template to None"),
        ({"metadata": {"labels": 5}}, r"metadata\.labels"),
        (pod_patch(containers="x"), r"spec\.template\.spec\.containers"),
        (pod_patch(volumes=["a"]), r"spec\.template\.spec\.volumes"),
        (main_patch(env=["x"]), r"containers\[agent\]\.env"),
        (main_patch(env=[{"name": []}]), r"containers\[agent\]\.env\[\]\.name"),
        (main_patch(securityContext=5), r"containers\[agent\]\.securityContext"),
    ],
)
def test_misshapen_patch_is_refused_with_the_path(patch: dict[str, Any], path: str) -> None:
    with pytest.raises(Invalid, match=path):
        build(RolloutConfig(job_patch=patch))


# --- what patches may not change -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("patch", "path", "way_out"),
    [
        ({"spec": {"podFailurePolicy": {"rules": []}}}, r"podFailurePolicy\.rules", "fail_codes"),
        ({"spec": {"podReplacementPolicy": "TerminatingOrFailed"}}, "podReplacement", "'Failed'"),
        (pod_patch(activeDeadlineSeconds=5), "activeDeadlineSeconds", "timeout_seconds"),
    ],
)
def test_patch_of_what_is_ours_is_refused_with_the_setting_to_use(
    patch: dict[str, Any], path: str, way_out: str
) -> None:
    with pytest.raises(Invalid, match=path) as refused:
        build(RolloutConfig(job_patch=patch, timeout_seconds=60))
    assert way_out in (refused.value.hint or "")


def test_patch_that_repeats_what_is_ours_changes_nothing() -> None:
    patch = {"spec": {"podReplacementPolicy": "Failed"}}
    assert build(RolloutConfig(job_patch=patch))["spec"] == build()["spec"]


@pytest.mark.parametrize("delivery", ["env", "url", "file"])
@pytest.mark.parametrize("patch", [{"metadata": None}, {"metadata": {"name": None}}])
def test_name_cannot_be_taken_away_with_any_delivery(patch: dict[str, Any], delivery: Any) -> None:
    with pytest.raises(Invalid, match=r"metadata\.name"):
        build(RolloutConfig(job_patch=patch, input_delivery=delivery))


@pytest.mark.parametrize("name", ["hostNetwork", "hostPID", "hostIPC"])
def test_namespaces_of_the_host_are_refused_unless_allowed(name: str) -> None:
    config = RolloutConfig(job_patch=pod_patch(**{name: True}))
    with pytest.raises(Invalid, match=rf"spec\.template\.spec\.{name}") as refused:
        build(config)
    assert "allow_privileged" in (refused.value.hint or "")
    allowed = build(config, settings=K8sConfig(job=PLAIN.job, allow_privileged=True))
    assert pod_of(allowed)[name] is True


@pytest.mark.parametrize(
    ("patch", "path"),
    [
        ({"apiVersion": "batch/v2"}, "apiVersion"),
        ({"spec": {"selector": {"matchLabels": {"a": "b"}}}}, r"spec\.selector"),
        ({"spec": {"completionMode": "Indexed"}}, r"spec\.completionMode"),
        (main_patch(restartPolicy="Never"), r"containers\[agent\]\.restartPolicy"),
        (
            main_patch(securityContext={"allowPrivilegeEscalation": True}),
            r"securityContext\.allowPrivilegeEscalation",
        ),
    ],
)
def test_another_kind_of_job_is_refused(patch: dict[str, Any], path: str) -> None:
    with pytest.raises(Invalid, match=path):
        build(RolloutConfig(job_patch=patch))


def test_queue_without_a_name_holds_no_job_back() -> None:
    job = build(settings=K8sConfig(job=JobLayer(image="i", queue_name="")))
    assert "suspend" not in job["spec"]
    assert "kueue.x-k8s.io/queue-name" not in job["metadata"]["labels"]


@pytest.mark.parametrize("name", ["OPENAI_BASE_URL", "AGL_TASK_INPUT_FILE"])
@pytest.mark.parametrize("kind", ["containers", "initContainers"])
def test_reserved_names_are_refused_in_any_container_and_with_any_delivery(
    kind: str, name: str
) -> None:
    container = {"name": "agent" if kind == "containers" else "fetch", "image": "i"}
    patch = pod_patch(**{kind: [{**container, "env": [{"name": name, "value": "x"}]}]})
    with pytest.raises(Invalid, match=name):
        build(RolloutConfig(job_patch=patch))


@pytest.mark.parametrize(
    "patch",
    [
        pod_patch(volumes=[{"name": "agl-input", "emptyDir": {}}]),
        main_patch(volumeMounts=[{"name": "x", "mountPath": "/var/run/agl-lite/"}]),
    ],
)
def test_place_of_the_input_is_taken_only_where_the_input_is_a_file(patch: dict[str, Any]) -> None:
    with pytest.raises(Invalid, match="input"):
        build(RolloutConfig(job_patch=patch, input_delivery="file"))
    assert build(RolloutConfig(job_patch=patch, input_delivery="url"))


def test_sidecar_without_image_is_not_told_to_set_the_agents() -> None:
    settings = K8sConfig(job=JobLayer(image="i", sidecars=({"name": "tool"},)))
    with pytest.raises(Invalid, match=r"initContainers\[tool\]\.image") as refused:
        build(settings=settings)
    assert "config.image" not in (refused.value.hint or "")


# --- sizes ---------------------------------------------------------------------------------------


def test_c69_large_variable_of_a_patch_is_refused() -> None:
    large = [{"name": "BIG", "value": "x" * 65_537}]
    with pytest.raises(Invalid, match=r"containers\[agent\]\.env\[BIG\] is larger"):
        build(RolloutConfig(job_patch=main_patch(env=large)))


def test_c69_input_too_large_for_a_variable_is_refused() -> None:
    with pytest.raises(Invalid, match="AGL_TASK_INPUT") as refused:
        build(task="x" * 65_536)
    assert "input_delivery" in (refused.value.hint or "")


def test_c69_escapes_do_not_count_since_the_container_never_sees_them() -> None:
    task = "$" * 65_534  # with its quotes as large as is allowed
    assert json.loads(env_of(main_of(build(task=task)))["AGL_TASK_INPUT"]) == task


# --- values --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seconds", "said", "deadline"),
    [
        (60, "60", 3_660),
        (1_234_567.5, "1234567.5", 1_238_168),
        (1e300, "1e+300", 2**31 - 1),
        (float("inf"), "inf", 2**31 - 1),
    ],
)
def test_timeouts_keep_their_digits_and_the_deadline_is_one_that_kubernetes_takes(
    seconds: float, said: str, deadline: int
) -> None:
    job = build(RolloutConfig(timeout_seconds=seconds))
    assert job["metadata"]["annotations"]["agl-lite/timeout-seconds"] == said
    assert float(said) == seconds
    assert pod_of(job)["activeDeadlineSeconds"] == deadline


def test_privileged_container_is_not_also_told_to_gain_no_privileges() -> None:
    patch = main_patch(securityContext={"privileged": True})
    settings = K8sConfig(job=PLAIN.job, allow_privileged=True)
    job = build(RolloutConfig(job_patch=patch), settings=settings)
    assert main_of(job)["securityContext"] == {"privileged": True}


def test_variables_and_urls_arrive_as_they_were_meant() -> None:
    rollout_id = "a/b $(AGL_ATTEMPT_ID) ü"
    config = RolloutConfig(env={"PRICE": "$5", "REF": "$(OPENAI_API_KEY)", "TWO": "$$"})
    seen = env_of(main_of(build(config, rollout_id=rollout_id, task={"q": "$(AGL_ATTEMPT_ID)"})))
    quoted = "a%2Fb%20%24%28AGL_ATTEMPT_ID%29%20%C3%BC"
    base = f"http://agl:8080/rollout/{quoted}/attempt/u-1"
    assert seen["OPENAI_BASE_URL"] == f"{base}/v1"
    assert seen["ANTHROPIC_BASE_URL"] == base
    assert seen["AGL_EVENT_URL"] == f"{base}/events"
    assert seen["AGL_ROLLOUT_ID"] == rollout_id
    assert json.loads(seen["AGL_TASK_INPUT"]) == {"q": "$(AGL_ATTEMPT_ID)"}
    assert (seen["PRICE"], seen["REF"], seen["TWO"]) == ("$5", "$(OPENAI_API_KEY)", "$$")


def test_variable_has_one_source_and_the_last_layer_says_which() -> None:
    by_secret = {"secretKeyRef": {"name": "s", "key": "k"}}
    settings = K8sConfig(
        job=JobLayer(
            image="i",
            env={"TO_SECRET": "1"},
            job_patch=main_patch(env=[{"name": "TO_TEXT", "valueFrom": by_secret}]),
        )
    )
    config = RolloutConfig(
        env={"TO_TEXT": "2"},
        job_patch=main_patch(env=[{"name": "TO_SECRET", "valueFrom": by_secret}]),
    )
    entries = {entry["name"]: entry for entry in main_of(build(config, settings=settings))["env"]}
    assert entries["TO_TEXT"] == {"name": "TO_TEXT", "value": "2"}
    assert entries["TO_SECRET"] == {"name": "TO_SECRET", "valueFrom": by_secret}


def test_volume_of_another_source_takes_the_first_ones_place() -> None:
    base = {"volumes": [{"name": "v", "emptyDir": {"medium": "Memory"}}, {"name": "w"}]}
    other = merge(base, {"volumes": [{"name": "v", "configMap": {"name": "c"}}]})
    assert other["volumes"] == [{"name": "v", "configMap": {"name": "c"}}, {"name": "w"}]
    same = merge(base, {"volumes": [{"name": "v", "emptyDir": {"sizeLimit": "1Gi"}}]})
    assert same["volumes"][0]["emptyDir"] == {"medium": "Memory", "sizeLimit": "1Gi"}


def test_secret_is_not_changed_under_a_running_agent() -> None:
    rollout = Rollout(rollout_id="demo")
    work = Work(rollout=rollout, agent_url="http://agl:8080", token="t")
    made = build()
    made["metadata"]["uid"] = "u-1"
    secret = build_secret(made, work)
    assert secret["immutable"] is True
    assert set(secret["data"]) == {"token"}


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("containers", "name"),
        ("initContainers", "name"),
        ("volumes", "name"),
        ("env", "name"),
        ("imagePullSecrets", "name"),
        ("volumeMounts", "mountPath"),
        ("ports", "containerPort"),
    ],
)
def test_lists_are_merged_by_the_key_that_kubernetes_uses(name: str, key: str) -> None:
    base = {name: [{key: "a", "x": 1}, {key: "b", "x": 2}]}
    merged = merge(base, {name: [{key: "b", "x": 3}, {key: "c"}]})
    assert merged == {name: [{key: "a", "x": 1}, {key: "b", "x": 3}, {key: "c"}]}


def test_lists_without_a_key_are_replaced_and_not_shared_with_the_patch() -> None:
    patch = {"tolerations": [{"key": "b"}]}
    merged = merge({"tolerations": [{"key": "a"}]}, patch)
    assert merged == {"tolerations": [{"key": "b"}]}
    merged["tolerations"][0]["key"] = "changed"
    assert patch == {"tolerations": [{"key": "b"}]}


# --- names ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("rollout_id", ["x" * 80 + "a", "x" * 80 + "B_/"])
def test_c68_long_ids_have_names_that_pods_can_add_to(rollout_id: str) -> None:
    name = build(rollout_id=rollout_id)["metadata"]["name"]
    assert re.fullmatch(r"r-x{40}-[0-9a-f]{14}", name)
    assert len(name) <= 57


@pytest.mark.parametrize(
    ("rollout_id", "name"),
    [("Math/Run 7", "r-math-run-7-"), ("_a_", "r-a-"), ("x" * 39 + "-y", f"r-{'x' * 39}-")],
)
def test_names_can_be_read(rollout_id: str, name: str) -> None:
    assert re.fullmatch(rf"{name}[0-9a-f]{{14}}", job_name(rollout_id))


def test_jobs_of_others_are_none_of_ours_whatever_they_are_annotated_with() -> None:
    job = build()
    assert rollout_id_of(job) == "demo"
    job["metadata"]["labels"]["app.kubernetes.io/managed-by"] = "helm"
    assert rollout_id_of(job) is None


# --- settings ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [path.stem for path in sorted(GOLDEN.glob("*.json"))])
def test_golden_manifests_hold_no_field_that_a_strict_server_refuses(name: str) -> None:
    job = json.loads((GOLDEN / f"{name}.json").read_text(encoding="utf-8"))
    assert read_object(kind_of("jobs"), job).unknown == []


def read_settings(tmp_path: Path, text: str) -> K8sConfig:
    path = tmp_path / "agl.toml"
    path.write_text(text, encoding="utf-8")
    settings = build_settings(read_config(path, {}), {"k8s": K8sConfig})
    found = settings.plugins.tables["k8s"]
    assert isinstance(found, K8sConfig)
    return found


def test_job_table_is_read_from_toml_as_kubernetes_writes_it(tmp_path: Path) -> None:
    settings = read_settings(
        tmp_path,
        """
        [plugins]
        enabled = ["k8s"]
        [plugins.k8s]
        fail_codes = [78, 3, 78]
        [plugins.k8s.job]
        image = "registry.example/agent:1"
        command = ["python", "-m", "agent"]
        env = { LOG = "info" }
        resources = { limits = { cpu = 2, memory = "1Gi" } }
        [[plugins.k8s.job.sidecars]]
        name = "browser"
        image = "registry.example/browser:1"
        ports = [{ containerPort = 80 }]
        [plugins.k8s.job.job_patch.spec.template.spec]
        hostname = "h"
        """,
    )
    job = build(settings=settings)
    assert main_of(job)["command"] == ["python", "-m", "agent"]
    assert main_of(job)["resources"] == {"limits": {"cpu": 2, "memory": "1Gi"}}
    (browser,) = pod_of(job)["initContainers"]
    assert browser["ports"] == [{"containerPort": 80}]
    assert pod_of(job)["hostname"] == "h"
    assert job["spec"]["podFailurePolicy"]["rules"][1]["onExitCodes"]["values"] == [3, 78]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('instance = "Blue"', "instance"),  # a Lease is named after it, and has no capitals
        ('instance = "a_b"', "instance"),
        ("fail_codes = [0]", "fail_codes"),
        ("creates_per_second = 0", "creates_per_second"),
        ('job = { imge = "x" }', "did you mean 'image'"),
        ("job = { command = 'x' }", "command"),
    ],
)
def test_faulty_settings_are_named(tmp_path: Path, line: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read_settings(tmp_path, f'[plugins]\nenabled = ["k8s"]\n[plugins.k8s]\n{line}\n')
