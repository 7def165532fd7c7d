from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import struct
import zlib
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import pytest
from attrs import frozen

from agl_core.client import AglLiteClient, AsyncAglLiteClient
from agl_core.errors import ApiError, Invalid
from agl_core.hookspecs import hookimpl
from agl_core.interfaces import Exporter, ExportOptions, RequestReshaper, ReshapeRequest
from agl_core.records import Attempt, Event, Rollout
from agl_core.testing.fake_vllm import PROMPT, FakeVllm, Output, VllmAnswer, saying
from agl_core.testing.raw_http import Exchange, Script
from agl_core.testing.service import Answer, RunningService, chat, running_service
from agl_verl import VerlPlugin
from agl_verl.no_data import NoTrainableCalls

ROLLOUT = Rollout(
    rollout_id="r",
    status="succeeded",
    attempts=(Attempt(attempt_id="a", phase="succeeded"),),
    succeeded_attempt_id="a",
)


def exporter(format_name: str = "triplet") -> Exporter:
    (found,) = [e for e in VerlPlugin().provide_exporter() if e.format == format_name]
    return found


def call(seq: int, temperature: float | None, mode: str, **changes: Any) -> Event:
    data: dict[str, Any] = {
        "api": "chat",
        "call_id": f"call-{seq}",
        "policy": "p",
        "trained": True,
        "status": "ok",
        "http_status": 200,
        "server": {"endpoint": "http://e/v1", "model": "m"},
        "version_start": 3,
        "version_end": 3,
        "sampling": {"temperature": temperature, "logprobs_mode": mode},
        "choices": [
            {
                "index": 0,
                "prompt_token_ids": [1, 2],
                "token_ids": [3],
                "logprobs": [-0.5],
                "tokens": "complete",
                "finish_reason": "stop",
            }
        ],
        **changes,
    }
    return Event(
        seq=seq,
        event_type="model_request",
        rollout_id="r",
        attempt_id="a",
        timestamp=0.0,
        data=data,
    )


def choice(prompt: list[int], response: list[int]) -> dict[str, Any]:
    return {
        "index": 0,
        "prompt_token_ids": prompt,
        "token_ids": response,
        "logprobs": [-0.5] * len(response),
        "tokens": "complete",
        "finish_reason": "stop",
    }


def export(events: list[Event], format_name: str = "triplet", **parameters: str) -> dict[str, Any]:
    chosen = exporter(format_name)
    options = ExportOptions(parameters=parameters)
    body = chosen.begin(options) + chosen.encode(ROLLOUT, events, options)
    body += chosen.finish(options)
    line: dict[str, Any] = json.loads(body)
    return line


@pytest.mark.parametrize("format_name", ["triplet", "trajectory"])
def test_c36_raw_logprobs_at_another_temperature_stop_the_export(format_name: str) -> None:
    with pytest.raises(Invalid, match=r"call-1.*(raw.*0\.6|0\.6.*raw)"):
        export([call(1, 0.6, "raw")], format_name)


def test_c36_processed_logprobs_at_another_temperature_pass() -> None:
    (triplet,) = export([call(1, 0.6, "processed")])["triplets"]
    assert (triplet["response_token_ids"], triplet["logprobs"]) == ([3], [-0.5])


def test_raw_logprobs_are_exported_where_that_is_asked_for() -> None:
    assert len(export([call(1, 0.6, "raw")], allow_raw_sampling="true")["triplets"]) == 1


def test_a_batch_has_one_temperature_unless_told_otherwise() -> None:
    events = [call(1, 1.0, "processed"), call(2, 0.7, "processed")]
    with pytest.raises(Invalid, match=r"0\.7 in call call-2.*1\.0 in call call-1"):
        export(events)
    assert len(export(events, allow_mixed_temperature="true")["triplets"]) == 2


def test_calls_that_are_not_exported_are_not_judged() -> None:
    helper = call(1, 0.2, "raw", trained=False)
    failed = call(2, 0.2, "raw", status="client_gone")
    line = export([helper, failed, call(3, 1.0, "raw")])
    assert [t["call_id"] for t in line["triplets"]] == ["call-3"]
    assert line["skipped"] == {"untrained": 1, "client_gone": 1}


def test_c31_a_call_without_ids_is_skipped_and_never_tokenized_again() -> None:
    bare = {"index": 0, "token_ids": None, "tokens": "absent", "finish_reason": "stop"}
    line = export([call(1, 1.0, "raw", choices=[bare])])
    assert (line["triplets"], line["skipped"]) == ([], {"no_token_ids": 1})


@pytest.mark.parametrize("parameters", [{"allow_raw": "true"}, {"allow_raw_sampling": "yes"}])
def test_a_parameter_that_is_none_of_the_formats_is_refused(parameters: dict[str, str]) -> None:
    with pytest.raises(Invalid, match="allow_raw"):
        export([], **parameters)


# --- rows that are too long ----------------------------------------------------------------------

IMAGE_TOKEN = 151_655


@pytest.mark.parametrize(("format_name", "rows"), [("triplet", "triplets"), ("trajectory", "rows")])
def test_c39_a_prompt_over_the_limit_leaves_no_part_of_its_image_span(
    format_name: str, rows: str
) -> None:
    prompt = [1] * 40 + [IMAGE_TOKEN] * 40 + [1] * 20
    long = call(1, 1.0, "raw", choices=[choice(prompt, [3])])
    line = export([long, call(2, 1.0, "raw")], format_name, max_length="64")
    assert len(line[rows]) == 1
    assert str(IMAGE_TOKEN) not in json.dumps(line)
    assert line["skipped"] == {"too_long": 1}
    assert len(export([long], format_name, max_length="101")[rows]) == 1


def test_a_call_that_is_too_long_is_not_judged_by_its_sampling() -> None:
    long = call(1, 0.6, "raw", choices=[choice([1] * 100, [3])])
    assert export([long], max_length="64")["skipped"] == {"too_long": 1}
    with pytest.raises(Invalid, match=r"0\.6"):
        export([long], max_length="101")


@pytest.mark.parametrize("value", ["0", "-1", "64.0", "", "many", "9" * 30, "٦٤"])
def test_a_limit_that_is_no_number_of_tokens_is_refused(value: str) -> None:
    with pytest.raises(Invalid, match="max_length"):
        export([], max_length=value)


@pytest.mark.parametrize("format_name", ["triplet", "trajectory"])
def test_c51_a_missing_reward_stays_null(format_name: str) -> None:
    assert export([call(1, 1.0, "raw")], format_name)["reward"] is None


# --- through the whole service -------------------------------------------------------------------


@frozen
class World:
    """A service, its model server and a client of it."""

    service: RunningService
    vllm: FakeVllm
    client: AsyncAglLiteClient

    async def succeeded(
        self, rollout_id: str, *bodies: dict[str, Any], path: str = "chat/completions"
    ) -> list[Answer]:
        """Run a rollout that makes these calls and succeeds."""
        await self.service.rollout(rollout_id)
        answers = [await self.service.call(rollout_id, body, path) for body in bodies]
        await self.service.api(
            "PATCH",
            f"/rollouts/{rollout_id}",
            {
                "status": "succeeded",
                "attempts": [{"attempt_id": "a-1", "phase": "succeeded"}],
            },
        )
        return answers

    async def line(self, format_name: str) -> dict[str, Any]:
        """The only line of an export."""
        (line,) = [line async for line in self.client.export(format_name)]
        return line


@pytest.fixture
async def world(request: pytest.FixtureRequest) -> AsyncIterator[World]:
    """The service with one model, ``m``; the parameter: plugins, and a script of its server."""
    plugins, script = getattr(request, "param", ((), saying()))
    async with (
        FakeVllm(script) as vllm,
        running_service(plugins=plugins) as service,
        AsyncAglLiteClient(service.url) as client,
    ):
        await service.register(vllm.endpoint)
        yield World(service, vllm, client)


def png(shade: int) -> bytes:
    """A grey picture of 28 x 28."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    header = struct.pack(">IIBBBBB", 28, 28, 8, 0, 0, 0, 0)
    lines = (b"\0" + bytes([shade]) * 28) * 28
    parts = ((b"IHDR", header), (b"IDAT", zlib.compress(lines)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(*part) for part in parts)


def looking_at(*images: bytes) -> dict[str, Any]:
    urls = [f"data:image/png;base64,{base64.b64encode(image).decode()}" for image in images]
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    content = [*parts, {"type": "text", "text": "What is it?"}]
    return chat(messages=[{"role": "user", "content": content}])


async def test_c38_a_call_with_an_image_is_no_triplet_and_says_so(world: World) -> None:
    await world.succeeded("r", looking_at(png(7)), chat())
    line = await world.line("triplet")
    seen, plain = await world.service.events("r")
    assert seen["choices"][0]["tokens"] == "complete"
    assert seen["media"] == [
        {
            "kind": "image",
            "sha256": hashlib.sha256(png(7)).hexdigest(),
            "size_bytes": len(png(7)),
            "media_type": "image/png",
            "pointer": "/messages/0/content/0/image_url",
        }
    ]
    assert "media" not in plain
    assert [triplet["call_id"] for triplet in line["triplets"]] == [plain["call_id"]]
    assert line["skipped"] == {"multimodal_unsupported": 1}


async def test_c38_a_row_with_images_names_each_and_the_record_gives_them_back(
    world: World,
) -> None:
    images = [png(7), png(200)]
    await world.succeeded("r", looking_at(*images))
    line = await world.line("trajectory")
    (row,) = line["rows"]
    assert row["media"] == [hashlib.sha256(image).hexdigest() for image in images]
    assert line["skipped"] == {}
    # What a trainer does to get the pictures back: the request of the row's last call has them.
    events = {event["call_id"]: event for event in await world.service.events("r")}
    (message,) = events[row["turns"][-1]["call_id"]]["request"]["messages"]
    urls = [part["image_url"]["url"] for part in message["content"] if "image_url" in part]
    assert [base64.b64decode(url.partition(",")[2]) for url in urls] == images


ROUTED = [[[0, 5], [3, 1]], [[1, 2], [7, 4]]]


class Routing(RequestReshaper):
    """A policy that asks which experts its tokens went through."""

    def reshape(self, request: ReshapeRequest) -> Mapping[str, Any]:
        return {"return_routed_experts": True}

    @hookimpl
    def provide_request_reshaper(self) -> RequestReshaper:
        return self


def with_experts(*, always: bool) -> Script:
    """A server that says which experts it took, ``always`` or where it is asked."""

    async def script(exchange: Exchange) -> None:
        fields = exchange.request.json()
        whole = VllmAnswer(fields, [Output(), Output()]).whole()
        told = always or fields.get("return_routed_experts")
        for choice_, routed in zip(whole["choices"], [ROUTED, ROUTED[::-1]], strict=True):
            choice_["routed_experts"] = routed if told else None
        exchange.whole_json(200, whole)

    return script


@pytest.mark.parametrize(
    ("world", "is_shown"),
    [
        (((Routing(),), with_experts(always=False)), False),
        (((), with_experts(always=True)), True),
    ],
    indirect=["world"],
    ids=["asked for by the policy", "told by the server unasked"],
)
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("chat/completions", chat(n=2)),
        ("completions", {"model": "m", "prompt": "Hi", "n": 2}),
    ],
)
async def test_routed_experts_are_recorded_once_and_exported_with_their_choice(
    world: World, is_shown: bool, path: str, body: dict[str, Any]
) -> None:
    (answer,) = await world.succeeded("r", body, path=path)
    seen = [choice_["routed_experts"] for choice_ in answer.json()["choices"]]
    assert seen == ([ROUTED, ROUTED[::-1]] if is_shown else [None, None])
    (event,) = await world.service.events("r")
    routed = [{"routed_experts": ROUTED}, {"routed_experts": ROUTED[::-1]}]
    assert [choice_["extras"] for choice_ in event["choices"]] == routed
    assert [choice_["routed_experts"] for choice_ in event["response"]["choices"]] == [None, None]
    triplets = (await world.line("triplet"))["triplets"]
    assert [triplet["extras"] for triplet in triplets] == routed
    rows = (await world.line("trajectory"))["rows"]
    assert [turn["extras"] for row in rows for turn in row["turns"]] == routed


@pytest.mark.parametrize("world", [((), with_experts(always=False))], indirect=True)
async def test_experts_that_nobody_asked_for_leave_no_extras(world: World) -> None:
    await world.succeeded("r", chat(n=2))
    (event,) = await world.service.events("r")
    assert [choice_["extras"] for choice_ in event["choices"]] == [{}, {}]
    assert all("extras" not in triplet for triplet in (await world.line("triplet"))["triplets"])


# --- batches without data ------------------------------------------------------------------------

Fetch = Callable[..., Any]


@pytest.fixture(params=["triplets", "trajectories", "triplets, blocking", "trajectories, blocking"])
def fetch(request: pytest.FixtureRequest, world: World) -> Fetch:
    """Each way of ``client.verl`` to get a batch."""
    name, _, kind = request.param.partition(", ")

    def blocking(**options: Any) -> Any:
        with AglLiteClient(world.service.url) as client:
            return getattr(client.verl, name)(**options)

    async def fetch_(**options: Any) -> Any:
        if kind:
            return await asyncio.to_thread(blocking, **options)
        return await getattr(world.client.verl, name)(**options)

    return fetch_


async def test_c41_a_batch_without_any_data_stops_and_names_the_cause(
    world: World, fetch: Fetch
) -> None:
    for rollout_id in ("r-1", "r-2"):
        await world.succeeded(rollout_id, chat(model="foo"))
    with pytest.raises(NoTrainableCalls, match=r"2 of 2 .*model_not_found: foo \(2\)") as caught:
        await fetch()
    assert caught.value.details["causes"] == {"model_not_found: foo": 2}
    assert sorted(caught.value.details["rollouts"]) == ["r-1", "r-2"]
    assert len(await fetch(max_no_data_share=1.0)) == 2


async def test_c41_the_share_decides_and_a_failed_rollout_does_not_count(
    world: World, fetch: Fetch
) -> None:
    await world.succeeded("good", chat())
    await world.succeeded("idle")
    await world.service.rollout("failed")
    await world.service.api("PATCH", "/rollouts/failed", {"status": "failed"})
    assert len(await fetch()) == 3
    assert len(await fetch(max_no_data_share=0.5)) == 3
    with pytest.raises(NoTrainableCalls, match=r"1 of 2 .*no_calls \(1\)"):
        await fetch(max_no_data_share=0.49)


async def test_c41_a_limit_that_leaves_nothing_is_named_as_the_cause(
    world: World, fetch: Fetch
) -> None:
    await world.succeeded("r", chat())
    length = len(PROMPT) + len(Output().token_ids)
    with pytest.raises(NoTrainableCalls, match=r"too_long \(1\)"):
        await fetch(max_length=length - 1)
    assert len(await fetch(max_length=length)) == 1


async def test_c41_batches_with_nothing_that_succeeded_stop_nobody(
    world: World, fetch: Fetch
) -> None:
    assert await fetch(max_no_data_share=0.0) == []


@pytest.mark.parametrize("share", [-0.1, 1.1, float("nan")])
async def test_a_share_that_is_none_is_refused(world: World, share: float) -> None:
    with pytest.raises(Invalid, match="max_no_data_share"):
        await world.client.verl.triplets(max_no_data_share=share)


@pytest.mark.parametrize("format_name", ["triplet", "trajectory"])
async def test_c41_the_export_itself_refuses_a_batch_above_the_share_that_is_asked_for(
    world: World, format_name: str
) -> None:
    await world.succeeded("good", chat())
    await world.succeeded("lost", chat(model="foo"))
    await world.succeeded("idle")
    await world.service.rollout("failed")
    await world.service.api("PATCH", "/rollouts/failed", {"status": "failed"})

    async def exported(**parameters: str) -> int:
        return len([line async for line in world.client.export(format_name, **parameters)])

    with pytest.raises(ApiError, match=r"2 of 3 .*model_not_found: foo \(1\)") as caught:
        await exported(max_no_data_share="0.5")
    assert (caught.value.status, caught.value.code) == (422, "no_trainable_calls")
    assert caught.value.details == {
        "rollouts": ["lost", "idle"],
        "succeeded": 3,
        "causes": {"model_not_found: foo": 1, "no_calls": 1},
    }
    assert await exported(max_no_data_share="0.67") == 4
    assert await exported(max_no_data_share="1") == 4
    assert await exported() == 4


@pytest.mark.parametrize("value", ["", "1.1", "-0.1", "nan", "inf", "half", "0_1", "\u0660", " 0"])
def test_a_share_in_an_export_that_is_none_is_refused(value: str) -> None:
    with pytest.raises(Invalid, match="max_no_data_share"):
        export([], max_no_data_share=value)


def test_two_exports_at_once_count_apart() -> None:
    chosen = exporter()
    first, second = (ExportOptions(parameters={"max_no_data_share": "0"}) for _ in range(2))
    chosen.encode(ROLLOUT, [], first)
    chosen.encode(ROLLOUT, [call(1, 1.0, "raw")], second)
    assert chosen.finish(second) == b""
    with pytest.raises(NoTrainableCalls, match="1 of 1"):
        chosen.finish(first)


class Alternatives(RequestReshaper):
    """A policy that asks for two alternatives to each token."""

    def reshape(self, request: ReshapeRequest) -> Mapping[str, Any]:
        return {"top_logprobs": 2, "logprobs": True}

    @hookimpl
    def provide_request_reshaper(self) -> RequestReshaper:
        return self


@pytest.mark.parametrize("world", [((Alternatives(),), saying())], indirect=True)
async def test_alternatives_that_the_policy_asked_for_are_exported(world: World) -> None:
    (answer,) = await world.succeeded("r", chat())
    assert answer.json()["choices"][0]["logprobs"] is None
    sampled = zip(Output().texts, Output().logprobs, strict=True)
    told = {"top_logprobs": [[[text, logprob], ["Oh", -0.2]] for text, logprob in sampled]}
    (triplet,) = (await world.line("triplet"))["triplets"]
    assert triplet["extras"] == told
    (row,) = (await world.line("trajectory"))["rows"]
    assert [turn["extras"] for turn in row["turns"]] == [told]
