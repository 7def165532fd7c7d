"""Repeats of calls by SDKs: joined, replayed, or run anew."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from agl_core.errors import Unavailable
from agl_core.gateway.broadcast import Message
from agl_core.gateway.incoming import Incoming, Receive, Send
from agl_core.gateway.repeats import (
    CallKey,
    Follower,
    Lead,
    Repeats,
    RepeatSettings,
    call_key,
)
from agl_core.gateway.rounds import Rounds
from agl_core.testing.clock import FakeClock
from agl_core.testing.servers import serve_asgi

BODY = b'{"model":"m"}'
SETTINGS = RepeatSettings()


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
async def open_repeats(clock: FakeClock) -> AsyncIterator[Callable[..., Repeats]]:
    opened: list[Repeats] = []

    def open_(**settings: Any) -> Repeats:
        opened.append(Repeats(RepeatSettings(**settings), clock))
        return opened[-1]

    yield open_
    for repeats in opened:
        await repeats.close()


@pytest.fixture
def repeats(open_repeats: Callable[..., Repeats]) -> Repeats:
    return open_repeats()


def key(
    count: int | None = 0, *, body: bytes = BODY, path: str = "chat/completions", **names: Any
) -> CallKey:
    """The key of a request with that retry counter (None: without a marker)."""
    headers = [] if count is None else [(b"x-stainless-retry-count", b"%d" % count)]
    if "idempotency" in names:
        headers.append((b"idempotency-key", names["idempotency"].encode()))
    found = call_key(
        names.get("rollout_id", "r"), names.get("attempt_id", "a"), "POST", path, "", headers, body
    )
    assert found is not None
    return found


class Client:
    """The server's end of a client's connection, which can be made to take nothing."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.taking = asyncio.Event()
        self.taking.set()
        self.offered = asyncio.Event()
        self._got = asyncio.Event()

    async def send(self, message: Message) -> None:
        self.offered.set()
        await self.taking.wait()
        self.messages.append(message)
        self._got.set()

    async def until(self, count: int) -> None:
        async with asyncio.timeout(5):
            while len(self.messages) < count:
                self._got.clear()
                await self._got.wait()

    @property
    def body(self) -> bytes:
        return b"".join(m.get("body", b"") for m in self.messages)

    @property
    def status(self) -> int:
        return int(self.messages[0]["status"])

    @property
    def is_whole(self) -> bool:
        return bool(self.messages) and self.messages[-1].get("more_body") is False


class CallInProgress:
    """A call as the gateway makes it: what it sends goes to its client and to those who joined."""

    def __init__(self, lead: Lead | Follower, *, is_sealed: bool = False) -> None:
        assert isinstance(lead, Lead), "joined, though it should be made"
        self.lead = lead
        self.client = Client()
        self.send = lead.through(self.client.send)
        self.kills = 0
        self._is_sealed = is_sealed
        lead.on_forsaken = self._kill

    def _kill(self) -> bool:
        self.kills += 1
        return not self._is_sealed

    async def begin(self, status: int = 200) -> None:
        headers = [(b"x-request-id", b"call-1")]
        await self.send({"type": "http.response.start", "status": status, "headers": headers})

    async def write(self, data: bytes) -> None:
        await self.send({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self, data: bytes = b"") -> None:
        await self.send({"type": "http.response.body", "body": data, "more_body": False})
        self.lead.close()

    async def answer(self, data: bytes, status: int = 200) -> None:
        await self.begin(status)
        await self.end(data)


def is_follower(part: Lead | Follower) -> bool:
    return isinstance(part, Follower)


async def relayed(part: Lead | Follower) -> Client:
    """Serve a repeat to its end, and return its client."""
    assert isinstance(part, Follower), "made, though there was something to join"
    client = Client()
    async with asyncio.timeout(5):
        assert await part.relay(client.send)
    part.leave()
    return client


# What makes two requests the same call


@pytest.mark.parametrize(
    "other",
    [
        {"body": BODY + b" "},
        {"path": "completions"},
        {"attempt_id": "b"},
        {"rollout_id": "s"},
        {"idempotency": "k"},
    ],
)
async def test_only_the_very_same_call_is_joined(repeats: Repeats, other: dict[str, Any]) -> None:
    CallInProgress(repeats.open(key()))
    assert not is_follower(repeats.open(key(1, **other)))
    assert is_follower(repeats.open(key(1)))


def test_parts_of_a_key_do_not_run_into_each_other() -> None:
    assert key(attempt_id="a", path="bc").digest != key(attempt_id="ab", path="c").digest


@pytest.mark.parametrize(("method", "body"), [("GET", b""), ("GET", BODY), ("POST", b"")])
def test_what_makes_no_sample_has_no_key(method: str, body: bytes) -> None:
    assert call_key("r", "a", method, "models", "", [], body) is None


@pytest.mark.parametrize("value", [b"", b"x", b"-1", b"1.5", b"9" * 40, "²".encode()])
def test_a_counter_that_is_no_count_marks_no_repeat(value: bytes) -> None:
    found = call_key("r", "a", "POST", "p", "", [(b"x-stainless-retry-count", value)], BODY)
    assert found is not None
    assert found.count == 0


# Without a marker


@pytest.mark.parametrize("first", [None, 0])
@pytest.mark.parametrize("second", [None, 0])
async def test_c84_equal_calls_without_a_marker_are_samples_of_their_own(
    repeats: Repeats, first: int | None, second: int | None
) -> None:
    CallInProgress(repeats.open(key(first)))
    assert not is_follower(repeats.open(key(second)))


async def test_an_unmarked_call_is_not_given_a_kept_answer(repeats: Repeats) -> None:
    call = CallInProgress(repeats.open(key(0)), is_sealed=True)
    call.lead.client_left()
    await call.answer(b"missed")
    assert not is_follower(repeats.open(key(0)))


# Joining


@pytest.mark.parametrize("first", [None, 0])
async def test_c84_a_repeat_joins_the_call_in_flight(repeats: Repeats, first: int | None) -> None:
    call = CallInProgress(repeats.open(key(first)))
    repeat = repeats.open(key(1))
    relaying = asyncio.create_task(relayed(repeat))
    await call.answer(b"hello")
    client = await relaying
    assert client.messages == call.client.messages
    assert (client.status, client.body, client.is_whole) == (200, b"hello", True)
    assert client.messages[0]["headers"] == [(b"x-request-id", b"call-1")]
    assert repeats.joined == 1


async def test_a_stream_is_joined_in_its_middle_and_followed_live(repeats: Repeats) -> None:
    call = CallInProgress(repeats.open(key()))
    await call.begin()
    await call.write(b"one ")
    part = repeats.open(key(1))
    assert isinstance(part, Follower)
    client = Client()
    relaying = asyncio.create_task(part.relay(client.send))
    await client.until(2)
    assert client.body == b"one "
    await call.write(b"two ")
    await client.until(3)
    assert client.body == b"one two "
    await call.end(b"three")
    assert await relaying
    assert client.body == b"one two three"


async def test_a_call_whose_client_left_goes_on_for_the_repeat(repeats: Repeats) -> None:
    call = CallInProgress(repeats.open(key()))
    repeat = repeats.open(key(1))
    call.lead.client_left()
    assert not call.lead.is_forsaken
    relaying = asyncio.create_task(relayed(repeat))
    await call.answer(b"hello")
    assert (await relaying).body == b"hello"
    assert call.client.messages == []
    assert call.kills == 0


async def test_a_client_that_left_is_waited_for_and_then_its_call_is_closed(
    repeats: Repeats, clock: FakeClock
) -> None:
    call = CallInProgress(repeats.open(key(0)))
    call.lead.client_left()
    async with asyncio.timeout(5):
        await clock.until_sleeping()
    assert call.kills == 0
    clock.advance(SETTINGS.linger_seconds)
    await let_run()
    assert call.kills == 1
    assert SETTINGS.linger_seconds < 1


async def test_a_repeat_within_that_time_saves_the_call(repeats: Repeats, clock: FakeClock) -> None:
    call = CallInProgress(repeats.open(key(0)))
    call.lead.client_left()
    async with asyncio.timeout(5):
        await clock.until_sleeping()
    repeat = repeats.open(key(1))
    clock.advance(1.0)
    await let_run()
    assert call.kills == 0
    relaying = asyncio.create_task(relayed(repeat))
    await call.answer(b"hello")
    assert (await relaying).body == b"hello"


async def test_a_client_whose_repeat_could_not_be_told_is_not_waited_for(
    repeats: Repeats,
) -> None:
    call = CallInProgress(repeats.open(key(None)))
    call.lead.client_left()
    assert call.kills == 1


@pytest.mark.parametrize("is_recorded", [False, True])
async def test_a_call_that_was_closed_for_its_client_is_not_joined(
    repeats: Repeats, is_recorded: bool
) -> None:
    call = CallInProgress(repeats.open(key(None)))
    await call.begin()
    call.lead.client_left()
    if is_recorded:
        call.lead.close()
    assert not is_follower(repeats.open(key(1)))


async def test_a_call_ends_when_the_last_who_joined_leaves_too(
    repeats: Repeats, clock: FakeClock
) -> None:
    call = CallInProgress(repeats.open(key()))
    first, second = repeats.open(key(1)), repeats.open(key(2))
    assert isinstance(first, Follower)
    assert isinstance(second, Follower)
    call.lead.client_left()
    first.leave()
    assert not call.lead.is_forsaken
    second.leave()
    second.leave()
    assert call.lead.is_forsaken
    async with asyncio.timeout(5):
        await clock.until_sleeping()
    clock.advance(1.0)
    await let_run()
    assert call.kills == 1


async def test_a_client_that_takes_nothing_does_not_hold_up_the_repeat(
    repeats: Repeats, clock: FakeClock
) -> None:
    call = CallInProgress(repeats.open(key()))
    call.client.taking.clear()
    answering = asyncio.create_task(call.answer(b"hello"))
    await call.client.offered.wait()
    repeat = repeats.open(key(1))
    relaying = asyncio.create_task(relayed(repeat))
    async with asyncio.timeout(5):
        await clock.until_sleeping()
        clock.advance(SETTINGS.stall_seconds)
        await answering
        client = await relaying
    assert client.body == b"hello"
    assert answering.cancelling() == 0
    assert call.client.messages == []


async def test_a_slow_client_is_not_cut_off_where_nobody_joined(
    repeats: Repeats, clock: FakeClock
) -> None:
    call = CallInProgress(repeats.open(key()))
    call.client.taking.clear()
    part = repeats.open(key(1))
    assert isinstance(part, Follower)
    answering = asyncio.create_task(call.answer(b"hello"))
    await call.client.offered.wait()
    part.leave()
    for _ in range(3):
        async with asyncio.timeout(5):
            await clock.until_sleeping()
        clock.advance(SETTINGS.stall_seconds)
        await let_run()
    assert not answering.done()
    call.client.taking.set()
    await answering
    assert call.client.body == b"hello"


async def test_a_call_that_is_cancelled_while_its_client_is_cut_off_is_cancelled(
    repeats: Repeats, clock: FakeClock
) -> None:
    call = CallInProgress(repeats.open(key()))
    call.client.taking.clear()
    answering = asyncio.create_task(call.answer(b"hello"))
    await call.client.offered.wait()
    repeats.open(key(1))
    async with asyncio.timeout(5):
        await clock.until_sleeping()
        clock.advance(SETTINGS.stall_seconds)
        answering.cancel()
        with pytest.raises(asyncio.CancelledError):
            await answering


async def test_a_failure_is_told_to_those_who_joined(repeats: Repeats) -> None:
    call = CallInProgress(repeats.open(key()))
    repeat = repeats.open(key(1))
    call.lead.client_left()
    relaying = asyncio.create_task(relayed(repeat))
    await call.answer(b"broken", status=502)
    assert (await relaying).status == 502


async def test_an_answer_that_breaks_off_breaks_off_for_everyone(repeats: Repeats) -> None:
    call = CallInProgress(repeats.open(key()))
    part = repeats.open(key(1))
    assert isinstance(part, Follower)
    client = Client()
    relaying = asyncio.create_task(part.relay(client.send))
    await call.begin()
    await call.write(b"half")
    await client.until(2)
    call.lead.close()
    assert await relaying is False
    assert not client.is_whole


async def test_a_call_that_ends_without_an_answer_leaves_its_repeat_a_retryable_error(
    repeats: Repeats,
) -> None:
    call = CallInProgress(repeats.open(key()))
    part = repeats.open(key(1))
    assert isinstance(part, Follower)
    relaying = asyncio.create_task(part.relay(Client().send))
    call.lead.close()
    with pytest.raises(Unavailable) as caught:
        await relaying
    assert (caught.value.code, caught.value.status) == ("repeat_lost", 503)


# Answers that nobody got


async def test_c84_an_answer_that_nobody_got_is_replayed_once(repeats: Repeats) -> None:
    call = CallInProgress(repeats.open(key()), is_sealed=True)
    await call.begin()
    await call.write(b"one ")
    call.lead.client_left()
    await call.end(b"two")
    client = await relayed(repeats.open(key(1)))
    assert (client.body, client.is_whole, repeats.replayed) == (b"one two", True, 1)
    assert not is_follower(repeats.open(key(2)))
    assert repeats.kept_bytes == 0


async def test_a_replay_that_was_not_delivered_either_is_replayed_again(repeats: Repeats) -> None:
    call = CallInProgress(repeats.open(key()), is_sealed=True)
    call.lead.client_left()
    await call.answer(b"hello")
    part = repeats.open(key(1))
    assert isinstance(part, Follower)
    client = Client()
    client.taking.clear()
    relaying = asyncio.create_task(part.relay(client.send))
    await client.offered.wait()
    part.leave()
    client.taking.set()
    assert await relaying is False
    assert (await relayed(repeats.open(key(2)))).body == b"hello"


async def test_an_answer_whose_record_is_being_written_is_not_lost(
    repeats: Repeats, clock: FakeClock
) -> None:
    call = CallInProgress(repeats.open(key()), is_sealed=True)
    call.lead.client_left()
    async with asyncio.timeout(5):
        await clock.until_sleeping()
    clock.advance(1.0)
    await let_run()
    assert call.kills == 1  # in vain
    relaying = asyncio.create_task(relayed(repeats.open(key(1))))
    await call.answer(b"hello")
    assert (await relaying).body == b"hello"


async def test_a_delivered_answer_is_not_kept(repeats: Repeats) -> None:
    await CallInProgress(repeats.open(key())).answer(b"hello")
    assert repeats.kept_bytes == 0
    assert not is_follower(repeats.open(key(1)))


async def test_an_answer_that_a_repeat_got_is_not_kept(repeats: Repeats) -> None:
    call = CallInProgress(repeats.open(key()))
    repeat = repeats.open(key(1))
    call.lead.client_left()
    relaying = asyncio.create_task(relayed(repeat))
    await call.answer(b"hello")
    await relaying
    assert repeats.kept_bytes == 0
    assert not is_follower(repeats.open(key(2)))


async def test_a_failure_is_not_kept(repeats: Repeats) -> None:
    call = CallInProgress(repeats.open(key()), is_sealed=True)
    call.lead.client_left()
    await call.answer(b"overloaded", status=503)
    assert not is_follower(repeats.open(key(1)))


async def test_a_kept_answer_expires(repeats: Repeats, clock: FakeClock) -> None:
    call = CallInProgress(repeats.open(key()), is_sealed=True)
    call.lead.client_left()
    await call.answer(b"hello")
    clock.advance(SETTINGS.keep_seconds - 1)
    assert is_follower(repeats.open(key(1)))
    clock.advance(1)
    assert not is_follower(repeats.open(key(2)))


# Idempotency-Key


async def test_under_an_idempotency_key_a_delivered_answer_is_kept_for_a_while(
    repeats: Repeats, clock: FakeClock
) -> None:
    first = key(None, idempotency="k")
    await CallInProgress(repeats.open(first)).answer(b"hello")
    for _ in range(2):
        assert (await relayed(repeats.open(first))).body == b"hello"
    clock.advance(SETTINGS.idempotency_seconds)
    assert not is_follower(repeats.open(first))


async def test_an_idempotency_key_joins_a_call_in_flight(repeats: Repeats) -> None:
    first = key(None, idempotency="k")
    call = CallInProgress(repeats.open(first))
    assert is_follower(repeats.open(first))
    assert not is_follower(repeats.open(key(None, idempotency="other")))
    assert not is_follower(repeats.open(key(None, idempotency="k", body=BODY + b" ")))
    await call.answer(b"hello")


async def test_a_failure_under_an_idempotency_key_runs_anew(repeats: Repeats) -> None:
    first = key(0, idempotency="k")
    await CallInProgress(repeats.open(first)).answer(b"no", status=500)
    assert not is_follower(repeats.open(key(1, idempotency="k")))


# Siblings with equal bodies


async def test_the_repeat_of_a_failed_call_does_not_take_its_siblings_sample(
    repeats: Repeats,
) -> None:
    sibling = CallInProgress(repeats.open(key(0)))
    failed = CallInProgress(repeats.open(key(0)))
    await failed.answer(b"no", status=500)
    assert not is_follower(repeats.open(key(1)))
    # That failure has had its repeat: the next one can only be the sibling's.
    part = repeats.open(key(1))
    relaying = asyncio.create_task(relayed(part))
    await sibling.answer(b"sibling's")
    assert (await relaying).body == b"sibling's"


async def test_siblings_each_get_the_answer_of_one_call(repeats: Repeats) -> None:
    calls = [CallInProgress(repeats.open(key(0))) for _ in range(2)]
    parts = [repeats.open(key(1)) for _ in range(2)]
    relaying = [asyncio.create_task(relayed(part)) for part in parts]
    await calls[0].answer(b"first")
    await calls[1].answer(b"second")
    assert sorted([(await task).body for task in relaying]) == [b"first", b"second"]


async def test_the_call_whose_client_left_is_preferred(repeats: Repeats) -> None:
    CallInProgress(repeats.open(key(0)))
    left = CallInProgress(repeats.open(key(0)))
    left.lead.client_left()
    relaying = asyncio.create_task(relayed(repeats.open(key(1))))
    await left.answer(b"its own")
    assert (await relaying).body == b"its own"


async def test_an_sdk_that_fails_again_and_again_makes_each_of_its_calls(
    repeats: Repeats,
) -> None:
    for count in range(3):
        await CallInProgress(repeats.open(key(count))).answer(b"no", status=500)
    # The agent's own next call is in flight, and its connection breaks unnoticed.
    call = CallInProgress(repeats.open(key(0)))
    assert not is_follower(repeats.open(key(0)))
    relaying = asyncio.create_task(relayed(repeats.open(key(2))))
    await call.answer(b"hello")
    assert (await relaying).body == b"hello"


# Bounds


@pytest.mark.parametrize("is_ended", [False, True])
async def test_an_answer_over_the_bound_is_not_joined_and_not_kept(
    open_repeats: Callable[..., Repeats], is_ended: bool
) -> None:
    repeats = open_repeats(answer_bytes=1000)
    call = CallInProgress(repeats.open(key()), is_sealed=True)
    await call.begin()
    await call.write(b"x" * 1000)
    await call.write(b"x")
    assert repeats.kept_bytes == 0
    call.lead.client_left()
    assert call.kills == 1
    if is_ended:
        await call.end(b"y")
    assert not is_follower(repeats.open(key(1)))
    assert call.client.body == b"x" * 1001


async def test_one_who_joined_before_the_bound_gets_all_at_its_own_pace(
    open_repeats: Callable[..., Repeats],
) -> None:
    repeats = open_repeats(answer_bytes=1000)
    call = CallInProgress(repeats.open(key()))
    part = repeats.open(key(1))
    assert isinstance(part, Follower)
    call.lead.client_left()
    client = Client()
    client.taking.clear()
    relaying = asyncio.create_task(part.relay(client.send))
    pieces = [b"%03d" % number * 100 for number in range(10)]

    async def answer() -> None:
        await call.begin()
        for piece in pieces:
            await call.write(piece)
        await call.end()

    answering = asyncio.create_task(answer())
    await client.offered.wait()
    await let_run()
    assert not answering.done()
    assert repeats.kept_bytes < 2000
    client.taking.set()
    async with asyncio.timeout(5):
        await answering
        assert await relaying
    assert client.body == b"".join(pieces)
    assert repeats.kept_bytes == 0


async def test_one_who_falls_behind_does_not_hold_up_another(
    open_repeats: Callable[..., Repeats],
) -> None:
    repeats = open_repeats(answer_bytes=1000)
    call = CallInProgress(repeats.open(key()))
    slow, quick = repeats.open(key(1)), repeats.open(key(2))
    assert isinstance(slow, Follower)
    assert isinstance(quick, Follower)
    call.lead.client_left()
    stuck, client = Client(), Client()
    stuck.taking.clear()
    relaying = [
        asyncio.create_task(slow.relay(stuck.send)),
        asyncio.create_task(quick.relay(client.send)),
    ]
    async with asyncio.timeout(5):
        await call.begin()
        await stuck.offered.wait()
        for _ in range(10):
            await call.write(b"x" * 300)
        await call.end()
        assert await relaying[1]
        stuck.taking.set()
        assert await relaying[0] is False
    assert client.body == b"x" * 3000
    assert not stuck.is_whole


async def test_all_that_is_kept_is_bounded_and_the_oldest_goes_first(
    open_repeats: Callable[..., Repeats],
) -> None:
    repeats = open_repeats(total_bytes=10_000)
    for number in range(4):
        call = CallInProgress(repeats.open(key(body=b"%d" % number)), is_sealed=True)
        call.lead.client_left()
        await call.answer(b"x" * 3000)
    assert 0 < repeats.kept_bytes <= 10_000
    assert not is_follower(repeats.open(key(1, body=b"0")))
    assert is_follower(repeats.open(key(1, body=b"3")))


async def test_calls_in_flight_count_too(open_repeats: Callable[..., Repeats]) -> None:
    repeats = open_repeats(total_bytes=10_000)
    calls = [CallInProgress(repeats.open(key(body=b"%d" % number))) for number in range(4)]
    for call in calls:
        await call.begin()
        await call.write(b"x" * 3000)
    assert repeats.kept_bytes <= 10_000
    assert is_follower(repeats.open(key(1, body=b"0")))
    assert not is_follower(repeats.open(key(1, body=b"3")))
    for call in calls:
        await call.end()
    assert calls[3].client.body == b"x" * 3000


# Ends


async def test_the_end_of_a_rollout_drops_what_is_kept(repeats: Repeats) -> None:
    for rollout_id in ("r", "s"):
        call = CallInProgress(repeats.open(key(rollout_id=rollout_id)), is_sealed=True)
        call.lead.client_left()
        await call.answer(b"hello")
    repeats.forget("r")
    repeats.forget("r")
    assert not is_follower(repeats.open(key(1)))
    assert is_follower(repeats.open(key(1, rollout_id="s")))


async def test_a_call_in_flight_at_the_rollouts_end_is_still_told_to_all(repeats: Repeats) -> None:
    call = CallInProgress(repeats.open(key()))
    relaying = asyncio.create_task(relayed(repeats.open(key(1))))
    await call.begin(status=403)
    repeats.forget("r")
    assert not is_follower(repeats.open(key(2)))
    await call.end(b"ended")
    assert (await relaying).body == b"ended"
    assert call.client.body == b"ended"
    assert repeats.kept_bytes == 0


async def test_a_client_that_leaves_after_the_rollouts_end_ends_its_call(repeats: Repeats) -> None:
    call = CallInProgress(repeats.open(key(None)))
    repeats.forget("r")
    call.lead.client_left()
    assert call.kills == 1


async def test_what_comes_after_the_close_goes_to_its_client_alone(repeats: Repeats) -> None:
    call = CallInProgress(repeats.open(key()))
    call.lead.close()
    await call.begin(status=500)
    assert call.client.status == 500
    assert not is_follower(repeats.open(key(1)))


async def test_an_ended_call_keeps_nothing_of_the_gateways(repeats: Repeats) -> None:
    call = CallInProgress(repeats.open(key()), is_sealed=True)
    call.lead.client_left()
    await call.answer(b"no", status=500)
    assert call.lead.on_forsaken() is False
    assert call.kills == 0


# On real connections


class SmallGateway:
    """Wires ``Repeats`` as the module says; its model answers when the test lets it."""

    def __init__(self, repeats: Repeats) -> None:
        self.repeats = repeats
        self.calls = 0
        self.arrived = asyncio.Event()
        self.joined = asyncio.Event()
        self.client_left = asyncio.Event()
        self.may_answer = asyncio.Event()
        self.ended = asyncio.Event()
        self.outcomes: list[str] = []

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        incoming = Incoming(receive, scope["headers"])
        body = await incoming.body(2**20, 5.0, Rounds())
        found = call_key("r", "a", scope["method"], scope["path"], "", scope["headers"], body)
        assert found is not None
        part = self.repeats.open(found)
        try:
            if isinstance(part, Follower):
                incoming.watch(part.leave)
                self.joined.set()
                try:
                    await part.relay(send)
                finally:
                    part.leave()
            else:
                await self._call(part, incoming, send)
        finally:
            incoming.close()

    async def _call(self, lead: Lead, incoming: Incoming, send: Send) -> None:
        task = asyncio.current_task()
        assert task is not None

        def left() -> None:
            lead.client_left()
            self.client_left.set()

        lead.on_forsaken = task.cancel
        incoming.watch(left)
        self.calls += 1
        self.arrived.set()
        try:
            to_all = lead.through(send)
            await to_all({"type": "http.response.start", "status": 200, "headers": []})
            await to_all({"type": "http.response.body", "body": b"one ", "more_body": True})
            await self.may_answer.wait()
            await to_all({"type": "http.response.body", "body": b"two", "more_body": False})
            self.outcomes.append("ok")
        except asyncio.CancelledError:
            task.uncancel()
            self.outcomes.append("client_gone")
        finally:
            lead.close()
            self.ended.set()


async def post(url: str, count: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, _, port = url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
        b"x-stainless-retry-count: %d\r\ncontent-length: %d\r\n\r\n" % (count, len(BODY)) + BODY
    )
    await writer.drain()
    return reader, writer


async def test_c84_a_client_that_breaks_off_and_repeats_gets_the_one_answer(
    repeats: Repeats,
) -> None:
    gateway = SmallGateway(repeats)
    async with asyncio.timeout(10), serve_asgi(gateway) as url:
        _, first = await post(url, 0)
        await gateway.arrived.wait()
        first.close()
        await first.wait_closed()
        await gateway.client_left.wait()
        reader, second = await post(url, 1)
        await gateway.joined.wait()
        gateway.may_answer.set()
        answer = await reader.read()
        second.close()
        await second.wait_closed()
    assert b"one " in answer
    assert answer.endswith(b"3\r\ntwo\r\n0\r\n\r\n")
    assert gateway.calls == 1
    assert gateway.outcomes == ["ok"]


async def test_a_client_that_breaks_off_for_good_ends_its_call_and_a_late_repeat_runs_anew(
    repeats: Repeats, clock: FakeClock
) -> None:
    gateway = SmallGateway(repeats)
    async with asyncio.timeout(10), serve_asgi(gateway) as url:
        _, first = await post(url, 0)
        await gateway.arrived.wait()
        first.close()
        await first.wait_closed()
        await gateway.client_left.wait()
        await clock.until_sleeping()
        clock.advance(1.0)
        await gateway.ended.wait()
        assert gateway.outcomes == ["client_gone"]
        gateway.may_answer.set()
        reader, second = await post(url, 1)
        answer = await reader.read()
        second.close()
        await second.wait_closed()
    assert answer.endswith(b"3\r\ntwo\r\n0\r\n\r\n")
    assert gateway.calls == 2
    assert gateway.outcomes == ["client_gone", "ok"]


async def let_run() -> None:
    """Let every task go on as far as it can: nothing here does real I/O."""
    clock = FakeClock()
    for _ in range(10):
        await clock.sleep(0)
