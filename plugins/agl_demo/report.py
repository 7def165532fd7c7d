"""What the demo prints: a line per step, then a table and a plot of the rewards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from agl_demo.training import LAST_STEPS, Step, mean_reward

BAR_WIDTH = 24
PLOT_HEIGHT = 10
MOST_AT_FIRST = 0.3
LEAST_AT_LAST = 0.9
"""A run that starts above the one or ends below the other has shown nothing."""


def step_line(step: Step) -> str:
    """One line on a step that has just ended."""
    filled = round(max(0.0, min(1.0, step.reward)) * BAR_WIDTH)
    bar = "#" * filled + "." * (BAR_WIDTH - filled)
    failed = f"  {len(step.failed)} failed: {', '.join(step.failed)}" if step.failed else ""
    return (
        f"step {step.number + 1:2}  reward {step.reward:.3f}  {bar}  {step.seconds:4.1f} s{failed}"
    )


def summary(steps: Sequence[Step], *, seed: int, restarts: int, seconds: float) -> dict[str, Any]:
    """The whole run as JSON-able values."""
    first, last = steps[0].reward, mean_reward(steps[-LAST_STEPS:])
    return {
        "seed": seed,
        "steps": len(steps),
        "rollouts": sum(step.rollouts for step in steps),
        "rollouts_failed": [rollout_id for step in steps for rollout_id in step.failed],
        "rewards": [step.reward for step in steps],
        "reward_first": first,
        "reward_last": last,
        "learned": first <= MOST_AT_FIRST and last >= LEAST_AT_LAST,
        "model_requests": sum(step.model_requests for step in steps),
        "tokens_incomplete": sum(step.tokens_incomplete for step in steps),
        "model_server_restarts": restarts,
        "seconds": round(seconds, 2),
    }


def table(steps: Sequence[Step]) -> str:
    """The steps in numbers."""
    lines = ["step  reward  rollouts  failed  model calls  seconds"]
    lines += [
        f"{step.number + 1:4}  {step.reward:6.3f}  {step.rollouts:8}  {len(step.failed):6}"
        f"  {step.model_requests:11}  {step.seconds:7.1f}"
        for step in steps
    ]
    return "\n".join(lines)


def plot(steps: Sequence[Step]) -> str:
    """Mean reward by step, as text."""
    lines = []
    for level in range(PLOT_HEIGHT, -1, -1):
        marks = "".join(
            " * " if round(step.reward * PLOT_HEIGHT) == level else "   " for step in steps
        )
        lines.append(f"{level / PLOT_HEIGHT:4.1f} |{marks}".rstrip())
    lines.append("     +" + "---" * len(steps))
    lines.append("      " + "".join(f"{step.number + 1:2} " for step in steps).rstrip())
    return "\n".join(lines)
