"""What is kept of a failed pod: the end of its logs and what the cluster said, without tokens."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from attrs import field, frozen

from agl_core.errors import AglError
from agl_core.redaction import LONGEST_TOKEN, Redaction
from agl_core.wire import to_json
from agl_k8s.evidence import collect

TOKEN = "agl1.k1.ZGVtbw.1790000000.c2lnbmF0dXJlLW9mLXRoZS10b2tlbg"
OTHER = "agl1.k1.b3RoZXI.1790000000.YW5vdGhlci1zaWduYXR1cmU"
AT = "2026-11-20T10:00:00Z"

Json = dict[str, Any]


@frozen
class Listed:
    items: Sequence[Mapping[str, Any]]


@frozen(kw_only=True)
class FakeApi:
    """Answers as the API server would, and keeps what it was asked for."""

    logs: Mapping[str, bytes | Exception | None] = field(factory=dict)
    events: Sequence[Mapping[str, Any]] | Exception = ()
    asked: list[tuple[str, str, int, int]] = field(factory=list)
    selectors: list[str | None] = field(factory=list)

    async def log_tail(
        self, pod: str, container: str, /, *, lines: int, size_bytes: int
    ) -> bytes | None:
        self.asked.append((pod, container, lines, size_bytes))
        found = self.logs.get(container)
        if isinstance(found, Exception):
            raise found
        if found is None:
            return None
        return b"".join(found.splitlines(keepends=True)[-lines:])[-size_bytes:]

    async def list(self, resource: Any, /, *, field_selector: str | None = None) -> Listed:
        assert resource == "events"
        self.selectors.append(field_selector)
        if isinstance(self.events, Exception):
            raise self.events
        return Listed(self.events)


def ended(code: int, name: str = "agent", **more: Any) -> Json:
    terminated = {"exitCode": code, "reason": "Error", "startedAt": AT, "finishedAt": AT} | more
    return {"name": name, "state": {"terminated": terminated}}


def pod(*statuses: Json, inits: Sequence[Json] = (), **status: Any) -> Json:
    return {
        "metadata": {"name": "r-demo-x7k2p", "uid": "5f0c"},
        "spec": {"nodeName": "n1"},
        "status": {
            "phase": "Failed",
            "containerStatuses": list(statuses),
            "initContainerStatuses": list(inits),
        }
        | status,
    }


def warning(reason: str, message: str = "", **more: Any) -> Json:
    return {"type": "Warning", "reason": reason, "message": message, "lastTimestamp": AT} | more


async def kept(
    api: FakeApi,
    subject: Json | None = None,
    *,
    tail_bytes: int = 16384,
    secrets: Sequence[str] = (TOKEN,),
) -> list[tuple[str, Json]]:
    subject = pod(ended(1)) if subject is None else subject
    drafts = await collect(api, subject, tail_bytes=tail_bytes, secrets=secrets)
    for draft in drafts:
        to_json(draft)  # what cannot be sent is no evidence
    return [(draft.event_type, dict(draft.data)) for draft in drafts]


async def kept_text(raw: bytes, **told: Any) -> Json:
    """The data of the one log event."""
    ((kind, data),) = await kept(FakeApi(logs={"agent": raw}), **told)
    assert kind == "log"
    return data


# --- logs ----------------------------------------------------------------------------------------


async def test_c74_log_of_a_failed_pod_is_the_only_evidence_of_a_plain_failure() -> None:
    lines = b"".join(b"line %d\n" % number for number in range(10))
    api = FakeApi(logs={"agent": lines})
    assert await kept(api) == [
        ("log", {"container": "agent", "text": lines.decode(), "truncated": False})
    ]
    assert [(name, container) for name, container, *_ in api.asked] == [("r-demo-x7k2p", "agent")]


async def test_tail_is_the_end_of_a_long_log() -> None:
    raw = b"".join(b"line %d\n" % number for number in range(1000))
    data = await kept_text(raw, tail_bytes=100)
    assert data["text"] == raw[-100:].decode()
    assert data["truncated"]


async def test_tail_of_as_many_lines_as_were_asked_for_may_be_cut() -> None:
    data = await kept_text(b"\n" * 5000, tail_bytes=16384)
    assert 0 < len(data["text"]) < 5000
    assert data["truncated"]


async def test_line_of_a_megabyte_is_cut_to_the_tail() -> None:
    data = await kept_text(b"a" * 1_000_000 + b"the end\n", tail_bytes=4096)
    assert len(data["text"]) == 4096
    assert data["text"].endswith("the end\n")
    assert data["truncated"]


async def test_log_that_is_not_utf8_is_kept_readable() -> None:
    data = await kept_text(b"before \xff\xfe after\n\x00")
    assert data["text"] == "before \ufffd\ufffd after\n\x00"


@pytest.mark.parametrize("size", [97, 98, 99, 100])
async def test_cut_character_leaves_no_rest(size: int) -> None:
    data = await kept_text("€".encode() * 4000, tail_bytes=size)
    assert set(data["text"]) == {"€"}
    assert size - 3 < len(data["text"].encode()) <= size


async def test_logs_of_containers_that_failed_by_themselves_are_kept_the_agents_first() -> None:
    subject = pod(
        ended(137, "second"),
        ended(1),
        inits=[ended(2, "proxy"), ended(0, "fetch"), ended(143, "polite")],
    )
    names = ["agent", "second", "proxy", "fetch", "polite"]
    found = await kept(FakeApi(logs={name: name.encode() for name in names}), subject)
    assert [data["text"] for _, data in found] == ["agent", "proxy"]


async def test_failed_init_container_tells_why_the_agent_never_started() -> None:
    waiting = {"name": "agent", "state": {"waiting": {"reason": "PodInitializing"}}}
    api = FakeApi(logs={"fetch": b"no route to host\n"})
    found = await kept(api, pod(waiting, inits=[ended(2, "fetch")]))
    assert [(data["container"], data["text"]) for _, data in found] == [
        ("fetch", "no route to host\n")
    ]


@pytest.mark.parametrize(
    "status",
    [ended(0), {"name": "agent", "state": {"running": {"startedAt": AT}}}],
    ids=["exit_0_after_a_signal", "runs_and_is_to_be_ended"],
)
async def test_log_of_the_agent_is_kept_however_it_ended(status: Json) -> None:
    found = await kept(FakeApi(logs={"agent": b"thinking\n"}), pod(status))
    assert [data["text"] for _, data in found] == ["thinking\n"]


async def test_pod_that_never_ran_has_no_log() -> None:
    waiting = {"name": "agent", "state": {"waiting": {"reason": "ImagePullBackOff"}}}
    api = FakeApi(logs={"agent": b"x"})
    assert await kept(api, pod(waiting)) == []
    assert api.asked == []


async def test_silent_agent_leaves_nothing() -> None:
    assert await kept(FakeApi(logs={"agent": b""})) == []


# --- logs that cannot be had ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "raw",
    [
        None,
        b"",
        b"unable to retrieve container logs for containerd://0a1b2c",
    ],
    ids=["gone", "empty", "not_retrievable"],
)
async def test_c74_end_of_the_log_in_the_pods_status_stands_in_for_it(raw: bytes | None) -> None:
    subject = pod(ended(1, message=f"Traceback: key {TOKEN} refused\n"))
    found = await kept(FakeApi(logs={"agent": raw}), subject)
    assert found == [
        (
            "log",
            {
                "container": "agent",
                "text": "Traceback: key [token] refused\n",
                "truncated": False,
            },
        )
    ]


async def test_agents_own_words_are_no_missing_log() -> None:
    data = await kept_text(b"I was unable to retrieve container logs for you\n")
    assert data["text"].startswith("I was unable")


async def test_c74_log_that_is_gone_is_noted() -> None:
    ((kind, data),) = await kept(FakeApi())
    assert kind == "log"
    assert (data["text"], data["problem"]) == ("", "the cluster no longer has the log")


@pytest.mark.parametrize(
    ("error", "has_traceback"),
    [(AglError(f"the API server is busy ({TOKEN})"), False), (RuntimeError(TOKEN), True)],
)
async def test_c74_failed_fetches_are_noted_and_keep_nothing_else_from_being_read(
    error: Exception, has_traceback: bool, caplog: pytest.LogCaptureFixture
) -> None:
    subject = pod(ended(1, message="the end\n"), ended(2, "second"))
    api = FakeApi(logs={"agent": error, "second": b"fine\n"}, events=error)
    with caplog.at_level(logging.WARNING, "agl_k8s.evidence"):
        (_, agent), (_, second), (kind, cluster) = await kept(api, subject)
    assert agent["text"] == "the end\n"
    assert "could not be read" in agent["problem"]
    assert "[token]" in agent["problem"]
    assert second["text"] == "fine\n"
    assert kind == "cluster"
    assert "could not be read" in cluster["problem"]
    assert TOKEN not in f"{agent}{cluster}"
    assert [bool(record.exc_info) for record in caplog.records] == [has_traceback] * 2


# --- tokens --------------------------------------------------------------------------------------


async def test_tokens_are_blacked_out() -> None:
    odd = "a+secret/of$its.own"
    raw = f"{TOKEN} a {OTHER}, {TOKEN}x\nBearer {odd}\nagl1 stays".encode()
    data = await kept_text(raw, secrets=("", "a+secret", odd, TOKEN))
    assert data["text"] == "[token] a [token], [token]x\nBearer [token]\nagl1 stays"


async def test_token_at_the_end_of_a_log_that_is_still_written_is_blacked_out() -> None:
    data = await kept_text(f"key {TOKEN[:-12]}".encode())
    assert data["text"] == "key [token]"


@pytest.mark.parametrize("token", [TOKEN, OTHER], ids=["given", "known_by_its_form"])
async def test_token_at_the_cut_never_shows_a_part(token: str) -> None:
    after = b" and then\n" + b"-" * 500
    raw = b"x" * 5000 + b" " + token.encode() + after
    for tail_bytes in range(len(after) - 2, len(after) + len(token) + 2):
        data = await kept_text(raw, tail_bytes=tail_bytes)
        rest = data["text"].removesuffix(after.decode())
        assert rest in ("", " ", "[token]", " [token]", data["text"]), tail_bytes
        assert data["truncated"]


async def test_half_token_before_the_tail_stays_out_though_others_shrink() -> None:
    # Each token in the tail becomes shorter; the cut must not move to the left for it.
    line = f"{OTHER}\n".encode()
    tail_bytes = 4096
    half = f"{TOKEN[-20:]} ".encode()
    filler = b"." * (tail_bytes + LONGEST_TOKEN - len(half) - 60 * len(line))
    raw = TOKEN[:-20].encode() + half + filler + line * 60
    data = await kept_text(raw, tail_bytes=tail_bytes)
    assert TOKEN[-20:] not in data["text"]
    assert data["text"].endswith("[token]\n" * 60)


async def test_longest_token_is_seen_as_a_whole() -> None:
    token = f"agl1.k1.{'A' * 1366}.1790000000.{'B' * 43}"
    raw = b"x" * 9000 + token.encode() + b" end"
    data = await kept_text(raw, tail_bytes=20, secrets=())
    assert data["text"] == "[token] end"


async def test_half_token_at_the_start_of_the_status_message_stays_out() -> None:
    message = TOKEN[10:] + " refused\n" + "y" * (2048 - len(TOKEN) + 10 - 9)
    assert len(message) == 2048
    ((_, data),) = await kept(FakeApi(), pod(ended(1, message=message)))
    assert data["text"].startswith(" refused\n")
    assert data["truncated"]


def test_longest_secret_decides_what_must_be_read_besides() -> None:
    assert Redaction([TOKEN]).longest == LONGEST_TOKEN
    assert Redaction(["s" * 5000]).longest == 5000


# --- the cluster's words -------------------------------------------------------------------------


async def test_warnings_of_the_pod_are_kept_in_order() -> None:
    later = "2026-11-20T10:05:00Z"
    api = FakeApi(
        logs={"agent": b""},
        events=[
            warning("FailedMount", f"secret {TOKEN} not found", lastTimestamp=later, count=4),
            {"type": "Normal", "reason": "Scheduled", "message": "assigned", "lastTimestamp": AT},
            warning("FailedScheduling", "no room", count=2),
        ],
    )
    ((kind, data),) = await kept(api)
    assert kind == "cluster"
    assert (data["pod"], data["node"]) == ("r-demo-x7k2p", "n1")
    assert [(e["reason"], e["message"], e["count"]) for e in data["events"]] == [
        ("FailedScheduling", "no room", 2),
        ("FailedMount", "secret [token] not found", 4),
    ]
    assert data["events"][1]["last_seen"] - data["events"][0]["last_seen"] == 300
    assert api.selectors == ["involvedObject.uid=5f0c"]


async def test_warnings_are_bounded() -> None:
    events = [
        warning(f"W{number}", "m" * 5000, lastTimestamp=f"2026-11-20T10:00:{number:02}Z")
        for number in range(50)
    ]
    ((_, data),) = await kept(FakeApi(logs={"agent": b""}, events=events))
    assert [event["reason"] for event in data["events"]] == [f"W{n}" for n in range(30, 50)]
    assert {len(event["message"]) for event in data["events"]} == {1000}


async def test_c60_why_the_cluster_ended_the_pod_is_kept() -> None:
    subject = pod(
        ended(137),
        reason="Evicted",
        message="The node was low on resource: memory.",
        conditions=[
            {"type": "Ready", "status": "False", "reason": "PodFailed"},
            {
                "type": "DisruptionTarget",
                "status": "True",
                "reason": "TerminationByKubelet",
                "message": "low on memory",
            },
        ],
    )
    (_, (kind, data)) = await kept(FakeApi(logs={"agent": b"hi"}), subject)
    assert kind == "cluster"
    assert data == {
        "pod": "r-demo-x7k2p",
        "node": "n1",
        "reason": "Evicted",
        "message": "The node was low on resource: memory.",
        "conditions": [
            {
                "type": "DisruptionTarget",
                "reason": "TerminationByKubelet",
                "message": "low on memory",
            }
        ],
    }
