"""What ``agl doctor`` finds on a cluster that is well, and on one where something is missing."""

from __future__ import annotations

import asyncio
import shutil
import ssl
import subprocess
from pathlib import Path
from typing import Any

import attrs
import pytest

from agl_core.clock import SystemClock
from agl_core.interfaces import Finding
from agl_core.testing.contracts.runner import finished
from agl_k8s import doctor
from agl_k8s.config import JobLayer, K8sConfig
from agl_k8s.runner import K8sRunner
from agl_k8s.testing import FakeCluster, scripts
from agl_k8s.testing.clusters import ClusterUnderTest, work_of

CLOCK = SystemClock()
LIMIT_SECONDS = 180.0


async def look(
    config: K8sConfig, *, url: str = "http://127.0.0.1:9", probe: bool = True, seconds: float = 60
) -> dict[str, Finding]:
    """Findings by their subject."""
    work = work_of("doctor-1", ["sh", "-c", "exit 0"], timeout_seconds=seconds)
    work = attrs.evolve(work, agent_url=url)
    async with asyncio.timeout(LIMIT_SECONDS):
        found = K8sRunner(config, CLOCK).examine(work, with_probe=probe)
        return {finding.subject: finding async for finding in found}


def statuses(found: dict[str, Finding]) -> dict[str, str]:
    return {subject: finding.status for subject, finding in found.items()}


def jobs_asked(fake: FakeCluster) -> list[Any]:
    return [request for request in fake.requests if request.path.endswith("/jobs")]


def make_certificate(folder: Path) -> tuple[Path, Path]:
    """A certificate of 127.0.0.1 that nobody trusts, and its key."""
    if shutil.which("openssl") is None:
        pytest.skip("needs the openssl command to make a certificate")
    certificate, key = folder / "server.crt", folder / "server.key"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    command += ["-nodes", "-subj", "/CN=server", "-addext", "subjectAltName=IP:127.0.0.1"]
    command += ["-keyout", str(key), "-out", str(certificate)]
    subprocess.run(command, check=True, capture_output=True)
    return certificate, key


async def nothing_is_left(cluster: ClusterUnderTest) -> bool:
    async with asyncio.timeout(LIMIT_SECONDS):
        while await cluster.jobs() or await cluster.pods():
            await CLOCK.sleep(0.1)
    return True


@pytest.mark.cluster
async def test_cluster_that_is_well(cluster: ClusterUnderTest) -> None:
    found = await look(cluster.config(), probe=False)
    told = statuses(found)
    assert told.pop("namespace") in ("ok", "skipped")
    assert told.pop("quota") in ("ok", "skipped")
    assert told == {"cluster": "ok", "rights": "ok", "job": "ok", "probe": "skipped"}, found
    assert cluster.image in found["job"].message
    assert await cluster.jobs() == []


@pytest.mark.cluster
async def test_url_that_no_pod_reaches_fails_with_what_the_pod_said(
    cluster: ClusterUnderTest,
) -> None:
    found = await look(cluster.config())
    assert found["probe"].status == "failed", found
    assert "http://127.0.0.1:9/healthz is not reached from a pod" in found["probe"].message
    assert "agent_url" in (found["probe"].hint or "")
    assert await nothing_is_left(cluster)


@pytest.mark.cluster
async def test_image_that_does_not_exist_fails_in_the_clusters_words(
    cluster: ClusterUnderTest,
) -> None:
    if cluster.fake is not None:
        cluster.fake.node.script_for = lambda pod: scripts.cannot_pull()
    job = JobLayer(image="nowhere.invalid/agent:1")
    found = await look(cluster.config(job=job, start_grace_seconds=1.0))
    assert found["probe"].status == "failed", found
    assert "ImagePullBackOff" in found["probe"].message
    assert await nothing_is_left(cluster)


@pytest.mark.cluster
async def test_namespace_that_does_not_exist_fails(cluster: ClusterUnderTest) -> None:
    found = await look(cluster.config(namespace="no-such-namespace"))
    assert found["namespace"].status == "failed", found
    assert found["probe"].status == "skipped"
    assert "kubectl create namespace no-such-namespace" in (found["namespace"].hint or "")


@pytest.mark.cluster
async def test_manifest_that_the_server_refuses_fails_with_the_path(
    cluster: ClusterUnderTest,
) -> None:
    job = JobLayer(image=cluster.image, job_patch={"spec": {"template": {"spec": {"nodName": 1}}}})
    found = await look(cluster.config(job=job))
    assert found["job"].status == "failed", found
    assert "nodName" in found["job"].message
    assert found["probe"].status == "skipped"


@pytest.mark.cluster
async def test_names_that_do_not_exist_fail(cluster: ClusterUnderTest) -> None:
    job = JobLayer(
        image=cluster.image,
        service_account="nobody",
        image_pull_secrets=("no-secret",),
        priority_class="no-class",
    )
    found = await look(cluster.config(job=job), probe=False)
    for subject in ("service account", "pull secret", "priority class"):
        assert found[subject].status == "failed", found
        assert "does not exist" in found[subject].message


async def test_service_that_a_pod_reaches(
    cluster: ClusterUnderTest, service: Any, fake: FakeCluster
) -> None:
    found = await look(cluster.config(), url=service.url)
    assert found["probe"].status == "ok", found
    assert found["probe"].message.endswith(f"reaches {service.url}/healthz")
    assert await nothing_is_left(cluster)
    changes = [r.method for r in fake.requests if r.method != "GET" and "reviews" not in r.path]
    assert changes == ["POST", "POST", "POST", "DELETE"]  # dry run, Job, Secret


async def test_probe_is_of_an_agents_kind_and_no_controllers(
    cluster: ClusterUnderTest, service: Any, fake: FakeCluster
) -> None:
    """NetworkPolicies know it by its labels; a controller that works leaves it alone."""
    seen: list[dict[str, Any]] = []
    fake.store.subscribe(
        lambda kind, resource, item: seen.append(item) if resource == "pods" else None
    )
    async with cluster.runner() as runner:
        await runner.start(work_of("r-1", ["sh", "-c", "exit 0"]))
        found = await look(cluster.config(), url=service.url)
        assert found["probe"].status == "ok", found
        assert (await finished(runner, "r-1")).outcome == "succeeded"
        assert [report.rollout_id for report in await runner.list()] == ["r-1"]
        await runner.release("r-1")
    labels = [pod["metadata"]["labels"] for pod in seen]
    assert all(one["agl-lite/instance"] == cluster.instance for one in labels)
    assert {one["agl-lite/rollout-id"] for one in labels} == {"r-1", "doctor-1"}


async def test_missing_rights_are_listed(cluster: ClusterUnderTest, fake: FakeCluster) -> None:
    for verb, resource in (("create", "jobs"), ("watch", "pods"), ("get", "pods/log")):
        fake.faults.deny(verb, resource)
    found = await look(cluster.config())
    assert found["rights"].status == "failed"
    told = found["rights"].message
    assert "create jobs.batch; watch pods; get pods/log" in told
    assert found["job"].status == "failed"
    assert found["probe"].status == "skipped"


async def test_what_we_may_not_look_at_is_no_failure(
    cluster: ClusterUnderTest, fake: FakeCluster
) -> None:
    for resource in ("namespaces", "serviceaccounts"):
        fake.faults.deny("get", resource)
    fake.faults.deny("list", "resourcequotas")
    job = JobLayer(image=cluster.image, service_account="somebody")
    told = statuses(await look(cluster.config(job=job), probe=False))
    assert told["namespace"] == told["service account"] == told["quota"] == "skipped"
    assert "failed" not in told.values()


@pytest.mark.parametrize(
    ("hard", "status", "said"),
    [
        ({"requests.memory": "1Gi"}, "failed", "requests.memory is 1Gi, and one pod needs 2147"),
        ({"requests.memory": "5Gi", "pods": "100"}, "warning", "leaves room for 2"),
        ({"requests.memory": "100Gi", "limits.cpu": "4"}, "ok", "4 rollouts at once fit"),
        ({"configmaps": "0"}, "ok", "fit"),
        ({"requests.nvidia.com/gpu": "0"}, "ok", "fit"),
    ],
)
async def test_quota_is_compared_with_what_rollouts_need(
    cluster: ClusterUnderTest, fake: FakeCluster, hard: dict[str, str], status: str, said: str
) -> None:
    quota = {"metadata": {"name": "team"}, "spec": {"hard": hard}}
    fake.store.create("resourcequotas", "default", quota)
    fake.store.update(
        "resourcequotas", "default", "team", lambda item: item.update(status={"hard": hard})
    )
    resources = {"limits": {"memory": "2Gi", "cpu": "500m"}}
    job = JobLayer(image=cluster.image, resources=resources)
    found = await look(cluster.config(job=job), probe=False)
    assert (found["quota"].status, said in found["quota"].message) == (status, True), found


@pytest.mark.parametrize("resource", ["limits.cpu", "requests.cpu", "cpu"])
async def test_quota_for_what_the_pod_does_not_set_refuses_it(
    cluster: ClusterUnderTest, fake: FakeCluster, resource: str
) -> None:
    quota = {"metadata": {"name": "team"}, "spec": {"hard": {resource: "10"}}}
    fake.store.create("resourcequotas", "default", quota)
    fake.store.update(
        "resourcequotas", "default", "team", lambda item: item.update(status=item["spec"])
    )
    found = await look(cluster.config(), probe=False)
    assert (found["quota"].status, f"do not set {resource}" in found["quota"].message) == (
        "failed",
        True,
    )
    limits = {"limits": [{"type": "Container", "default": {"cpu": "1"}}]}
    fake.store.create("limitranges", "default", {"metadata": {"name": "usual"}, "spec": limits})
    assert (await look(cluster.config(), probe=False))["quota"].status == "ok"


async def test_quota_of_some_pods_alone_is_not_judged(
    cluster: ClusterUnderTest, fake: FakeCluster
) -> None:
    spec = {"hard": {"pods": "0"}, "scopes": ["BestEffort"]}
    fake.store.create("resourcequotas", "default", {"metadata": {"name": "q"}, "spec": spec})
    fake.store.update("resourcequotas", "default", "q", lambda item: item.update(status=spec))
    assert (await look(cluster.config(), probe=False))["quota"].status == "ok"


async def test_node_that_never_comes_is_told_at_the_time_out(
    cluster: ClusterUnderTest, fake: FakeCluster
) -> None:
    fake.node.script_for = lambda pod: scripts.never_scheduled()
    found = await look(cluster.config(), seconds=1)
    assert found["probe"].status == "failed"
    assert "Insufficient cpu" in found["probe"].message
    assert await nothing_is_left(cluster)


async def test_job_that_waits_in_a_queue_is_a_warning(cluster: ClusterUnderTest) -> None:
    job = JobLayer(image=cluster.image, queue_name="rl")
    found = await look(cluster.config(job=job), seconds=1)
    assert (found["probe"].status, "queue" in found["probe"].message) == ("warning", True), found
    assert await nothing_is_left(cluster)


@pytest.mark.parametrize(
    ("script", "said"),
    [
        (scripts.exits(42), "has nothing that could try"),
        (
            scripts.Script(exit_code=128, reason="StartError"),
            "has no shell",
        ),
    ],
)
async def test_image_that_cannot_try_the_url_is_a_warning(
    cluster: ClusterUnderTest, fake: FakeCluster, script: scripts.Script, said: str
) -> None:
    fake.node.script_for = lambda pod: script
    found = await look(cluster.config())
    assert (found["probe"].status, said in found["probe"].message) == ("warning", True), found


async def test_cancelled_look_leaves_no_job(cluster: ClusterUnderTest, fake: FakeCluster) -> None:
    fake.node.script_for = lambda pod: scripts.hangs()
    looking = asyncio.create_task(look(cluster.config()))
    async with asyncio.timeout(LIMIT_SECONDS):
        while not await cluster.pods():
            await CLOCK.sleep(0.05)
    looking.cancel()
    await asyncio.gather(looking, return_exceptions=True)
    assert await nothing_is_left(cluster)


async def test_job_whose_creation_was_not_confirmed_is_deleted(
    cluster: ClusterUnderTest, fake: FakeCluster
) -> None:
    fake.faults.lose_reply(r"/jobs\?fieldValidation=Strict$", method="POST")
    fake.faults.bad_gateway("/jobs/", method="DELETE")
    found = await look(cluster.config())
    assert found["probe"].status == "failed", found
    assert "no Job can be created" not in found["probe"].message
    assert [r.method for r in fake.requests if "/jobs/" in r.path] == ["DELETE", "DELETE"]
    assert await nothing_is_left(cluster)


async def test_look_that_is_cancelled_during_the_creation_leaves_no_job(
    cluster: ClusterUnderTest, fake: FakeCluster
) -> None:
    fake.faults.delay(0.5, r"/jobs\?fieldValidation=Strict$", method="POST")
    looking = asyncio.create_task(look(cluster.config()))
    async with asyncio.timeout(LIMIT_SECONDS):
        while not any(r.method == "POST" and "dryRun" not in r.query for r in jobs_asked(fake)):
            await CLOCK.sleep(0.01)
    looking.cancel()
    await asyncio.gather(looking, return_exceptions=True)
    assert [r.method for r in fake.requests if "/jobs/" in r.path] == ["DELETE"]
    assert await nothing_is_left(cluster)


async def test_image_with_bash_alone_reaches_the_service(
    cluster: ClusterUnderTest, service: Any, tmp_path: Path
) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("sh", "bash"):
        (programs / name).symlink_to(shutil.which(name) or pytest.skip(f"needs {name}"))
    job = JobLayer(image=cluster.image, env={"PATH": str(programs)})
    found = await look(cluster.config(job=job), url=service.url)
    assert found["probe"].status == "ok", found
    found = await look(cluster.config(job=job), url=f"{service.url}/nowhere")
    assert found["probe"].status == "failed", found
    assert "404" in found["probe"].message
    assert "not reached with bash" in found["probe"].message


@pytest.mark.parametrize("text", [None, "{}", "= no yaml :", "[1]"])
async def test_kubeconfig_that_cannot_be_used_is_one_failure(
    tmp_path: Path, text: str | None
) -> None:
    path = tmp_path / "kubeconfig"
    if text is not None:
        path.write_text(text)
    found = await look(K8sConfig(kubeconfig=str(path), job=JobLayer(image="i")))
    assert found["cluster"].status == "failed"
    assert found["cluster"].hint
    assert {f.status for f in found.values() if f.subject != "cluster"} == {"skipped"}


async def test_refused_credentials_and_foreign_answers(
    cluster: ClusterUnderTest, fake: FakeCluster
) -> None:
    fake.faults.accept_tokens("another")
    found = await look(cluster.config())
    assert found["cluster"].status == "failed"
    assert "log in anew" in (found["cluster"].hint or "")
    fake.faults.bad_gateway("/version", count=None)
    assert (await look(cluster.config()))["cluster"].status == "failed"
    fake.faults.clear()
    fake.faults.answer(200, b"<html>please log in</html>", "/version")
    found = await look(cluster.config())
    assert "please log in" in found["cluster"].message
    assert "something else answers" in (found["cluster"].hint or "")


def kubeconfig_of(folder: Path, server: str) -> K8sConfig:
    """Settings for a server of which only the address is known."""
    path = folder / "kubeconfig-of-server"
    path.write_text(f"""\
current-context: c
contexts: [{{name: c, context: {{cluster: c, user: u}}}}]
clusters: [{{name: c, cluster: {{server: "{server}"}}}}]
users: [{{name: u, user: {{token: a-secret-token}}}}]
""")
    return K8sConfig(kubeconfig=str(path), job=JobLayer(image="i"))


async def test_certificate_that_we_do_not_trust_is_told_from_wrong_credentials(
    tmp_path: Path,
) -> None:
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(*make_certificate(tmp_path))
    listener = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0, ssl=tls)
    async with listener:
        port = listener.sockets[0].getsockname()[1]
        found = await look(kubeconfig_of(tmp_path, f"https://127.0.0.1:{port}"))
    assert found["cluster"].status == "failed"
    assert "certificate-authority" in (found["cluster"].hint or "")
    assert "a-secret-token" not in repr(found)


async def test_server_without_tls_is_told_from_a_wrong_certificate(
    cluster: ClusterUnderTest, fake: FakeCluster, tmp_path: Path
) -> None:
    server = fake.url.replace("http://", "https://")
    found = await look(kubeconfig_of(tmp_path, server))
    assert found["cluster"].status == "failed"
    assert "no TLS" in (found["cluster"].hint or ""), found


async def test_server_that_is_silent_is_not_waited_for_long(
    cluster: ClusterUnderTest, fake: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert doctor.REQUEST_SECONDS <= 10
    monkeypatch.setattr(doctor, "REQUEST_SECONDS", 0.5)
    fake.faults.black_hole("/version")
    async with asyncio.timeout(15):
        found = await look(cluster.config())
    assert "has been silent for too long" in found["cluster"].message
    fake.faults.black_hole("accessreviews", count=None)
    async with asyncio.timeout(15):
        found = await look(cluster.config(), probe=False)
    assert (found["cluster"].status, found["rights"].status) == ("ok", "failed")


async def test_pod_without_an_image_is_found_before_anything_is_created(
    cluster: ClusterUnderTest, fake: FakeCluster
) -> None:
    found = await look(cluster.config(job=JobLayer()))
    assert found["job"].status == "failed"
    assert "image" in (found["job"].hint or "")
    assert not [r for r in fake.requests if r.method == "POST" and "/jobs" in r.path]
