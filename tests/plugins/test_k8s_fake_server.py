"""The fake API server: its store, and over real HTTP what a cluster was seen to do."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest

from agl_core.clock import SystemClock
from agl_core.testing.clock import FakeClock
from agl_k8s.errors import error_of_answer, kind_of
from agl_k8s.testing.history import History
from agl_k8s.testing.http import FakeApiServer
from agl_k8s.testing.objects import ApiStatus, ObjectStore

JOBS = "/apis/batch/v1/namespaces/default/jobs"
PODS = "/api/v1/namespaces/default/pods"
SECRETS = "/api/v1/namespaces/default/secrets"
LEASES = "/apis/coordination.k8s.io/v1/namespaces/default/leases"
NAMESPACES = "/api/v1/namespaces"
MERGE = "application/merge-patch+json"
STRATEGIC = "application/strategic-merge-patch+json"


def pod_spec(**changes: Any) -> dict[str, Any]:
    agent = {"name": "agent", "image": "busybox:stable", "command": ["true"]}
    return {"restartPolicy": "Never", "containers": [agent]} | changes


def job(name: str = "r-1", *, metadata: dict | None = None, **spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name} | (metadata or {}),
        "spec": {"template": {"spec": pod_spec()}} | spec,
    }


def pod(name: str = "p-1", *, owner: dict | None = None, **spec: Any) -> dict[str, Any]:
    metadata: dict[str, Any] = {"name": name}
    if owner is not None:
        metadata["ownerReferences"] = [owner_reference(owner)]
    return {"metadata": metadata, "spec": pod_spec(nodeName="n-1") | spec}


def owner_reference(owner: dict[str, Any]) -> dict[str, Any]:
    return {
        "apiVersion": owner["apiVersion"],
        "kind": owner["kind"],
        "name": owner["metadata"]["name"],
        "uid": owner["metadata"]["uid"],
        "controller": True,
        "blockOwnerDeletion": False,
    }


class Logs:
    """A node's logs: one text, in pieces when followed."""

    def __init__(self, *pieces: bytes) -> None:
        self.pieces = pieces

    def read(self, namespace: str, pod: str, container: str) -> bytes | ApiStatus:
        if (namespace, pod, container) != ("default", "p-1", "agent"):
            return ApiStatus(404, "NotFound", "no such log")
        return b"".join(self.pieces)

    async def follow(self, namespace: str, pod: str, container: str) -> AsyncIterator[bytes]:
        for piece in self.pieces:
            yield piece


class Caller:
    """Asks a server over HTTP."""

    def __init__(self, server: FakeApiServer, store: ObjectStore) -> None:
        self.server = server
        self.store = store
        self.session = aiohttp.ClientSession()

    async def call(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        content_type: str = "application/json",
        token: str | None = None,
        **query: str,
    ) -> tuple[int, dict[str, Any]]:
        status, _, text = await self.raw(
            method, path, body, content_type=content_type, token=token, **query
        )
        return status, json.loads(text)

    async def raw(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        content_type: str = "application/json",
        token: str | None = None,
        **query: str,
    ) -> tuple[int, Any, bytes]:
        headers = {"Content-Type": content_type}
        if token is not None:
            headers["Authorization"] = f"Bearer {token}"
        async with self.session.request(
            method,
            self.server.url + path,
            params=query,
            data=None if body is None else io.BytesIO(json.dumps(body).encode()),
            headers=headers,
        ) as response:
            return response.status, response.headers, await response.read()

    async def kind(self, method: str, path: str, body: Any = None, **query: str) -> str:
        """What the plugin takes a refusal for."""
        status, headers, text = await self.raw(method, path, body, **query)
        assert status >= 400
        return kind_of(error_of_answer(f"{method} {path}", status, headers, text))

    @asynccontextmanager
    async def watch(self, path: str, **query: str) -> AsyncIterator[Lines]:
        async with self.session.get(
            self.server.url + path, params={"watch": "true"} | query
        ) as response:
            assert response.status == 200
            yield Lines(response)


class Lines:
    """The events of a watch."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._response = response

    async def next(self) -> tuple[str, dict[str, Any]]:
        async with asyncio.timeout(5):
            line = await self._response.content.readline()
        assert line, "the watch has ended"
        event = json.loads(line)
        return event["type"], event["object"]

    async def next_name(self) -> tuple[str, str]:
        type_, item = await self.next()
        return type_, item["metadata"]["name"]

    async def rest(self) -> list[tuple[str, dict[str, Any]]]:
        """All that comes until the server ends it."""
        async with asyncio.timeout(5):
            text = await self._response.read()
        events = [json.loads(line) for line in text.splitlines()]
        return [(event["type"], event["object"]) for event in events]


@asynccontextmanager
async def serving(clock: Any = None, **options: Any) -> AsyncIterator[Caller]:
    clock = clock or SystemClock()
    store = ObjectStore(clock)
    async with FakeApiServer(store, clock, **options) as server:
        caller = Caller(server, store)
        async with caller.session:
            yield caller


@pytest.fixture
def store() -> ObjectStore:
    return ObjectStore(SystemClock())


@pytest.fixture
async def api() -> AsyncIterator[Caller]:
    async with serving() as caller:
        yield caller


# -- The store ------------------------------------------------------------------------------------


def test_store_gives_and_takes_copies(store: ObjectStore) -> None:
    body = pod()
    made = store.create("pods", "default", body)
    body["spec"]["nodeName"] = made["spec"]["nodeName"] = "changed"
    store.get("pods", "default", "p-1")["spec"]["nodeName"] = "changed"
    store.list("pods")[0]["spec"]["nodeName"] = "changed"
    assert store.get("pods", "default", "p-1")["spec"]["nodeName"] == "n-1"


def test_change_counts_on_only_where_something_changed(store: ObjectStore) -> None:
    first = store.create("pods", "default", pod())
    same = store.update("pods", "default", "p-1", lambda item: None)
    other = store.update(
        "pods", "default", "p-1", lambda item: item["status"].update(phase="Running")
    )
    versions = [int(item["metadata"]["resourceVersion"]) for item in (first, same, other)]
    assert versions[0] == versions[1] < versions[2] == store.version
    assert other["metadata"]["generation"] == 1


def test_change_cannot_forge_identity_or_undo_deletion(store: ObjectStore) -> None:
    made = store.create("pods", "default", pod())
    gone = store.delete("pods", "default", "p-1")

    def forge(item: dict[str, Any]) -> None:
        item["kind"] = "Other"
        item["metadata"] = {"name": "other", "uid": "other"}

    after = store.update("pods", "default", "p-1", forge)
    assert after["kind"] == "Pod"
    assert after["metadata"]["uid"] == made["metadata"]["uid"]
    assert after["metadata"]["deletionTimestamp"] == gone["metadata"]["deletionTimestamp"]


def test_listeners_hear_changes_in_order_even_those_of_other_listeners(store: ObjectStore) -> None:
    heard: list[tuple[str, str, int]] = []

    def bind(type_: str, resource: str, item: dict[str, Any]) -> None:
        if type_ == "ADDED" and resource == "pods":
            store.update(
                "pods", "default", "p-1", lambda new: new["status"].update(phase="Running")
            )

    store.subscribe(bind)
    unsubscribe = store.subscribe(
        lambda type_, resource, item: heard.append(
            (type_, resource, int(item["metadata"]["resourceVersion"]))
        )
    )
    store.create("pods", "default", pod())
    unsubscribe()
    store.delete("pods", "default", "p-1")
    assert [entry[:2] for entry in heard] == [("ADDED", "pods"), ("MODIFIED", "pods")]
    assert heard[0][2] < heard[1][2]


def test_finalizer_keeps_object_until_it_is_taken_off(store: ObjectStore) -> None:
    store.create("secrets", "default", {"metadata": {"name": "s", "finalizers": ["agl/keep"]}})
    store.delete("secrets", "default", "s")
    assert "deletionTimestamp" in store.get("secrets", "default", "s")["metadata"]
    store.update("secrets", "default", "s", lambda item: item["metadata"].update(finalizers=[]))
    with pytest.raises(ApiStatus, match=r'secrets "s" not found'):
        store.get("secrets", "default", "s")


def test_running_pod_waits_for_its_node() -> None:
    clock = FakeClock(1_750_000_000.0)
    store = ObjectStore(clock)
    store.create("pods", "default", pod(terminationGracePeriodSeconds=10))
    marked = store.delete("pods", "default", "p-1")["metadata"]
    assert marked["deletionGracePeriodSeconds"] == 10
    assert marked["deletionTimestamp"] == "2025-06-15T15:06:50Z"
    # The status of a pod that ends is still written.
    store.update("pods", "default", "p-1", lambda item: item["status"].update(phase="Failed"))
    hurried = store.delete("pods", "default", "p-1", grace_seconds=0)
    assert hurried["status"]["phase"] == "Failed"
    assert store.list("pods") == []


def test_later_delete_of_pod_shortens_but_never_lengthens_its_grace(store: ObjectStore) -> None:
    store.create("pods", "default", pod())
    graces = [
        store.delete("pods", "default", "p-1", grace_seconds=seconds)["metadata"][
            "deletionGracePeriodSeconds"
        ]
        for seconds in (20, 60, 5)
    ]
    assert graces == [20, 20, 5]


def test_grace_counts_from_the_first_delete() -> None:
    clock = FakeClock(1_750_000_000.0)
    store = ObjectStore(clock)
    store.create("pods", "default", pod(terminationGracePeriodSeconds=10))
    store.delete("pods", "default", "p-1")
    clock.advance(7.0)
    # As the kubelet's last delete: when the end was asked for stays readable.
    hurried = store.delete("pods", "default", "p-1", grace_seconds=0)["metadata"]
    assert hurried["deletionTimestamp"] == "2025-06-15T15:06:40Z"
    assert hurried["deletionGracePeriodSeconds"] == 0


@pytest.mark.parametrize(
    ("spec", "phase"), [({"nodeName": None}, "Pending"), ({}, "Succeeded"), ({}, "Failed")]
)
def test_pod_that_no_node_runs_goes_at_once(store: ObjectStore, spec: dict, phase: str) -> None:
    store.create("pods", "default", pod(**spec) | {"status": {"phase": phase}})
    store.delete("pods", "default", "p-1")
    assert store.list("pods") == []


def test_forced_delete_of_pod_respects_its_finalizers(store: ObjectStore) -> None:
    tracked = pod()
    tracked["metadata"]["finalizers"] = ["batch.kubernetes.io/job-tracking"]
    store.create("pods", "default", tracked)
    store.delete("pods", "default", "p-1", grace_seconds=0)
    assert store.get("pods", "default", "p-1")["metadata"]["deletionGracePeriodSeconds"] == 0
    store.update("pods", "default", "p-1", lambda item: item["metadata"].update(finalizers=[]))
    assert store.list("pods") == []


def own(store: ObjectStore) -> dict[str, Any]:
    """A Job with a running pod and a Secret."""
    owner = store.create("jobs", "default", job())
    store.create("pods", "default", pod(owner=owner))
    secret = {"metadata": {"name": "r-1", "ownerReferences": [owner_reference(owner)]}}
    store.create("secrets", "default", secret)
    return owner


def test_foreground_deletion_ends_when_the_pods_are_gone(store: ObjectStore) -> None:
    own(store)
    store.delete("jobs", "default", "r-1", propagation="Foreground")
    marked = store.get("jobs", "default", "r-1")["metadata"]
    assert marked["finalizers"] == ["foregroundDeletion"]
    assert "deletionTimestamp" in marked
    assert "deletionTimestamp" in store.get("pods", "default", "p-1")["metadata"]
    assert store.list("secrets") == []
    before = store.version
    store.delete("pods", "default", "p-1", grace_seconds=0)
    order = [(c.type, c.resource) for c in store.changes_after(before) if c.type == "DELETED"]
    assert order == [("DELETED", "pods"), ("DELETED", "jobs")]


def test_background_deletion_frees_the_name_while_the_pod_runs(store: ObjectStore) -> None:
    own(store)
    store.delete("jobs", "default", "r-1", propagation="Background")
    assert store.list("jobs") == store.list("secrets") == []
    assert "deletionTimestamp" in store.get("pods", "default", "p-1")["metadata"]


def test_c66_deletion_of_job_without_policy_orphans_its_pods(store: ObjectStore) -> None:
    own(store)
    store.delete("jobs", "default", "r-1")
    assert store.list("jobs") == []
    left = store.get("pods", "default", "p-1")["metadata"]
    assert "ownerReferences" not in left
    assert "deletionTimestamp" not in left


def test_object_of_an_owner_that_never_was_is_collected(store: ObjectStore) -> None:
    ghost = {"apiVersion": "batch/v1", "kind": "Job", "name": "x", "uid": "none"}
    store.create("secrets", "default", {"metadata": {"name": "s", "ownerReferences": [ghost]}})
    assert store.list("secrets") == []


def test_without_its_collector_foreground_deletion_only_marks_the_job(store: ObjectStore) -> None:
    own(store)
    store.garbage_collector.stop()
    store.delete("jobs", "default", "r-1", propagation="Foreground")
    assert "deletionTimestamp" in store.get("jobs", "default", "r-1")["metadata"]
    assert "deletionTimestamp" not in store.get("pods", "default", "p-1")["metadata"]
    store.garbage_collector.start()
    assert "deletionTimestamp" in store.get("pods", "default", "p-1")["metadata"]


def test_namespace_goes_after_what_is_in_it(store: ObjectStore) -> None:
    store.create("namespaces", None, {"metadata": {"name": "team"}})
    store.create("pods", "team", pod())
    store.delete("namespaces", None, "team")
    assert store.get("namespaces", None, "team")["status"]["phase"] == "Terminating"
    store.delete("pods", "team", "p-1", grace_seconds=0)
    assert store.list("namespaces") == []


def test_past_is_known_until_it_is_compacted(store: ObjectStore) -> None:
    store.create("pods", "default", pod("a"))
    then = store.version
    store.create("pods", "default", pod("b"))
    store.update("pods", "default", "a", lambda item: item["status"].update(phase="Running"))
    store.delete("pods", "default", "a", grace_seconds=0)
    past = store.list_at("pods", "default", then)
    assert [(p["metadata"]["name"], p["status"]["phase"]) for p in past] == [("a", "Pending")]
    store.compact()
    with pytest.raises(ApiStatus, match="410 Expired"):
        store.list_at("pods", "default", then)


def test_long_history_forgets_its_oldest_tenth() -> None:
    history = History(longest=20)
    first = history.version
    for _ in range(21):
        history.add("MODIFIED", "pods", {"metadata": {}}, None)
    with pytest.raises(ApiStatus) as caught:
        history.after(first + 1)
    assert (caught.value.code, caught.value.reason) == (410, "Expired")
    assert [change.version for change in history.after(first + 2)] == [
        *range(first + 3, first + 22)
    ]
    assert history.after(history.version) == history.after(history.version + 5) == []


# -- Creating and changing over HTTP --------------------------------------------------------------


async def test_job_gets_the_defaults_and_labels_of_a_cluster(api: Caller) -> None:
    status, made = await api.call("POST", JOBS, job(), fieldValidation="Strict")
    assert status == 201
    spec, uid = made["spec"], made["metadata"]["uid"]
    assert (spec["backoffLimit"], spec["completions"], spec["suspend"]) == (6, 1, False)
    assert spec["selector"] == {"matchLabels": {"batch.kubernetes.io/controller-uid": uid}}
    assert spec["template"]["metadata"]["labels"]["batch.kubernetes.io/job-name"] == "r-1"
    assert spec["template"]["spec"]["terminationGracePeriodSeconds"] == 30
    assert (await api.call("GET", f"{JOBS}/r-1")) == (200, made)


async def test_name_taken_and_name_still_going_are_told_apart(api: Caller) -> None:
    await api.call("POST", JOBS, job(metadata={"finalizers": ["agl/keep"]}))
    status, refused = await api.call("POST", JOBS, job())
    assert (status, refused["reason"]) == (409, "AlreadyExists")
    assert refused["message"] == 'jobs.batch "r-1" already exists'
    assert await api.kind("POST", JOBS, job()) == "exists"
    await api.call("DELETE", f"{JOBS}/r-1", {"propagationPolicy": "Background"})
    assert await api.kind("POST", JOBS, job()) == "being_deleted"


async def test_generated_names_are_valid_and_differ(api: Caller) -> None:
    body = pod()
    body["metadata"] = {"generateName": "x" * 62 + "-"}
    names = {(await api.call("POST", PODS, body))[1]["metadata"]["name"] for _ in range(5)}
    assert len(names) == 5
    assert {len(name) for name in names} == {63}


async def test_put_of_a_stale_version_is_a_conflict(api: Caller) -> None:
    lease = {"metadata": {"name": "l"}, "spec": {"holderIdentity": "a"}}
    _, made = await api.call("POST", LEASES, lease)
    made["spec"]["holderIdentity"] = "b"
    status, renewed = await api.call("PUT", f"{LEASES}/l", made)
    assert (status, renewed["spec"]["holderIdentity"]) == (200, "b")
    assert await api.kind("PUT", f"{LEASES}/l", made) == "conflict"
    assert await api.kind("PUT", f"{LEASES}/l", lease) == "invalid"  # says no version


async def test_delete_with_the_uid_of_another_is_a_conflict(api: Caller) -> None:
    _, made = await api.call("POST", JOBS, job())
    status, refused = await api.call("DELETE", f"{JOBS}/r-1", {"preconditions": {"uid": "other"}})
    assert (status, refused["reason"]) == (409, "Conflict")
    assert f"UID in object meta: {made['metadata']['uid']}" in refused["message"]
    options = {"preconditions": {"uid": made["metadata"]["uid"]}, "propagationPolicy": "Background"}
    assert (await api.call("DELETE", f"{JOBS}/r-1", options))[0] == 200
    assert await api.kind("DELETE", f"{JOBS}/r-1", options) == "not_found"


async def test_delete_of_job_warns_that_pods_stay(api: Caller) -> None:
    await api.call("POST", JOBS, job())
    _, headers, _ = await api.raw("DELETE", f"{JOBS}/r-1")
    assert "child pods are preserved" in headers["Warning"]


async def test_unknown_field_is_refused_if_strict_else_dropped_with_a_warning(api: Caller) -> None:
    body = job()
    body["spec"]["template"]["spec"]["containers"][0]["imagee"] = "x"
    path = "spec.template.spec.containers[0].imagee"
    status, refused = await api.call("POST", JOBS, body, fieldValidation="Strict")
    assert status == 400
    assert f'strict decoding error: unknown field "{path}"' in refused["message"]
    status, headers, text = await api.raw("POST", JOBS, body)
    assert status == 201
    assert headers["Warning"] == f'299 - "unknown field \\"{path}\\""'
    assert b"imagee" not in text


async def test_wrong_type_is_refused_even_if_not_strict(api: Caller) -> None:
    status, refused = await api.call("POST", JOBS, job(backoffLimit="2"))
    assert (status, refused["reason"]) == (400, "BadRequest")
    assert "cannot unmarshal string into Go struct field .spec.backoffLimit" in refused["message"]


async def test_quantities_may_be_numbers(api: Caller) -> None:
    body = job()
    body["spec"]["template"]["spec"]["containers"][0]["resources"] = {"limits": {"cpu": 1}}
    assert (await api.call("POST", JOBS, body, fieldValidation="Strict"))[0] == 201


async def test_variable_set_twice_is_let_through_with_a_warning(api: Caller) -> None:
    body = job()
    env = [{"name": "A", "value": "1"}, {"name": "A", "value": "2"}]
    body["spec"]["template"]["spec"]["containers"][0]["env"] = env
    status, headers, _ = await api.raw("POST", JOBS, body, fieldValidation="Strict")
    assert status == 201
    assert "containers[0].env[1]: hides previous definition" in headers["Warning"]


def policy(**rule: Any) -> dict[str, Any]:
    return {"podFailurePolicy": {"rules": [rule]}}


def exit_codes(*codes: int, container: str = "agent") -> dict[str, Any]:
    return {"containerName": container, "operator": "In", "values": [*codes]}


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (job("x" * 64), "metadata.name"),
        (job("Upper"), "a lowercase RFC 1123 subdomain"),
        (job(metadata={"labels": {"a": "x" * 64}}), "must be no more than 63 characters"),
        (job(metadata={"labels": {"a": "-x"}}), "a valid label must be"),
        (job(metadata={"labels": {"a/b/c": "x"}}), "a qualified name must consist"),
        (job(metadata={"annotations": {"a": "x" * 262_144}}), "may not be more than 262144"),
        (job(metadata={"annotations": {f"a{n}": "x" * 130_000 for n in range(3)}}), "annotations"),
        (job(backoffLimit=-1), "spec.backoffLimit: Invalid value: -1"),
        (job(template={"spec": pod_spec(restartPolicy="Always")}), 'valid values: "OnFailure"'),
        (job(template={"spec": pod_spec(containers=[])}), "containers: Required value"),
        (job(template={"spec": pod_spec(activeDeadlineSeconds=0)}), "must be between 1 and"),
        (job(**policy(action="FailJob", onExitCodes=exit_codes(0))), "must not be 0 for the In"),
        (job(**policy(action="FailIndex", onExitCodes=exit_codes(1))), "backoffLimitPerIndex"),
        (job(**policy(action="FailJob", onExitCodes=exit_codes(3, 1))), "must be ordered"),
        (job(**policy(action="FailJob", onExitCodes=exit_codes(1, container="x"))), "one of the"),
        (
            job(
                **policy(action="FailJob", onExitCodes=exit_codes(1)),
                podReplacementPolicy="TerminatingOrFailed",
            ),
            'supported values: "Failed"',
        ),
        (
            job(
                template={"spec": pod_spec(restartPolicy="OnFailure")},
                **policy(action="FailJob", onExitCodes=exit_codes(1)),
            ),
            "only 'Never' is supported when podFailurePolicy is specified",
        ),
    ],
)
async def test_c68_invalid_job_is_422_in_the_words_of_the_server(
    api: Caller, body: dict, words: str
) -> None:
    status, refused = await api.call("POST", JOBS, body, fieldValidation="Strict")
    assert (status, refused["reason"]) == (422, "Invalid")
    assert refused["message"].startswith('Job.batch "')
    assert words in refused["message"]
    assert refused["details"]["causes"]
    assert api.store.list("jobs") == []


async def test_policy_and_names_at_their_limits_are_valid(api: Caller) -> None:
    rules = [
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget"}]},
        {"action": "FailJob", "onExitCodes": exit_codes(1, 78)},
    ]
    body = job("x" * 63, podFailurePolicy={"rules": rules})
    body["metadata"]["labels"] = {"a.b/c": "x" * 63, "empty": ""}
    status, made = await api.call("POST", JOBS, body, fieldValidation="Strict")
    assert status == 201
    assert made["spec"]["podReplacementPolicy"] == "Failed"


@pytest.mark.parametrize(("size", "status"), [(1_300_000, 201), (1_600_000, 422), (3_200_000, 413)])
async def test_c69_size_decides_between_201_422_and_413(
    api: Caller, size: int, status: int
) -> None:
    body = job()
    body["spec"]["template"]["spec"]["containers"][0]["args"] = ["x" * size]
    assert (await api.call("POST", JOBS, body))[0] == status


async def test_template_is_immutable_but_suspension_and_limits_are_not(api: Caller) -> None:
    _, made = await api.call("POST", JOBS, job())
    image = {"containers": [{"name": "agent", "image": "other"}]}
    change = {"spec": {"template": {"spec": image}}}
    status, refused = await api.call("PATCH", f"{JOBS}/r-1", change, content_type=STRATEGIC)
    assert status == 422
    assert "spec.template: Invalid value" in refused["message"]
    assert refused["message"].endswith("field is immutable")
    # What an admission controller such as Kueue does while it waits, and only then.
    place = {"spec": {"template": {"spec": {"nodeSelector": {"pool": "a"}}}}}
    assert await api.kind("PATCH", f"{JOBS}/r-1", place, content_type=MERGE) == "invalid"
    change = {"spec": {"suspend": True, "backoffLimit": 1, "activeDeadlineSeconds": 9}}
    status, changed = await api.call("PATCH", f"{JOBS}/r-1", change, content_type=MERGE)
    assert (status, changed["spec"]["suspend"]) == (200, True)
    assert (await api.call("PATCH", f"{JOBS}/r-1", place, content_type=MERGE))[0] == 200
    assert changed["metadata"]["uid"] == made["metadata"]["uid"]


async def test_status_is_written_apart_from_the_rest(api: Caller) -> None:
    _, made = await api.call("POST", JOBS, job() | {"status": {"active": 9}})
    made["status"] = {"active": 1}
    made["spec"]["suspend"] = True
    _, whole = await api.call("PUT", f"{JOBS}/r-1", made)
    assert (whole["status"], whole["spec"]["suspend"]) == ({}, True)
    made["metadata"].pop("resourceVersion")
    made["spec"]["suspend"] = False
    _, part = await api.call("PUT", f"{JOBS}/r-1/status", made)
    assert (part["status"], part["spec"]["suspend"]) == ({"active": 1}, True)


async def test_immutable_secret_cannot_be_changed(api: Caller) -> None:
    secret = {"metadata": {"name": "s"}, "immutable": True, "stringData": {"token": "abc"}}
    _, made = await api.call("POST", SECRETS, secret)
    assert made["data"] == {"token": "YWJj"}
    change = {"data": {"token": "eHl6"}}
    status, refused = await api.call("PATCH", f"{SECRETS}/s", change, content_type=MERGE)
    assert status == 422
    assert "field is immutable when `immutable` is set" in refused["message"]


async def test_strategic_patch_merges_lists_by_name_and_merge_patch_replaces_them(
    api: Caller,
) -> None:
    body = pod()
    body["metadata"]["finalizers"] = ["agl/a"]
    body["status"] = {"conditions": [{"type": "Ready", "status": "False"}]}
    api.store.create("pods", "default", body)
    condition = {"type": "Scheduled", "status": "True"}
    conditions = {"status": {"conditions": [condition]}}
    _, merged = await api.call("PATCH", f"{PODS}/p-1/status", conditions, content_type=STRATEGIC)
    assert {c["type"] for c in merged["status"]["conditions"]} == {"Ready", "Scheduled"}
    _, replaced = await api.call("PATCH", f"{PODS}/p-1/status", conditions, content_type=MERGE)
    assert replaced["status"]["conditions"] == [condition]
    change = {"metadata": {"finalizers": ["agl/b"]}}
    _, both = await api.call("PATCH", f"{PODS}/p-1", change, content_type=STRATEGIC)
    assert both["metadata"]["finalizers"] == ["agl/a", "agl/b"]
    change = {"metadata": {"$deleteFromPrimitiveList/finalizers": ["agl/a"]}}
    _, one = await api.call("PATCH", f"{PODS}/p-1", change, content_type=STRATEGIC)
    assert one["metadata"]["finalizers"] == ["agl/b"]
    assert (await api.call("PATCH", f"{PODS}/p-1", [], content_type="text/plain"))[0] == 415


# -- Who may, and how many ------------------------------------------------------------------------


async def test_c67_quota_and_rights_are_both_403_and_told_apart_by_their_text(api: Caller) -> None:
    hard = {"spec": {"hard": {"count/jobs.batch": "1"}}}
    api.store.create("resourcequotas", "default", {"metadata": {"name": "q"}} | hard)
    await api.call("POST", JOBS, job("a"))
    status, refused = await api.call("POST", JOBS, job("b"))
    assert (status, refused["reason"]) == (403, "Forbidden")
    assert refused["message"] == (
        'jobs.batch "b" is forbidden: exceeded quota: q, requested: count/jobs.batch=1, '
        "used: count/jobs.batch=1, limited: count/jobs.batch=1"
    )
    assert await api.kind("POST", JOBS, job("b")) == "quota"
    await api.call("DELETE", f"{JOBS}/a", {"propagationPolicy": "Background"})
    assert (await api.call("POST", JOBS, job("b")))[0] == 201

    api.server.faults.deny("create", "jobs")
    status, refused = await api.call("POST", JOBS, job("c"))
    assert (status, refused["reason"]) == (403, "Forbidden")
    assert (
        'User "system:serviceaccount:default:agl-lite" cannot create resource "jobs" in API'
        in (refused["message"])
    )
    assert await api.kind("POST", JOBS, job("c")) == "forbidden"
    assert (await api.call("GET", JOBS))[0] == 200
    api.server.faults.allow("create", "jobs")
    assert await api.kind("POST", JOBS, job("c")) == "quota"


async def test_namespace_that_goes_or_never_was_takes_nothing(api: Caller) -> None:
    api.store.create("namespaces", None, {"metadata": {"name": "team"}})
    api.store.create("pods", "team", pod())
    api.store.delete("namespaces", None, "team")
    path = JOBS.replace("default", "team")
    assert await api.kind("POST", path, job()) == "namespace_terminating"
    assert await api.kind("POST", JOBS.replace("default", "none"), job()) == "not_found"


async def test_c53_token_is_good_until_it_expires() -> None:
    clock = FakeClock()
    async with serving(clock) as api:
        faults = api.server.faults
        faults.accept_tokens("a")
        faults.expire_token("a", at=clock.now() + 2)
        assert (await api.call("GET", JOBS, token="a"))[0] == 200
        assert (await api.call("GET", JOBS, token="b"))[0] == 401
        assert (await api.call("GET", JOBS))[0] == 401
        clock.advance(2)
        status, refused = await api.call("GET", JOBS, token="a")
        assert (status, refused["reason"]) == (401, "Unauthorized")
        faults.accept_tokens("b")
        assert (await api.call("GET", JOBS, token="b"))[0] == 200


async def test_access_reviews_say_what_is_denied(api: Caller) -> None:
    api.server.faults.deny("get", "pods/log")
    base = "/apis/authorization.k8s.io/v1"

    async def review(verb: str, resource: str, subresource: str = "") -> bool:
        asked = {"verb": verb, "resource": resource, "subresource": subresource}
        body = {"spec": {"resourceAttributes": {"namespace": "default", **asked}}}
        status, found = await api.call("POST", f"{base}/selfsubjectaccessreviews", body)
        assert status == 201
        return found["status"]["allowed"]

    assert await review("get", "pods")
    assert not await review("get", "pods", "log")
    body = {"spec": {"namespace": "default"}}
    _, found = await api.call("POST", f"{base}/selfsubjectrulesreviews", body)
    verbs = {
        name: rule["verbs"]
        for rule in found["status"]["resourceRules"]
        for name in rule["resources"]
    }
    assert "create" in verbs["jobs"]
    assert "get" not in verbs["pods/log"]


# -- Lists and watches ----------------------------------------------------------------------------


async def test_selectors_select(api: Caller) -> None:
    for name, labels in (("a", {"x": "1"}), ("b", {"x": "2", "y": "1"}), ("c", {})):
        made = pod(name)
        made["metadata"]["labels"] = labels
        api.store.create("pods", "default", made | {"status": {"phase": "Running"}})

    async def names(**query: str) -> str:
        _, found = await api.call("GET", PODS, **query)
        return "".join(item["metadata"]["name"] for item in found["items"])

    for selector, wanted in (
        ("x=1", "a"),
        ("x==2", "b"),
        ("x!=1", "bc"),
        ("x in (1, 2),y", "b"),
        ("x notin (1)", "bc"),
        ("!x", "c"),
        ("x,!y", "a"),
    ):
        assert await names(labelSelector=selector) == wanted, selector
    assert await names(fieldSelector="metadata.name!=a,status.phase=Running") == "bc"
    assert await names(fieldSelector="status.phase=Pending") == ""
    assert await api.kind("GET", PODS, fieldSelector="spec.priority=0") == "invalid"
    assert await api.kind("GET", PODS, labelSelector="x in 1") == "invalid"


async def test_events_are_found_by_the_uid_of_their_object(api: Caller) -> None:
    events = "/api/v1/namespaces/default/events"
    for uid in ("u-1", "u-2"):
        about = {"kind": "Pod", "name": "p", "namespace": "default", "uid": uid}
        body = {"metadata": {"generateName": "p."}, "involvedObject": about, "reason": "Failed"}
        assert (await api.call("POST", events, body, fieldValidation="Strict"))[0] == 201
    _, found = await api.call("GET", events, fieldSelector="involvedObject.uid=u-1")
    assert [item["involvedObject"]["uid"] for item in found["items"]] == ["u-1"]


async def test_c70_pages_are_one_snapshot(api: Caller) -> None:
    for number in range(7):
        api.store.create("pods", "default", pod(f"p-{number}"))
    _, first = await api.call("GET", PODS, limit="3")
    assert first["kind"] == "PodList"
    assert first["metadata"]["remainingItemCount"] == 4
    api.store.delete("pods", "default", "p-5", grace_seconds=0)
    api.store.create("pods", "default", pod("p-9"))
    seen, page = list(first["items"]), first
    while token := page["metadata"].get("continue"):
        _, page = await api.call("GET", PODS, limit="3", **{"continue": token})
        assert page["metadata"]["resourceVersion"] == first["metadata"]["resourceVersion"]
        seen += page["items"]
    assert [item["metadata"]["name"] for item in seen] == [f"p-{n}" for n in range(7)]
    assert "kind" not in seen[0]


async def test_expired_continue_is_410_with_a_token_for_an_inconsistent_rest(api: Caller) -> None:
    for name in ("a", "b", "c"):
        api.store.create("pods", "default", pod(name))
    _, first = await api.call("GET", PODS, limit="1")
    api.store.compact()
    api.store.create("pods", "default", pod("d"))
    status, expired = await api.call("GET", PODS, **{"continue": first["metadata"]["continue"]})
    assert (status, expired["reason"]) == (410, "Expired")
    _, rest = await api.call("GET", PODS, **{"continue": expired["metadata"]["continue"]})
    assert [item["metadata"]["name"] for item in rest["items"]] == ["b", "c", "d"]


async def test_watch_tells_changes_after_its_version(api: Caller) -> None:
    api.store.create("pods", "default", pod("a"))
    _, listed = await api.call("GET", PODS)
    api.store.create("pods", "default", pod("b"))
    api.store.create("jobs", "default", job())
    version = listed["metadata"]["resourceVersion"]
    async with api.watch(PODS, resourceVersion=version) as lines:
        assert await lines.next_name() == ("ADDED", "b")
        api.store.update("pods", "default", "a", lambda p: p["status"].update(phase="Running"))
        assert await lines.next_name() == ("MODIFIED", "a")
        api.store.delete("pods", "default", "a", grace_seconds=0)
        type_, last = await lines.next()
        assert (type_, last["kind"], last["status"]["phase"]) == ("DELETED", "Pod", "Running")
        assert int(last["metadata"]["resourceVersion"]) == api.store.version


async def test_watch_without_version_begins_with_what_is_there(api: Caller) -> None:
    api.store.create("pods", "default", pod("a"))
    async with api.watch(PODS) as lines:
        assert await lines.next_name() == ("ADDED", "a")


async def test_object_enters_and_leaves_a_watch_with_its_labels(api: Caller) -> None:
    def label(value: str) -> None:
        api.store.update(
            "pods", "default", "p-1", lambda p: p["metadata"].update(labels={"x": value})
        )

    api.store.create("pods", "default", pod())
    version = str(api.store.version)
    async with api.watch(PODS, resourceVersion=version, labelSelector="x=1") as lines:
        label("1")
        assert await lines.next_name() == ("ADDED", "p-1")
        label("2")
        type_, last = await lines.next()
        assert (type_, last["metadata"]["labels"]) == ("DELETED", {"x": "1"})
        assert last["metadata"]["resourceVersion"] == str(api.store.version)
        api.store.delete("pods", "default", "p-1", grace_seconds=0)
        label_again = pod("p-2")
        label_again["metadata"]["labels"] = {"x": "1"}
        api.store.create("pods", "default", label_again)
        assert await lines.next_name() == ("ADDED", "p-2")


async def test_bookmarks_come_every_minute_and_before_the_end() -> None:
    clock = FakeClock()
    async with serving(clock) as api:
        version = str(api.store.version)
        query = {"allowWatchBookmarks": "true", "timeoutSeconds": "100", "resourceVersion": version}
        async with api.watch(PODS, **query) as lines:
            api.store.create("jobs", "default", job())
            for seconds in (60, 38.5):
                async with asyncio.timeout(5):
                    await clock.until_sleeping()
                clock.advance(seconds)
                type_, bookmark = await lines.next()
                assert (type_, bookmark["kind"]) == ("BOOKMARK", "Pod")
                assert bookmark["metadata"]["resourceVersion"] == str(api.store.version)
            async with asyncio.timeout(5):
                await clock.until_sleeping()
            clock.advance(1.5)
            assert await lines.rest() == []


async def test_c52_watch_of_an_expired_version_is_an_error_line_in_a_200(api: Caller) -> None:
    version = str(api.store.version)
    api.store.compact()
    async with api.watch(PODS, resourceVersion=version) as lines:
        [(type_, status)] = await lines.rest()
    assert (type_, status["kind"], status["reason"]) == ("ERROR", "Status", "Expired")
    assert status["code"] == 410


async def test_open_watch_survives_compaction(api: Caller) -> None:
    async with api.watch(PODS, resourceVersion=str(api.store.version)) as lines:
        api.store.create("pods", "default", pod("a"))
        api.store.compact()
        api.store.create("pods", "default", pod("b"))
        assert [await lines.next_name() for _ in range(2)] == [("ADDED", "a"), ("ADDED", "b")]


async def test_version_from_the_future_is_silence_for_watches_and_504_for_lists() -> None:
    clock = FakeClock()
    async with serving(clock) as api:
        future = str(api.store.version + 1000)
        status, refused = await api.call("GET", PODS, resourceVersion=future)
        assert status == 504
        assert "Too large resource version" in refused["message"]
        query = {"allowWatchBookmarks": "true", "timeoutSeconds": "120", "resourceVersion": future}
        async with api.watch(PODS, **query) as lines:
            api.store.create("pods", "default", pod())
            for seconds in (60, 58.5, 1.5):
                async with asyncio.timeout(5):
                    await clock.until_sleeping()
                clock.advance(seconds)
            assert await lines.rest() == []


# -- Logs and evictions ---------------------------------------------------------------------------

RUNNING = {"containerStatuses": [{"name": "agent", "state": {"running": {}}}]}


@pytest.mark.parametrize(
    ("query", "text"),
    [
        ({}, b"one\ntwo\nthree"),
        ({"tailLines": "2"}, b"two\nthree"),
        ({"tailLines": "0"}, b""),
        ({"limitBytes": "5"}, b"one\nt"),
        ({"tailLines": "2", "limitBytes": "5"}, b"two\nt"),
        ({"follow": "true"}, b"one\ntwo\nthree"),
        ({"follow": "true", "tailLines": "2", "limitBytes": "5"}, b"two\nt"),
    ],
)
async def test_c74_log_is_cut_at_its_end(query: dict[str, str], text: bytes) -> None:
    async with serving(logs=Logs(b"one\n", b"two\nth", b"ree")) as api:
        api.store.create("pods", "default", pod() | {"status": RUNNING})
        status, _, found = await api.raw("GET", f"{PODS}/p-1/log", **query)
        assert (status, found) == (200, text)


async def test_log_is_refused_as_a_cluster_refuses_it(api: Caller) -> None:
    assert await api.kind("GET", f"{PODS}/p-1/log") == "not_found"
    waiting = {"waiting": {"reason": "ImagePullBackOff"}}
    status = {"containerStatuses": [{"name": "agent", "state": waiting}]}
    api.store.create("pods", "default", pod() | {"status": status})
    code, refused = await api.call("GET", f"{PODS}/p-1/log", container="agent")
    assert code == 400
    assert refused["message"] == (
        'container "agent" in pod "p-1" is waiting to start: ImagePullBackOff'
    )
    assert (await api.call("GET", f"{PODS}/p-1/log", container="x"))[0] == 400
    api.store.update("pods", "default", "p-1", lambda item: item.update(status=RUNNING))
    assert (await api.call("GET", f"{PODS}/p-1/log", previous="true"))[0] == 400
    code, _, text = await api.raw("GET", f"{PODS}/p-1/log")
    assert (code, text[:41]) == (200, b"unable to retrieve container logs for con")


async def test_eviction_marks_the_pod_and_deletes_it(api: Caller) -> None:
    api.store.create("pods", "default", pod() | {"status": {"phase": "Running"}})
    body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": "p-1"}}
    status, _ = await api.call("POST", f"{PODS}/p-1/eviction", body)
    evicted = api.store.get("pods", "default", "p-1")
    [condition] = evicted["status"]["conditions"]
    assert (status, condition["type"]) == (201, "DisruptionTarget")
    assert condition["reason"] == "EvictionByEvictionAPI"
    assert "deletionTimestamp" in evicted["metadata"]


# -- Faults ---------------------------------------------------------------------------------------


async def test_busy_and_bad_gateway_are_no_status_objects_and_do_nothing(api: Caller) -> None:
    api.server.faults.busy("/jobs", method="POST")
    api.server.faults.bad_gateway("/jobs", method="POST")
    assert (await api.call("GET", JOBS))[0] == 200
    status, headers, _ = await api.raw("POST", JOBS, job())
    assert (status, headers["Retry-After"], headers["Content-Type"][:10]) == (
        429,
        "1",
        "text/plain",
    )
    status, headers, text = await api.raw("POST", JOBS, job())
    assert (status, headers["Content-Type"]) == (502, "text/html")
    assert b"502 Bad Gateway" in text
    assert api.store.list("jobs") == []
    assert (await api.call("POST", JOBS, job()))[0] == 201


async def test_lost_reply_cuts_the_connection_after_the_deed(api: Caller) -> None:
    api.server.faults.lose_reply("/jobs", method="POST")
    with pytest.raises(aiohttp.ServerDisconnectedError):
        await api.call("POST", JOBS, job())
    assert await api.kind("POST", JOBS, job()) == "exists"


async def test_c55_black_hole_takes_requests_and_keeps_silent(api: Caller) -> None:
    api.server.faults.black_hole("/jobs")
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.2):
            await api.call("POST", JOBS, job())
    assert api.store.list("jobs") == []
    assert api.server.requests[-1].body["metadata"]["name"] == "r-1"


async def test_delay_ends_when_its_time_is_over() -> None:
    clock = FakeClock()
    async with serving(clock) as api:
        api.server.faults.delay(30, "/jobs")
        asked = asyncio.create_task(api.call("GET", JOBS))
        async with asyncio.timeout(5):
            await clock.until_sleeping()
            assert not asked.done()
            clock.advance(30)
            assert (await asked)[0] == 200


async def test_watch_is_cut_in_the_middle_of_a_line(api: Caller) -> None:
    api.server.faults.cut_watches("/pods", after_events=1)
    async with api.watch(PODS, resourceVersion=str(api.store.version)) as lines:
        api.store.create("pods", "default", pod("a"))
        assert await lines.next_name() == ("ADDED", "a")
        api.store.create("pods", "default", pod("b"))
        with pytest.raises(aiohttp.ClientPayloadError):
            await lines.rest()


async def test_c54_watches_are_closed_at_once(api: Caller) -> None:
    api.server.faults.close_watches("/pods", count=None)
    for _ in range(3):
        async with api.watch(PODS, resourceVersion=str(api.store.version)) as lines:
            assert await lines.rest() == []
    api.server.faults.clear()
    async with api.watch(PODS, resourceVersion=str(api.store.version)) as lines:
        api.store.create("pods", "default", pod("a"))
        assert await lines.next_name() == ("ADDED", "a")
    watches = [r for r in api.server.requests if r.query.get("watch") == "true"]
    assert len(watches) == 4


async def test_open_watch_expires_or_falls_silent_when_told(api: Caller) -> None:
    version = str(api.store.version)
    async with (
        api.watch(PODS, resourceVersion=version) as silent,
        api.watch(JOBS, resourceVersion=version) as expiring,
    ):
        api.server.faults.silence_watches("/pods")
        api.server.faults.expire_watches("/jobs")
        [(type_, status)] = await expiring.rest()
        assert (type_, status["code"]) == ("ERROR", 410)
        api.store.create("pods", "default", pod())
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await silent.rest()


async def test_restart_cuts_connections_and_expires_every_version(api: Caller) -> None:
    api.store.create("pods", "default", pod())
    url, version = api.server.url, str(api.store.version)
    async with api.watch(PODS, resourceVersion=version) as lines:
        await api.server.stop()
        with pytest.raises((aiohttp.ClientPayloadError, ConnectionError)):
            await lines.rest()
    with pytest.raises(aiohttp.ClientConnectorError):
        await api.call("GET", PODS)
    await api.server.start()
    assert api.server.url == url
    async with api.watch(PODS, resourceVersion=version) as lines:
        assert [event[1]["code"] for event in await lines.rest()] == [410]
    _, listed = await api.call("GET", PODS)
    assert [item["metadata"]["name"] for item in listed["items"]] == ["p-1"]


@pytest.mark.parametrize("steps", range(1, 6))
async def test_cancelled_restart_leaves_the_server_up(api: Caller, steps: int) -> None:
    async with api.watch(PODS, resourceVersion=str(api.store.version)):
        restarting = asyncio.create_task(api.server.restart())
        for _ in range(steps):
            await SystemClock().sleep(0)
        restarting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await restarting
    assert (await api.call("GET", PODS))[0] == 200


async def test_unknown_paths_and_methods_are_refused(api: Caller) -> None:
    for path in ("/apis/batch/v2/namespaces/default/jobs", "/api/v1/namespaces/default/jobs", "/x"):
        assert await api.kind("GET", path) == "not_found"
    assert (await api.call("POST", f"{JOBS}/r-1", job()))[0] == 405
    assert (await api.call("POST", JOBS, None))[0] == 400
    assert (await api.call("GET", "/version"))[1]["minor"] == "36"
