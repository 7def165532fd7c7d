"""Jobs as they are built: golden manifests, layers, names, and what is refused.

AGL_WRITE_GOLDEN=1 writes the golden files anew; look at what changed before it is committed.
"""

from __future__ import annotations

import base64
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agl_core.errors import Invalid
from agl_core.interfaces import Work
from agl_core.records import Rollout, RolloutConfig
from agl_k8s.config import JobLayer, K8sConfig
from agl_k8s.layers import without_dollar
from agl_k8s.manifest import build_job, build_secret
from agl_k8s.merge import merge
from agl_k8s.names import job_name, label_value, rollout_id_of

GOLDEN = Path(__file__).parents[2] / "data" / "k8s" / "manifests"
PLAIN = K8sConfig(job=JobLayer(image="registry.example/agent:1"))

EVERYTHING = K8sConfig(
    instance="blue",
    ttl_seconds=600,
    stop_grace_seconds=30,
    job=JobLayer(
        image="registry.example/base:1",
        command=("python", "-m", "agent"),
        env={"LOG": "info", "ONLY_HERE": "1"},
        resources={"requests": {"cpu": "1", "memory": "1Gi"}},
        volumes=({"name": "scratch", "emptyDir": {}},),
        volume_mounts=({"name": "scratch", "mountPath": "/scratch"},),
        service_account="agents",
        image_pull_secrets=("registry",),
        node_selector={"pool": "cpu"},
        tolerations=({"key": "agents", "operator": "Exists"},),
        affinity={"nodeAffinity": {}},
        priority_class="low",
        pod_security_context={"runAsNonRoot": True},
        sidecars=({"name": "browser", "image": "registry.example/browser:1"},),
        init_containers=({"name": "fetch", "image": "registry.example/git:1"},),
        queue_name="rl",
        labels={"team": "a"},
        annotations={"note": "x"},
        job_patch={"spec": {"template": {"spec": {"dnsPolicy": "ClusterFirst"}}}},
    ),
)


def work_of(config: RolloutConfig | None = None, **fields: Any) -> Work:
    defaults = fields.pop("job_defaults", {})
    rollout = Rollout(rollout_id="demo", config=config or RolloutConfig(), **fields)
    return Work(
        rollout=rollout, agent_url="http://agl:8080/", token="agl1.t", job_defaults=defaults
    )


def main_of(job: dict[str, Any]) -> dict[str, Any]:
    (found,) = job["spec"]["template"]["spec"]["containers"]
    assert found["name"] == "agent"
    return dict(found)


def env_of(job: dict[str, Any]) -> dict[str, str | None]:
    return {entry["name"]: entry.get("value") for entry in main_of(job)["env"]}


def in_pod(**fields: Any) -> dict[str, Any]:
    """A patch of the pod."""
    return {"spec": {"template": {"spec": fields}}}


def in_main(fields: dict[str, Any]) -> dict[str, Any]:
    """A patch of the agent's container."""
    return in_pod(containers=[{"name": "agent", **fields}])


CASES: dict[str, tuple[K8sConfig, Work]] = {
    "plain": (PLAIN, work_of(input={"q": 1})),
    "everything": (
        EVERYTHING,
        work_of(
            RolloutConfig(
                image="registry.example/mine:2",
                args=("--fast", "$(HOME)"),
                env={"LOG": "debug", "PRICE": "$5"},
                resources={"limits": {"memory": "2Gi"}},
                timeout_seconds=90.5,
                max_retries=2,
                input_delivery="url",
                job_patch={
                    "spec": {
                        "template": {
                            "spec": {
                                "containers": [
                                    {"name": "agent", "env": [{"name": "ONLY_HERE", "value": None}]}
                                ],
                                "hostname": "agent",
                            }
                        }
                    }
                },
            ),
            job_defaults={"priority_class": "high", "env": {"FROM_DEFAULTS": "1"}},
        ),
    ),
    "file_input": (PLAIN, work_of(RolloutConfig(input_delivery="file"), input=["x"])),
}


@pytest.mark.parametrize("name", CASES)
def test_manifest_is_the_golden_one(name: str) -> None:
    job = build_job(*CASES[name])
    path = GOLDEN / f"{name}.json"
    if os.environ.get("AGL_WRITE_GOLDEN"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(job, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    assert job == json.loads(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", CASES)
def test_building_is_pure(name: str) -> None:
    before = repr(CASES[name])
    assert build_job(*CASES[name]) == build_job(*CASES[name])
    assert repr(CASES[name]) == before


def test_the_contract_comes_first_in_every_container_and_the_attempt_first_of_all() -> None:
    pod = build_job(*CASES["everything"])["spec"]["template"]["spec"]
    for container in (*pod["initContainers"], *pod["containers"]):
        names = [entry["name"] for entry in container["env"]]
        assert names[0] == "AGL_ATTEMPT_ID"
        assert names.index("OPENAI_BASE_URL") < 8
        assert container["env"][0]["valueFrom"]["fieldRef"]["fieldPath"] == "metadata.uid"


def test_later_layers_overrule_and_the_patch_has_the_last_word() -> None:
    job = build_job(*CASES["everything"])
    pod = job["spec"]["template"]["spec"]
    assert main_of(job)["image"] == "registry.example/mine:2"
    assert main_of(job)["resources"] == {
        "requests": {"cpu": "1", "memory": "1Gi"},
        "limits": {"memory": "2Gi"},
    }
    assert pod["priorityClassName"] == "high"
    assert pod["hostname"] == "agent"
    env = env_of(job)
    assert (env["LOG"], env["FROM_DEFAULTS"]) == ("debug", "1")
    assert env["ONLY_HERE"] is None


def test_sidecars_are_native_and_come_before_what_they_serve() -> None:
    init = build_job(*CASES["everything"])["spec"]["template"]["spec"]["initContainers"]
    assert [(c["name"], c.get("restartPolicy")) for c in init] == [
        ("browser", "Always"),
        ("fetch", None),
    ]


def test_c72_deadline_is_the_pods_and_counts_pauses_in() -> None:
    job = build_job(PLAIN, work_of(RolloutConfig(timeout_seconds=90.5)))
    assert "activeDeadlineSeconds" not in job["spec"]
    assert job["spec"]["template"]["spec"]["activeDeadlineSeconds"] == 3691
    assert "activeDeadlineSeconds" not in build_job(PLAIN, work_of())["spec"]["template"]["spec"]


def test_kueue_starts_what_is_created_suspended() -> None:
    job = build_job(*CASES["everything"])
    assert job["spec"]["suspend"] is True
    assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "rl"


def test_token_is_in_the_secret_alone_which_goes_with_the_job() -> None:
    config, work = CASES["file_input"]
    job = build_job(config, work)
    assert work.token not in json.dumps(job)
    made = {**job, "metadata": {**job["metadata"], "uid": "u-1"}}
    secret = build_secret(made, work)
    assert base64.b64decode(secret["data"]["token"]) == b"agl1.t"
    assert base64.b64decode(secret["data"]["input.json"]) == b'["x"]'
    (owner,) = secret["metadata"]["ownerReferences"]
    assert (owner["uid"], owner["controller"], owner["blockOwnerDeletion"]) == ("u-1", True, False)
    assert secret["metadata"]["name"] == job["metadata"]["name"]


@pytest.mark.parametrize(
    ("patch", "said"),
    [
        ({"spec": {"completions": 2}}, r"spec\.completions to 2"),
        ({"spec": {"parallelism": 3}}, r"spec\.parallelism"),
        ({"spec": {"managedBy": "x"}}, r"spec\.managedBy"),
        ({"metadata": {"name": "mine"}}, r"metadata\.name"),
        ({"metadata": {"namespace": "other"}}, r"metadata\.namespace"),
        ({"metadata": {"labels": {"agl-lite/instance": "other"}}}, "labels.agl-lite/instance"),
        ({"metadata": {"annotations": {"agl-lite/rollout-id": "x"}}}, "agl-lite/rollout-id"),
        ({"metadata": {"annotations": {"agl-lite/timeout-seconds": "x"}}}, "timeout-seconds"),
        (
            {"spec": {"template": {"metadata": {"labels": {"agl-lite/mine": "x"}}}}},
            r"spec\.template\.metadata\.labels\.agl-lite/mine",
        ),
        ({"spec": {"activeDeadlineSeconds": 60}}, r"spec\.activeDeadlineSeconds to 60"),
        (in_pod(restartPolicy="OnFailure"), "restartPolicy"),
        (in_pod(hostNetwork=True), "hostNetwork"),
        (in_pod(volumes=[{"name": "h", "hostPath": {}}]), "hostPath"),
        (in_pod(containers=[{"name": "b"}]), "sidecars"),
        (in_main({"$patch": "delete"}), "must be named 'agent'"),
        (in_main({"securityContext": {"privileged": True}}), "privileged"),
        (in_main({"securityContext": {"capabilities": {"add": ["SYS_ADMIN"]}}}), "SYS_ADMIN"),
        (in_main({"securityContext": {"capabilities": True}}), "capabilities to True"),
        (in_main({"securityContext": {"capabilities": {"add": 5}}}), r"capabilities\.add to 5"),
        (in_main({"restartPolicyRules": []}), "restartPolicyRules"),
        (in_main({"env": [{"name": "OPENAI_BASE_URL", "value": "x"}]}), "OPENAI_BASE_URL"),
    ],
)
def test_patch_that_would_break_attempts_or_the_cluster_is_refused(
    patch: dict[str, Any], said: str
) -> None:
    with pytest.raises(Invalid, match=said) as refused:
        build_job(PLAIN, work_of(RolloutConfig(job_patch=patch)))
    assert refused.value.hint


def test_privileges_can_be_allowed() -> None:
    patch = {"spec": {"template": {"spec": {"hostNetwork": True}}}}
    config = K8sConfig(job=PLAIN.job, allow_privileged=True)
    job = build_job(config, work_of(RolloutConfig(job_patch=patch)))
    assert job["spec"]["template"]["spec"]["hostNetwork"] is True


def test_harmless_capabilities_can_be_added_without_asking() -> None:
    patch = in_main({"securityContext": {"capabilities": {"add": ["NET_BIND_SERVICE"]}}})
    security = main_of(build_job(PLAIN, work_of(RolloutConfig(job_patch=patch))))["securityContext"]
    assert security["capabilities"] == {"drop": ["ALL"], "add": ["NET_BIND_SERVICE"]}


def test_labels_of_ours_cannot_be_taken_away() -> None:
    job = build_job(PLAIN, work_of(RolloutConfig(job_patch={"metadata": {"labels": None}})))
    assert job["metadata"]["labels"] == build_job(PLAIN, work_of())["metadata"]["labels"]


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (RolloutConfig(env={"OPENAI_API_KEY": "x"}), "OPENAI_API_KEY"),
        (RolloutConfig(env={"BIG": "x" * 65_537}), "env.BIG is larger"),
        (RolloutConfig(env={f"V{n}": "x" * 60_000 for n in range(20)}), "bytes, more than"),
    ],
)
def test_c69_variables_that_no_container_could_start_with_are_refused(
    config: RolloutConfig, said: str
) -> None:
    with pytest.raises(Invalid, match=said):
        build_job(PLAIN, work_of(config))


def test_c69_large_input_is_fetched() -> None:
    text = "x" * 300_000
    job = build_job(PLAIN, work_of(RolloutConfig(input_delivery="url"), input=text))
    assert len(json.dumps(main_of(job)["env"])) < 8192
    url = env_of(job)["AGL_TASK_INPUT_URL"]
    assert url == "http://agl:8080/rollout/demo/attempt/$(AGL_ATTEMPT_ID)/input"
    with pytest.raises(Invalid, match="a Secret cannot hold"):
        build_job(PLAIN, work_of(RolloutConfig(input_delivery="file"), input="x" * 1_100_000))


def test_image_that_is_set_nowhere_is_said_with_where_to_set_it() -> None:
    with pytest.raises(Invalid, match=r"\.image is not set") as refused:
        build_job(K8sConfig(), work_of())
    assert "config.image" in (refused.value.hint or "")


@pytest.mark.parametrize(
    ("defaults", "said"),
    [
        ({"imge": "x"}, "unknown key 'imge', did you mean 'image'"),
        ({"image": 3}, "job_defaults.image must be text"),
        ({"env": {"A": 1}}, "job_defaults.env must be an object of texts"),
        ({"volumes": {}}, "job_defaults.volumes must be a list of objects"),
    ],
)
def test_faulty_job_defaults_are_refused(defaults: dict[str, Any], said: str) -> None:
    with pytest.raises(Invalid, match=said):
        build_job(PLAIN, work_of(job_defaults=defaults))


class TestNames:
    IDS = st.text(min_size=1, max_size=256).filter(lambda text: not text.isspace())

    @given(IDS)
    def test_any_id_gives_valid_names(self, rollout_id: str) -> None:
        name = job_name(rollout_id)
        assert len(name) <= 57
        assert re.fullmatch(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?", name)
        assert re.fullmatch(
            r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?", label_value(rollout_id)
        )

    @given(IDS, IDS)
    def test_different_ids_have_different_names(self, one: str, other: str) -> None:
        assert (job_name(one) == job_name(other)) == (one == other)

    def test_c68_ids_that_differ_at_the_end_alone(self) -> None:
        one, other = "x" * 80 + "a", "x" * 80 + "B_/"
        assert job_name(one) != job_name(other)
        assert label_value(one) != label_value(other)

    @given(IDS)
    def test_the_whole_id_is_read_from_the_annotation(self, rollout_id: str) -> None:
        rollout = Rollout(rollout_id="demo")
        work = Work(rollout=rollout, agent_url="http://s", token="t")
        job = build_job(PLAIN, work)
        job["metadata"]["annotations"]["agl-lite/rollout-id"] = rollout_id
        assert rollout_id_of(job) == rollout_id


def expand(text: str, variables: dict[str, str]) -> str:
    """As the kubelet expands env, command and args."""

    def replace(match: re.Match[str]) -> str:
        whole = match.group(0)
        return "$" if whole == "$$" else variables.get(match.group(1), whole)

    return re.sub(r"\$\$|\$\(([^)]*)\)", replace, text)


@given(st.text(alphabet="$()AB x", max_size=30))
def test_users_text_arrives_as_it_was(text: str) -> None:
    assert expand(without_dollar(text), {"A": "!", "AB": "!!"}) == text


class TestMerge:
    def test_lists_with_a_key_are_merged_by_it_and_others_replaced(self) -> None:
        base = {"env": [{"name": "A", "value": "1"}, {"name": "B"}], "args": ["x", "y"]}
        patch = {"env": [{"name": "A", "value": "2"}, {"name": "C"}], "args": ["z"]}
        assert merge(base, patch) == {
            "env": [{"name": "A", "value": "2"}, {"name": "B"}, {"name": "C"}],
            "args": ["z"],
        }

    def test_directives(self) -> None:
        base = {"env": [{"name": "A"}, {"name": "B"}], "a": {"x": 1}, "b": {"y": 1}, "c": 1}
        patch = {
            "env": [{"name": "A", "$patch": "delete"}],
            "a": {"$patch": "replace", "z": 1},
            "b": {"$patch": "delete"},
            "c": None,
        }
        assert merge(base, patch) == {"env": [{"name": "B"}], "a": {"z": 1}}
        replaced = merge(base, {"env": [{"$patch": "replace"}, {"name": "C"}]})
        assert replaced["env"] == [{"name": "C"}]

    JSON = st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=3),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(st.sampled_from(["env", "name", "a", "b"]), inner, max_size=3)
        ),
        max_leaves=8,
    )

    @given(st.dictionaries(st.sampled_from(["env", "a"]), JSON, max_size=2), JSON)
    def test_merging_changes_neither(self, base: dict[str, Any], value: Any) -> None:
        patch = {"a": value, "env": value}
        before = json.dumps([base, patch])
        merge(base, patch)
        assert json.dumps([base, patch]) == before
