"""The probe that tells raw logprobs from processed ones."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from agl_core.gateway.logprobs_mode import MODE_PROBES, mode_of, mode_probe

RECORDINGS = Path(__file__).parents[2] / "data" / "vllm"


def chat(*logprobs: Any) -> dict[str, Any]:
    content = [{"token": "x", "logprob": value, "top_logprobs": []} for value in logprobs]
    return {"choices": [{"index": 0, "logprobs": {"content": content}}]}


def completion(*logprobs: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "logprobs": {"token_logprobs": list(logprobs)}}]}


@pytest.mark.parametrize("answer", [chat, completion])
def test_c36_exactly_zero_is_processed_and_below_is_raw(answer: Any) -> None:
    assert mode_of(answer(0.0)) == "processed"
    assert mode_of(answer(-0.0)) == "processed"
    assert mode_of(answer(0)) == "processed"
    assert mode_of(answer(-1e-9)) == "raw"
    assert mode_of(answer(-2.5)) == "raw"
    assert mode_of(answer(0.0, -0.1)) == "raw"


@pytest.mark.parametrize("value", [None, 0.1, math.nan, -math.inf, "0", False])
def test_what_is_no_logprob_tells_nothing(value: Any) -> None:
    assert mode_of(chat(value)) == "unknown"
    assert mode_of(completion(value)) == "unknown"


@pytest.mark.parametrize(
    "answer",
    [
        None,
        [],
        {},
        {"error": {"message": "no"}},
        {"choices": []},
        {"choices": [None]},
        {"choices": [{"logprobs": None}]},
        {"choices": [{"logprobs": {"content": None}}]},
        {"choices": [{"logprobs": {"content": [None]}}]},
        chat(),
        completion(),
    ],
)
def test_an_answer_without_logprobs_tells_nothing(answer: Any) -> None:
    assert mode_of(answer) == "unknown"


@pytest.mark.parametrize("case", ["chat_logprobs", "completion_logprobs"])
def test_logprobs_are_found_where_vllm_puts_them(case: str) -> None:
    # Recorded from a server with raw logprobs, whose tokens were not certain.
    answer = json.loads((RECORDINGS / case / "response.body").read_bytes())
    assert mode_of(answer) == "raw"


@pytest.mark.parametrize("path", [path for path, _ in MODE_PROBES])
def test_the_probe_asks_for_one_token_of_one_candidate(path: str) -> None:
    body = mode_probe(path, "m")
    assert body["model"] == "m"
    assert (body["max_tokens"], body["top_k"], body["temperature"]) == (1, 1, 1.0)
    assert body["logprobs"] is (True if path.startswith("chat") else 0)


def test_the_probes_stay_as_they_are() -> None:
    mode_probe("completions", "m")["prompt"] = "changed"
    assert "model" not in dict(MODE_PROBES)["completions"]
    assert mode_probe("completions", "m")["prompt"] != "changed"
