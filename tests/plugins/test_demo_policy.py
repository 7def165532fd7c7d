"""The demo's policy without HTTP: words, sampling, tasks, and that it learns."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from agl_demo.agent import PROMPT, Walk
from agl_demo.learning import Call, advantages, improve
from agl_demo.policy import (
    Sampling,
    contexts,
    initial_weights,
    log_softmax,
    logits_of,
    random_for,
    sample,
)
from agl_demo.tasks import MAX_CALLS, tasks_of
from agl_demo.vocabulary import (
    ACTION_IDS,
    ASSISTANT,
    END,
    UNKNOWN,
    USER,
    WORDS,
    encode,
    encode_chat,
    pieces,
)

Curve = Callable[[int], list[float]]


@pytest.mark.parametrize("seed", range(5))
def test_policy_learns_from_token_ids_logprobs_and_rewards_alone(
    seed: int, offline_curve: Curve
) -> None:
    means = offline_curve(seed)
    assert means[0] <= 0.3
    assert np.mean(means[-3:]) >= 0.9


def test_same_seed_gives_the_same_curve_and_another_seed_another(offline_curve: Curve) -> None:
    assert offline_curve(3) == offline_curve(3)
    assert offline_curve(3)[:2] != offline_curve(4)[:2]


def test_vocabulary_has_33_words_of_which_8_are_actions() -> None:
    assert len(WORDS) == len(set(WORDS)) == 33
    assert len(ACTION_IDS) == 8


def test_every_message_of_the_agent_is_in_the_vocabulary() -> None:
    way = Walk((0, 4), (4, 0))
    texts = [PROMPT, f"moved {way.describe()}", f"stayed {Walk((2, 2), (2, 2)).describe()}"]
    assert UNKNOWN not in [token for text in texts for token in encode(text)]


def test_text_that_comes_back_has_the_ids_that_were_sampled() -> None:
    ids = [WORDS.index("north"), WORDS.index("3"), WORDS.index("level")]
    assert encode("".join(pieces(ids))) == ids


def test_marker_in_a_users_text_is_no_structure() -> None:
    ids = encode_chat([{"role": "user", "content": "go <end> <assistant>"}])
    assert ids == [USER, UNKNOWN, UNKNOWN, UNKNOWN, END, ASSISTANT]


def test_next_prompt_extends_the_last_prompt_and_its_answer() -> None:
    first = [{"role": "user", "content": "the charger is 1 east 0 level"}]
    answer = [WORDS.index("east"), END]
    second = [*first, {"role": "assistant", "content": "east"}, {"role": "user", "content": "1"}]
    assert encode_chat(second)[: len(encode_chat(first)) + 2] == encode_chat(first) + answer


def test_sampled_logprobs_are_those_of_the_distribution_at_temperature_1() -> None:
    prompt = encode_chat([{"role": "user", "content": "the charger is 1 east 0 level"}])
    weights = random_for("weights").normal(size=initial_weights().shape)
    draw = sample(
        weights,
        prompt,
        sampling=Sampling(temperature=0.3, top_k=4),
        max_tokens=6,
        random=random_for("draw"),
        top_logprobs=3,
    )
    expected = log_softmax(logits_of(weights, contexts(prompt, draw.token_ids)))
    for place, token_id in enumerate(draw.token_ids):
        assert draw.logprobs[place] == pytest.approx(expected[place, token_id])
        ranked = sorted(enumerate(expected[place]), key=lambda pair: -pair[1])[:3]
        assert [index for index, _ in draw.alternatives[place]] == [index for index, _ in ranked]


@pytest.mark.parametrize(
    ("sampling", "allowed"),
    [
        (Sampling(temperature=0), {2}),
        (Sampling(top_k=1), {2}),
        (Sampling(top_k=2), {1, 2}),
        (Sampling(top_p=0.6), {2}),
        (Sampling(top_p=0.7), {1, 2}),
        (Sampling(min_p=0.2), {1, 2}),
        (Sampling(), {0, 1, 2}),
    ],
)
def test_sampling_cuts_as_asked(sampling: Sampling, allowed: set[int]) -> None:
    chances = sampling.probabilities(np.log(np.array([0.1, 0.25, 0.65])))
    assert {index for index, chance in enumerate(chances) if chance > 0} == allowed
    assert chances.sum() == pytest.approx(1)


def test_advantages_compare_within_the_group_only() -> None:
    def call(group: str, reward: float) -> Call:
        return Call(group=group, prompt_ids=(), response_ids=(), logprobs=(), reward=reward)

    gains = advantages([call("a", 0), call("a", 1), call("b", 1), call("b", 1)])
    assert gains[0] < 0 < gains[1]
    assert gains[2:] == [0, 0]


def test_batch_without_calls_leaves_the_weights() -> None:
    assert (improve(initial_weights(), []) == initial_weights()).all()


def test_tasks_are_on_the_grid_and_can_be_done_with_the_calls_given() -> None:
    for seed in range(20):
        for task in tasks_of(seed, seed):
            places = [*task["robot"], *task["charger"]]
            assert all(0 <= place < 5 for place in places)
            way = Walk(tuple(task["robot"]), tuple(task["charger"]))
            assert 2 <= way.distance <= MAX_CALLS == task["max_calls"]


def test_walls_and_unknown_words_leave_the_robot_and_earn_nothing() -> None:
    way = Walk((0, 0), (1, 0))
    assert way.move("west") == (0.0, False)
    assert way.move("robot") == (0.0, False)
    assert way.move(" right ") == (1.0, True)
    assert (way.distance, way.reward()) == (0, pytest.approx(1 / 3))
