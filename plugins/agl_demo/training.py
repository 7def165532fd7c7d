"""The demo's training loop: everything that it knows of the agents came through the service.

It enqueues groups of rollouts, waits for them, fetches the captured token ids, log-probabilities
and rewards, improves the weights and hands them to the model server while the gateway holds the
policy's calls. Which processes run where, and how many agents at once, makes no difference to it.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from attrs import define, field, frozen

from agl_core.client import AglLiteClient, WaitTimeout
from agl_core.clock import Clock, SystemClock
from agl_core.records import Rollout
from agl_demo.learning import Call, improve
from agl_demo.model_server import DEFAULT_MODEL
from agl_demo.policy import Floats, initial_weights
from agl_demo.processes import MARK, DemoFailed
from agl_demo.tasks import SIBLINGS, tasks_of

POLICY = DEFAULT_MODEL
MAX_STEPS = 16
ENOUGH = 0.95
"""Mean reward of the last steps at which nothing is left to learn."""
LAST_STEPS = 3
MAX_RETRIES = 2
_ATTEMPT_SECONDS = 60.0
_STEP_SECONDS = 300.0
_SLICE_SECONDS = 1.0
_INCOMPLETE = ("no_token_ids", "nonfinite_logprob", "incomplete_tokens")


class Weights(Protocol):
    """Where weights are put to use."""

    endpoint: str

    def load(self, weights: Floats, version: int) -> None:
        """Replace the weights."""


@frozen(kw_only=True)
class Step:
    """What one step came to."""

    number: int
    """Counts from 0; also the version of the weights that it ran with."""
    reward: float
    """Mean over the rollouts that count."""
    rollouts: int
    failed: tuple[str, ...]
    """Ids of rollouts that could not be used."""
    model_requests: int
    tokens_incomplete: int
    seconds: float


@define
class _Batch:
    """What of a step's rollouts can be trained on."""

    rewards: list[float] = field(factory=list)
    calls: list[Call] = field(factory=list)
    failed: list[str] = field(factory=list)
    model_requests: int = 0
    tokens_incomplete: int = 0


@define(kw_only=True)
class Training:
    """One run from untrained weights to ones that bring the robot home."""

    client: AglLiteClient
    models: Weights
    run: str
    seed: int
    check: Callable[[], None]
    """Called again and again while waiting; raises what ends the run."""
    report: Callable[[Step], None]
    clock: Clock = field(factory=SystemClock)
    steps: list[Step] = field(factory=list, init=False)

    @property
    def version(self) -> int:
        """Of the weights that answer now."""
        return len(self.steps)

    def register(self) -> None:
        """Tell the service where the model is and which version of the weights it has."""
        self.client.register_model(
            model=POLICY,
            endpoint=self.models.endpoint,
            version=self.version,
            logprobs_mode="raw",
        )

    def train(self) -> None:
        """Run until the task is learnt or the steps are used up.

        Raises:
            DemoFailed: Rollouts do not end, or too many of them fail.
        """
        weights = initial_weights()
        self.register()
        while True:
            began = self.clock.monotonic()
            groups = self._enqueue(self.version)
            ids = [rollout.rollout_id for group in groups for rollout in group]
            self._wait(ids)
            lines = self.client.export("triplet", ids=ids, policy=POLICY)
            batch = _collect(groups, {line["rollout_id"]: line for line in lines})
            step = Step(
                number=self.version,
                reward=sum(batch.rewards) / len(batch.rewards),
                rollouts=len(ids),
                failed=tuple(batch.failed),
                model_requests=batch.model_requests,
                tokens_incomplete=batch.tokens_incomplete,
                seconds=self.clock.monotonic() - began,
            )
            self.steps.append(step)
            self.report(step)
            if len(self.steps) == MAX_STEPS or self._has_learnt():
                return
            weights = improve(weights, batch.calls)
            with self.client.weight_update(POLICY):
                self.models.load(weights, self.version)
                self.register()

    def _has_learnt(self) -> bool:
        last = self.steps[-LAST_STEPS:]
        return len(last) == LAST_STEPS and mean_reward(last) >= ENOUGH

    def _enqueue(self, step: int) -> list[list[Rollout]]:
        """The step's rollouts, group by group."""
        agent = Path(__file__).with_name("agent.py")
        rollouts = self.client.enqueue(
            [
                {"input": task, "n": SIBLINGS, "group_id": f"demo-{self.run}-{task['key']}"}
                for task in tasks_of(self.seed, step)
            ],
            config={
                "command": [sys.executable, str(agent)],
                "env": {MARK: self.run},
                "max_retries": MAX_RETRIES,
                "timeout_seconds": _ATTEMPT_SECONDS,
            },
        )
        return [rollouts[at : at + SIBLINGS] for at in range(0, len(rollouts), SIBLINGS)]

    def _wait(self, ids: Sequence[str]) -> None:
        deadline = self.clock.monotonic() + _STEP_SECONDS
        while True:
            self.check()
            try:
                self.client.wait(ids, timeout=_SLICE_SECONDS)
            except WaitTimeout as exc:
                if self.clock.monotonic() > deadline:
                    raise DemoFailed(f"rollouts do not end: {exc}") from exc
            else:
                return


def mean_reward(steps: Sequence[Step]) -> float:
    """Mean over steps, each counting alike."""
    return sum(step.reward for step in steps) / len(steps)


def _collect(groups: Sequence[Sequence[Rollout]], lines: Mapping[str, Mapping[str, Any]]) -> _Batch:
    """Take what is valid, in an order that does not depend on who finished first.

    A group of which less than half is valid says little about its task and is left out.
    """
    batch = _Batch()
    for group in groups:
        valid = []
        for rollout in group:
            line = lines.get(rollout.rollout_id)
            if line is None or line["status"] != "succeeded" or line["reward"] is None:
                batch.failed.append(rollout.rollout_id)
                continue
            valid.append(line)
            skipped = Counter(line["skipped"])
            batch.model_requests += len(line["triplets"]) + skipped.total()
            batch.tokens_incomplete += sum(skipped[cause] for cause in _INCOMPLETE)
        if 2 * len(valid) < len(group):
            continue
        batch.rewards += [line["reward"] for line in valid]
        batch.calls += [
            Call(
                group=line["group"]["id"],
                prompt_ids=tuple(triplet["prompt_token_ids"]),
                response_ids=tuple(triplet["response_token_ids"]),
                logprobs=tuple(triplet["logprobs"]),
                reward=triplet["reward"],
            )
            for line in valid
            for triplet in line["triplets"]
            if triplet["reward"] is not None
        ]
    if not batch.rewards:
        raise DemoFailed(
            "every group of the step failed",
            hint=f"see the log events of {', '.join(batch.failed[:3])}",
        )
    return batch
