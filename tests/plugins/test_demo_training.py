"""What the demo trains on when rollouts fail, and what it prints."""

from __future__ import annotations

from typing import Any

import pytest

from agl_core.records import Rollout
from agl_demo.processes import DemoFailed
from agl_demo.report import plot, step_line, summary, table
from agl_demo.training import Step, _collect


def line(rollout_id: str, *, status: str = "succeeded", reward: float | None = 0.5) -> Any:
    triplet = {
        "call_id": f"{rollout_id}-call",
        "prompt_token_ids": [1, 2],
        "response_token_ids": [3],
        "logprobs": [-0.5],
        "reward": 1.0,
    }
    return {
        "rollout_id": rollout_id,
        "group": {"id": rollout_id[0], "size": 4, "index": 0},
        "status": status,
        "reward": reward,
        "triplets": [triplet, {**triplet, "reward": None}],
        "skipped": {"truncated": 1, "no_token_ids": 2},
    }


def group(name: str) -> list[Rollout]:
    return [Rollout(rollout_id=f"{name}-{index}") for index in range(4)]


def lines_of(*lines: Any) -> dict[str, Any]:
    return {one["rollout_id"]: one for one in lines}


def test_failed_rollout_is_named_and_left_out_of_the_batch() -> None:
    lines = lines_of(line("a-0"), line("a-1", status="failed"), line("a-2"), line("a-3"))
    batch = _collect([group("a")], lines)
    assert batch.failed == ["a-1"]
    assert batch.rewards == [0.5] * 3
    assert len(batch.calls) == 3


def test_group_counts_with_half_of_it_valid_and_not_with_less() -> None:
    half = lines_of(line("a-0"), line("a-1", reward=None), line("a-2"))
    less = lines_of(line("b-0"))
    batch = _collect([group("a"), group("b")], {**half, **less})
    assert batch.failed == ["a-1", "a-3", "b-1", "b-2", "b-3"]
    assert {call.group for call in batch.calls} == {"a"}


def test_step_without_a_valid_group_ends_the_demo() -> None:
    with pytest.raises(DemoFailed, match="every group"):
        _collect([group("a")], lines_of(line("a-0")))


def test_every_captured_call_is_counted_and_incomplete_ones_apart() -> None:
    batch = _collect([group("a")], lines_of(*(line(f"a-{index}") for index in range(4))))
    assert batch.model_requests == 4 * 5
    assert batch.tokens_incomplete == 4 * 2


def step(number: int, reward: float, *failed: str) -> Step:
    return Step(
        number=number,
        reward=reward,
        rollouts=16,
        failed=failed,
        model_requests=80,
        tokens_incomplete=0,
        seconds=1.25,
    )


@pytest.mark.parametrize(
    ("rewards", "learned"),
    [([0.1, 0.9, 0.9, 0.9], True), ([0.4, 1, 1, 1], False), ([0.1, 0.8, 0.9, 0.9], False)],
)
def test_run_has_learned_when_it_starts_low_and_ends_high(
    rewards: list[float], learned: bool
) -> None:
    steps = [step(number, reward) for number, reward in enumerate(rewards)]
    result = summary(steps, seed=0, restarts=0, seconds=3.0)
    assert result["learned"] is learned
    assert result["reward_first"] == rewards[0]
    assert result["reward_last"] == pytest.approx(sum(rewards[-3:]) / 3)


def test_line_of_a_step_names_what_failed() -> None:
    assert step_line(step(0, 0.5)) == f"step  1  reward 0.500  {'#' * 12}{'.' * 12}   1.2 s"
    assert step_line(step(0, 0.5, "a-1")).endswith("1 failed: a-1")


def test_plot_has_a_mark_for_each_step_at_its_height() -> None:
    rows = plot([step(0, 0.0), step(1, 0.52), step(2, 1.0)]).splitlines()
    assert rows[0] == " 1.0 |       *"
    assert rows[5] == " 0.5 |    *"
    assert rows[10] == " 0.0 | *"
    assert table([step(0, 0.5)]).splitlines()[1].split() == ["1", "0.500", "16", "0", "80", "1.2"]
