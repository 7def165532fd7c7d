"""What tests of several plugins' files share."""

from __future__ import annotations

from collections.abc import Callable

import pytest


@pytest.fixture(scope="session")
def offline_curve() -> Callable[[int], list[float]]:
    """The demo's rewards by step for a seed, with policy, walk and update in one process."""
    import numpy as np

    from agl_demo.agent import PROMPT, Walk
    from agl_demo.learning import Call, improve
    from agl_demo.policy import Floats, Sampling, initial_weights, random_for, sample
    from agl_demo.tasks import SIBLINGS, tasks_of
    from agl_demo.training import ENOUGH, LAST_STEPS, MAX_STEPS
    from agl_demo.vocabulary import encode_chat, pieces

    def walk(weights: Floats, seed: int, step: int, task: dict, sibling: int):
        """The agent's walk with the policy in the same process."""
        way = Walk(tuple(task["robot"]), tuple(task["charger"]))
        messages = [{"role": "system", "content": PROMPT}]
        calls: list[Call] = []
        news = ""
        while way.distance and way.moves < task["max_calls"]:
            messages.append({"role": "user", "content": f"{news} {way.describe()}".strip()})
            prompt = encode_chat(messages)
            draw = sample(
                weights,
                prompt,
                sampling=Sampling(),
                max_tokens=2,
                random=random_for(
                    seed, None, step, f"{task['key']}/{sibling}:{way.moves}", prompt, 0
                ),
            )
            answer = "".join(pieces(draw.token_ids))
            messages.append({"role": "assistant", "content": answer})
            value, has_moved = way.move(answer)
            news = "moved" if has_moved else "stayed"
            calls.append(
                Call(
                    group=task["key"],
                    prompt_ids=tuple(prompt),
                    response_ids=draw.token_ids,
                    logprobs=draw.logprobs,
                    reward=value,
                )
            )
        return way.reward(), calls

    def curve(seed: int) -> list[float]:
        weights, means = initial_weights(), []
        for step in range(MAX_STEPS):
            rewards, calls = [], []
            for task in tasks_of(seed, step):
                for sibling in range(SIBLINGS):
                    reward, made = walk(weights, seed, step, task, sibling)
                    rewards.append(reward)
                    calls += made
            means.append(float(np.mean(rewards)))
            if len(means) >= LAST_STEPS and np.mean(means[-LAST_STEPS:]) >= ENOUGH:
                break
            weights = improve(weights, calls)
        return means

    return curve
