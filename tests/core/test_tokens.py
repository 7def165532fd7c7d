"""Events seen as turns and rewards, and the lines that trainers read."""

from __future__ import annotations

import base64
import hashlib
import json
from typing import Any

import pytest

from agl_core.records import Attempt, Event, Group, Rollout
from agl_core.tokens import (
    pack_ids,
    rewards_of,
    trajectory_line,
    triplet_line,
    turns_of,
    unpack_ids,
    untrainable_sampling,
)


def event(seq: int, event_type: str, data: dict[str, Any], attempt_id: str = "a1") -> Event:
    return Event(
        seq=seq,
        event_type=event_type,
        rollout_id="r1",
        attempt_id=attempt_id,
        timestamp=1_800_000_000.0 + seq,
        data=data,
    )


def choice(prompt: list[int] | None, response: list[int] | None, **fields: Any) -> dict[str, Any]:
    return {
        "index": 0,
        "prompt_token_ids": prompt,
        "token_ids": response,
        "logprobs": None if response is None else [-float(token) for token in response],
        "version_spans": None,
        "finish_reason": "stop",
        "tokens": "absent" if response is None else "complete",
        "extras": {},
        **fields,
    }


def call(seq: int, *choices: dict[str, Any], attempt_id: str = "a1", **fields: Any) -> Event:
    """A ``model_request`` event whose call id is ``c<seq>``."""
    data = {
        "api": "chat",
        "call_id": f"c{seq}",
        "policy": "coder",
        "trained": True,
        "model": "coder",
        "server": {"endpoint": "http://127.0.0.1:8000/v1", "model": "coder"},
        "version_start": 3,
        "version_end": 3,
        "request": {"messages": [{"role": "user", "content": "hi"}]},
        "adjusted": {},
        "response": {},
        "choices": list(choices),
        "sampling": {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "logprobs_mode": "raw"},
        "usage": None,
        "status": "ok",
        "http_status": 200,
        "latency_ms": 5.0,
        "ttft_ms": None,
        "retries": 0,
        **fields,
    }
    return event(seq, "model_request", data, attempt_id)


def reward(seq: int, **data: Any) -> Event:
    return event(seq, "reward", data)


def rollout(**fields: Any) -> Rollout:
    return Rollout(
        **{
            "rollout_id": "r1",
            "status": "succeeded",
            "group": Group(id="g", size=2, index=1),
            "attempts": (Attempt(attempt_id="a0"), Attempt(attempt_id="a1")),
            "succeeded_attempt_id": "a1",
            **fields,
        }
    )


def test_packed_ids_are_little_endian_int32() -> None:
    assert pack_ids([1, 256]) == b"\x01\0\0\0\x00\x01\0\0"
    assert unpack_ids(b"\x01\0\0\0\x00\x01\0\0") == [1, 256]
    assert pack_ids(b"\x01\0\0\0") == b"\x01\0\0\0"
    with pytest.raises(ValueError, match="multiple of 4"):
        pack_ids(b"\x01")


def test_a_complete_call_is_a_turn_with_all_that_was_told() -> None:
    (turn,) = turns_of(
        [
            call(
                4,
                choice([1, 2], [3, 4], version_spans=[[0, 7], [1, 8]], finish_reason="length"),
                server={"endpoint": "http://h/v1", "model": "coder-lora"},
                version_start=7,
                version_end=8,
            )
        ]
    ).turns
    assert (turn.call_id, turn.seq, turn.choice, turn.policy) == ("c4", 4, 0, "coder")
    assert turn.adapter == "coder-lora"
    assert (turn.prompt_token_ids, turn.response_token_ids) == ([1, 2], [3, 4])
    assert (turn.prompt_length, turn.response_length, turn.context_length) == (2, 2, 4)
    assert turn.logprobs.tolist() == [-3.0, -4.0]
    assert (turn.version_start, turn.version_end) == (7, 8)
    assert turn.version_spans == ((0, 7), (1, 8))
    assert turn.finish_reason == "length"
    assert (turn.sampling["temperature"], turn.logprobs_mode) == (1.0, "raw")


def test_turns_come_in_order_and_the_choices_of_a_call_keep_one_prompt() -> None:
    events = [call(2, choice([5], [6])), call(1, choice([1], [2]), choice([1], [3], index=1))]
    turns = turns_of(events).turns
    assert [(turn.call_id, turn.choice) for turn in turns] == [("c1", 0), ("c1", 1), ("c2", 0)]
    assert turns[0].prompt is turns[1].prompt


@pytest.mark.parametrize(
    ("cause", "made"),
    [
        ("untrained", call(1, choice([1], [2]), policy="judge", trained=False)),
        ("other_policy", call(1, choice([1], [2]), policy="critic")),
        ("other_api", call(1, api="other", trained=True)),
        ("client_gone", call(1, choice([1], [2]), status="client_gone")),
        ("timeout", call(1, choice([1], [2]), status="timeout")),
        ("truncated", call(1, choice([1], [2]), status="truncated")),
        ("aborted", call(1, choice([1], [2]), status="aborted")),
        ("aborted", call(1, choice([1], [2], finish_reason="abort"))),
        ("upstream_error", call(1, status="upstream_error", http_status=500)),
        ("upstream_error", call(1, status="upstream_error", http_status=400, response=None)),
        ("no_token_ids", call(1, choice(None, None))),
        ("no_token_ids", call(1, choice([1], [2], tokens="absent"))),
        ("no_token_ids", call(1)),
        ("incomplete_tokens", call(1, choice([1], [2], tokens="incomplete"))),
        ("incomplete_tokens", call(1, choice([1], [2], logprobs=None))),
        ("incomplete_tokens", call(1, choice([1], [2, 3], logprobs=[-1.0]))),
        ("incomplete_tokens", call(1, choice([1], [2**40], logprobs=[-1.0]))),
        ("empty_response", call(1, choice([1], []))),
        ("nonfinite_logprob", call(1, choice([1], [2], logprobs=[None], tokens="incomplete"))),
        ("nonfinite_logprob", call(1, choice([1], [2], logprobs=[float("-inf")]))),
    ],
)
def test_a_call_that_is_no_turn_is_counted_by_its_cause(cause: str, made: Event) -> None:
    result = turns_of([made], policy="coder")
    assert result.turns == ()
    assert result.skipped == {cause: 1}


def test_without_a_policy_all_trained_ones_are_read() -> None:
    events = [call(1, choice([1], [2])), call(2, choice([1], [2]), policy="critic")]
    assert [turn.policy for turn in turns_of(events).turns] == ["coder", "critic"]


def test_a_prompt_that_was_too_long_is_told_from_other_refusals() -> None:
    vllm = {
        "error": {"message": "This model's maximum context length is 1024 tokens.", "code": 400}
    }
    ours = {"error": {"message": "limit reached", "code": "context_length_exceeded"}}
    for response in (vllm, ours):
        made = call(2, status="upstream_error", http_status=400, response=response)
        result = turns_of([call(1, choice([1], [2])), made])
        assert (len(result.turns), result.skipped) == (1, {"context_exhausted": 1})


def test_c31_a_record_with_text_only_is_skipped_with_its_reason() -> None:
    text = {"choices": [{"index": 0, "message": {"role": "assistant", "content": "hello"}}]}
    events = [call(1, choice(None, None), response=text), call(2, choice([1], [2]))]
    for line in (triplet_line(rollout(), events), trajectory_line(rollout(), events)):
        assert line["skipped"] == {"no_token_ids": 1}
    assert [t["call_id"] for t in triplet_line(rollout(), events)["triplets"]] == ["c2"]


def test_c41_a_rollout_without_a_trainable_call_says_why() -> None:
    refused = call(
        1, policy=None, trained=False, server=None, model="foo", sampling=None,
        status="upstream_error", http_status=404,
        response={"error": {"code": "model_not_found", "message": "no model 'foo'"}},
    )  # fmt: skip
    line = trajectory_line(rollout(), [refused], policy="bar")
    assert (line["status"], line["rows"]) == ("succeeded", [])
    assert line["skipped"] == {"model_not_found": 1}


def test_c38_placeholders_of_different_images_are_not_merged() -> None:
    def with_image(seq: int, prompt: list[int], response: list[int], *images: bytes) -> Event:
        urls = ["data:image/png;base64," + base64.b64encode(i).decode() for i in images]
        parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
        return call(
            seq,
            choice(prompt, response),
            request={"messages": [{"role": "user", "content": [*parts, {"type": "text"}]}]},
        )

    events = [with_image(1, [1, 90], [2], b"cat"), with_image(2, [1, 90, 2, 3], [4], b"dog")]
    line = trajectory_line(rollout(), events)
    assert [row["media"] for row in line["rows"]] == [
        [hashlib.sha256(image).hexdigest()] for image in (b"cat", b"dog")
    ]
    both = trajectory_line(
        rollout(), [events[0], with_image(2, [1, 90, 2, 90], [4], b"cat", b"dog")]
    )
    assert len(both["rows"]) == 1


@pytest.mark.parametrize(
    "request_body",
    [
        {"messages": [{"content": [{"type": "image", "source": {"data": "Y2F0"}}]}]},
        {
            "messages": [
                {"content": [{"type": "tool_result", "content": [{"source": {"data": "Y2F0"}}]}]}
            ]
        },
        {"input": [{"role": "user", "content": [{"image_url": "data:image/png;base64,Y2F0"}]}]},
        {"messages": [{"content": [{"input_audio": {"data": "Y2F0", "format": "wav"}}]}]},
        {"messages": [{"content": [{"type": "image_embeds", "image_embeds": "Y2F0"}]}]},
    ],
)
def test_media_are_found_in_every_dialect(request_body: dict[str, Any]) -> None:
    (turn,) = turns_of([call(1, choice([1], [2]), request=request_body)]).turns
    assert turn.media == (hashlib.sha256(b"cat").hexdigest(),)


def test_recorded_media_are_taken_as_they_are() -> None:
    (turn,) = turns_of([call(1, choice([1], [2]), media=[{"sha256": "ab"}, "cd"])]).turns
    assert turn.media == ("ab", "cd")


def test_media_behind_an_address_are_known_by_it() -> None:
    parts = [{"image_url": {"url": "https://images.test/1.png"}}]
    (turn,) = turns_of(
        [call(1, choice([1], [2]), request={"messages": [{"content": parts}]})]
    ).turns
    assert turn.media == (hashlib.sha256(b"https://images.test/1.png").hexdigest(),)


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": None, "uuid": "cat"},
        {
            "type": "image_embeds",
            "image_embeds": {"image_embeds": "Y2F0", "image_grid_thw": "Y2F0"},
        },
    ],
)
def test_c38_media_without_bytes_of_their_own_never_pass_for_text(part: dict[str, Any]) -> None:
    asked = call(1, choice([1], [2]), request={"messages": [{"role": "user", "content": [part]}]})
    line = triplet_line(rollout(), [asked])
    assert (line["triplets"], line["skipped"]) == ([], {"multimodal_unsupported": 1})


def test_c38_media_of_a_conversation_that_the_request_only_continues_are_found() -> None:
    parts = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,Y2F0"}}]
    asked = call(
        1,
        choice([1], [2]),
        api="responses",
        request={"previous_response_id": "resp_1", "input": "and now?"},
        sent={"messages": [{"role": "user", "content": parts}, {"role": "user", "content": "?"}]},
    )
    (turn,) = turns_of([asked]).turns
    assert turn.media == (hashlib.sha256(b"cat").hexdigest(),)


def test_c38_each_choice_with_media_is_left_out_of_triplets_and_text_stays() -> None:
    parts = [{"image_url": {"url": "data:image/png;base64,Y2F0"}}]
    seen = call(
        1, choice([1], [2]), choice([1], [3], index=1), request={"messages": [{"content": parts}]}
    )
    line = triplet_line(rollout(), [seen, call(2, choice([4], [5]))])
    assert [t["call_id"] for t in line["triplets"]] == ["c2"]
    assert line["skipped"] == {"multimodal_unsupported": 2}


def test_c39_a_turn_over_the_limit_is_left_out_and_one_at_the_limit_is_not() -> None:
    events = [call(1, choice([1] * 62, [2, 3])), call(2, choice([9] * 63, [2, 3]))]
    line = triplet_line(rollout(), events, max_length=64)
    assert [t["call_id"] for t in line["triplets"]] == ["c1"]
    assert line["skipped"] == {"too_long": 1}


def test_c41_a_refused_model_is_named_beside_its_cause() -> None:
    refused = [
        call(seq, policy=None, trained=False, model=name, status="upstream_error", http_status=404)
        for seq, name in ((1, "foo"), (2, "foo"), (3, "baz"))
    ]
    line = triplet_line(rollout(), refused, policy="bar")
    assert line["skipped"] == {"model_not_found": 3}
    assert line["refused_models"] == {"foo": 2, "baz": 1}


def test_what_the_engine_told_besides_goes_with_its_turn() -> None:
    routed = {"routed_experts": [[[0, 5]], [[1, 2]]]}
    events = [call(1, choice([1], [2], extras=routed)), call(2, choice([1, 2, 3], [4]))]
    (first, second) = triplet_line(rollout(), events)["triplets"]
    assert first["extras"] == routed
    assert "extras" not in second
    (row,) = trajectory_line(rollout(), events)["rows"]
    assert [turn.get("extras") for turn in row["turns"]] == [routed, None]


def test_final_reward_is_the_last_without_a_call() -> None:
    rewards = rewards_of(
        [reward(3, value=0.25), reward(1, value=1), reward(4, value=9, call_id="c")]
    )
    assert (rewards.final, rewards.by_call) == (0.25, {"c": 9.0})


def test_a_graders_reward_goes_before_an_agents() -> None:
    rewards = rewards_of(
        [
            reward(1, value=0.5, source="grader"),
            reward(2, value=1.0, source="agent"),
            reward(3, value=0.1, source="grader", call_id="c1"),
            reward(4, value=0.9, source="agent", call_id="c1"),
        ]
    )
    assert (rewards.final, rewards.by_call) == (0.5, {"c1": 0.1})


def test_an_explicit_null_is_no_reward_and_never_zero() -> None:
    rewards = rewards_of(
        [reward(1, value=0.5), reward(2, value=None), reward(3, value=None, call_id="c1")]
    )
    assert (rewards.final, rewards.by_call) == (None, {"c1": None})
    assert rewards_of([]).final is None


def test_a_reward_without_a_value_adds_metrics_only() -> None:
    rewards = rewards_of(
        [
            reward(1, value=0.5, metrics={"tests": 3, "lint": 1}),
            reward(2, metrics={"lint": 2}),
            reward(3, value=1, call_id="c1", metrics={"tests": 9}),
        ]
    )
    assert (rewards.final, rewards.metrics) == (0.5, {"tests": 3, "lint": 2})


def test_a_reward_that_names_another_policy_does_not_count() -> None:
    events = [
        reward(1, value=0.5, policy="coder"),
        reward(2, value=0.75, policy="critic"),
        reward(3, value=0.1, policy="critic", call_id="c1"),
    ]
    assert rewards_of(events, "coder").final == 0.5
    assert rewards_of(events, "coder").by_call == {}
    assert rewards_of(events, "critic").final == 0.75


def test_c80_a_call_reward_stands_beside_its_turn() -> None:
    events = [
        call(1, choice([1], [2])),
        call(2, choice([1, 2, 3], [4])),
        reward(3, value=0.5, call_id="c2"),
        reward(4, value=1.0),
    ]
    line = trajectory_line(rollout(), events)
    assert line["reward"] == 1.0
    assert [(t["call_id"], t["reward"]) for t in line["rows"][0]["turns"]] == [
        ("c1", None),
        ("c2", 0.5),
    ]
    assert [t["reward"] for t in triplet_line(rollout(), events)["triplets"]] == [None, 0.5]


def test_the_succeeded_attempt_trains_and_no_other() -> None:
    events = [
        call(1, choice([1], [2]), attempt_id="a0"),
        event(2, "reward", {"value": 1.0}, attempt_id="a0"),
        call(3, choice([1, 2], [3]), attempt_id="a1"),
    ]
    line = trajectory_line(rollout(), events)
    assert (line["attempt_id"], line["reward"]) == ("a1", None)
    assert [[t["call_id"] for t in row["turns"]] for row in line["rows"]] == [["c3"]]
    latest = rollout(status="failed", succeeded_attempt_id=None)
    assert trajectory_line(latest, events)["attempt_id"] == "a1"
    unknown = rollout(succeeded_attempt_id=None, attempts=())
    assert trajectory_line(unknown, events)["attempt_id"] == "a1"


def test_triplet_line_has_the_shape_of_the_wire() -> None:
    line = triplet_line(rollout(), [call(1, choice([1, 2], [3])), reward(2, value=1)])
    assert line == {
        "rollout_id": "r1",
        "attempt_id": "a1",
        "group": {"id": "g", "size": 2, "index": 1},
        "mode": "train",
        "status": "succeeded",
        "reward": 1.0,
        "triplets": [
            {
                "call_id": "c1",
                "choice": 0,
                "policy": "coder",
                "prompt_token_ids": [1, 2],
                "response_token_ids": [3],
                "logprobs": [-3.0],
                "version_start": 3,
                "version_end": 3,
                "reward": None,
            }
        ],
        "skipped": {},
    }


def test_trajectory_line_has_the_shape_of_the_wire() -> None:
    events = [
        call(1, choice([1], [2], version_spans=[[0, 3]])),
        call(2, choice([1, 2, 7], [4, 5], finish_reason="length")),
        call(3, choice([9], [6])),
        reward(4, value=1, metrics={"tests": 3}),
    ]
    line = trajectory_line(rollout(group=None, mode="val"), events)
    sampling = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "logprobs_mode": "raw"}
    common = {"policy": "coder", "sampling": sampling, "logprobs_mode": "raw", "media": []}
    turn = {"choice": 0, "version_spans": [[0, 3]], "reward": None, "finish_reason": "stop"}
    assert json.loads(json.dumps(line)) == {
        "rollout_id": "r1",
        "attempt_id": "a1",
        "group": None,
        "mode": "val",
        "status": "succeeded",
        "reward": 1.0,
        "metrics": {"tests": 3},
        "rows": [
            {
                "segment": 0,
                "weight": 0.75,
                "shared": 0,
                "prompt_length": 1,
                "token_ids": [1, 2, 7, 4, 5],
                "logprobs": [-2.0, -4.0, -5.0],
                "turns": [
                    {"call_id": "c1", "start": 1, "end": 2, **turn},
                    {"call_id": "c2", "start": 3, "end": 5, **turn, "finish_reason": "length"},
                ],
                **common,
            },
            {
                "segment": 1,
                "weight": 0.25,
                "shared": 0,
                "prompt_length": 1,
                "token_ids": [9, 6],
                "logprobs": [-6.0],
                "turns": [{"call_id": "c3", "start": 1, "end": 2, **turn}],
                **common,
            },
        ],
        "splits": [{"call_id": "c3", "choice": 0, "index": 0}],
        "abandoned": 0,
        "skipped": {},
    }


def test_abandoned_choices_are_dropped_when_asked_to() -> None:
    first = call(1, choice([1], [2]), choice([1], [3], index=1))
    events = [first, call(2, choice([1, 3, 4], [5]))]
    kept = trajectory_line(rollout(), events)
    dropped = trajectory_line(rollout(), events, keep_abandoned=False)
    assert [(len(line["rows"]), line["abandoned"]) for line in (kept, dropped)] == [(2, 1), (1, 1)]


def test_text_of_a_call_that_broke_off_is_context_and_the_lineage_goes_on() -> None:
    events = [
        call(1, choice([1], [2])),
        call(2, choice([1, 2, 3], [4]), status="truncated"),
        call(3, choice([1, 2, 3, 4, 5], [6])),
    ]
    line = trajectory_line(rollout(), events)
    (row,) = line["rows"]
    assert [(t["start"], t["end"]) for t in row["turns"]] == [(1, 2), (5, 6)]
    assert (line["splits"], line["skipped"]) == ([], {"truncated": 1})


def test_c36_raw_logprobs_at_another_temperature_are_refused_naming_both() -> None:
    message = untrainable_sampling({"temperature": 0.6, "logprobs_mode": "raw"})
    assert message is not None
    assert "raw" in message
    assert "temperature is 0.6" in message
    assert untrainable_sampling({"temperature": 0.6, "logprobs_mode": "processed"}) is None


@pytest.mark.parametrize("active", [{"top_p": 0.9}, {"top_k": 20}, {"min_p": 0.05}])
def test_c36_raw_logprobs_under_truncated_sampling_are_refused(active: dict[str, Any]) -> None:
    (name,) = active
    message = untrainable_sampling({"temperature": 1.0, "logprobs_mode": "raw", **active})
    assert message is not None
    assert f"{name} is {active[name]}" in message


def test_c36_neutral_sampling_trains_on_raw_logprobs() -> None:
    for top_k in (0, -1, None):
        sampling = {"temperature": 1, "top_p": 1.0, "top_k": top_k, "min_p": 0}
        assert untrainable_sampling({**sampling, "logprobs_mode": "raw"}) is None
