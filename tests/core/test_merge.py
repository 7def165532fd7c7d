"""Turns merged into rows: the forest, its paths, what splits and what is abandoned."""

from __future__ import annotations

import json
import time
from array import array
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agl_core.tokens import Merged, Row, Turn, merge, pack_ids

RECORDINGS = Path(__file__).parent.parent / "data" / "vllm"


def turn(
    name: str, prompt: list[int], response: list[int], *, seq: int | None = None, **fields: Any
) -> Turn:
    """A turn whose name ends in the number of its event, unless told otherwise."""
    return Turn(
        call_id=name,
        seq=int(name[1:]) if seq is None else seq,
        prompt=pack_ids(prompt),
        response=pack_ids(response),
        logprobs=array("d", [-0.5 - token for token in response]),
        **{"policy": "coder", **fields},
    )


def members(merged: Merged) -> list[list[str]]:
    return [[part.call_id for part in row.turns] for row in merged.rows]


def mask(row: Row) -> list[int]:
    trained = [0] * len(row.token_ids)
    for part in row.turns:
        trained[part.start : part.end] = [1] * (part.end - part.start)
    return trained


def splits(merged: Merged) -> list[tuple[str, int]]:
    return [(split.call_id, split.index) for split in merged.splits]


def test_c28_histories_that_diverge_become_two_segments() -> None:
    merged = merge([turn("t1", [1], [2]), turn("t2", [1, 2, 3], [4]), turn("t3", [1, 9], [5])])
    assert [(row.token_ids, mask(row)) for row in merged.rows] == [
        ([1, 2, 3, 4], [0, 1, 0, 1]),
        ([1, 9, 5], [0, 0, 1]),
    ]
    assert [row.segment for row in merged.rows] == [0, 1]
    assert splits(merged) == [("t3", 1)]


def test_c29_a_tool_call_that_was_taken_out_of_the_history_splits_once() -> None:
    first = turn("t1", [1, 2], [50, 51, 52, 3])
    second = turn("t2", [1, 2, 50, 3, 7], [8, 9])
    merged = merge([first, second])
    assert members(merged) == [["t1"], ["t2"]]
    assert splits(merged) == [("t2", 3)]
    assert sum(row.trained_tokens for row in merged.rows) == 4 + 2


def test_c30_the_separator_between_two_calls_is_context() -> None:
    first = turn("t1", [1, 2], [3, 151645])
    prompt = [1, 2, 3, 151645, 198, 4]
    (row,) = merge([first, turn("t2", prompt, [5])]).rows
    assert row.token_ids[: len(prompt)] == prompt
    assert mask(row) == [0, 0, 1, 1, 0, 0, 1]
    assert row.prompt_length == 2
    assert row.logprobs.tolist() == [-3.5, -151645.5, -5.5]


def test_c32_ids_decide_and_never_the_bytes_inside_of_an_id() -> None:
    # Packed, 256 is 00 01 00 00: the bytes of 1 stand in it at an offset that is no token.
    assert len(merge([turn("t1", [256], [1]), turn("t2", [256, 256], [3])]).rows) == 2
    assert len(merge([turn("t1", [7], [10, 11]), turn("t2", [7, 12, 13], [3])]).rows) == 2


def test_c34_sub_agents_that_interleave_get_one_row_each() -> None:
    merged = merge(
        [
            turn("a1", [1], [2], seq=1),
            turn("b1", [7], [8], seq=2),
            turn("a2", [1, 2, 3], [4], seq=3),
            turn("b2", [7, 8, 9], [10], seq=4),
        ]
    )
    assert members(merged) == [["a1", "a2"], ["b1", "b2"]]


def test_c40_a_compacted_history_is_a_second_segment_and_one_split() -> None:
    merged = merge([turn("t1", [1], [2]), turn("t2", [5], [6])])
    assert members(merged) == [["t1"], ["t2"]]
    assert splits(merged) == [("t2", 0)]


def test_c79_weights_are_shares_of_the_trained_tokens() -> None:
    merged = merge([turn("t1", [1], [2, 3]), turn("t2", [1, 2, 3, 4], [5]), turn("t3", [9], [10])])
    assert [row.weight for row in merged.rows] == [0.75, 0.25]


def test_c39_a_row_over_the_limit_is_left_out_whole_and_the_weights_are_those_of_the_rest() -> None:
    turns = [
        turn("c1", [1], [2, 3]),
        turn("c2", [1, 2, 3, 4], [5]),
        turn("c3", [9], [6]),
        turn("c4", [8], [7]),
    ]
    merged = merge(turns, max_length=4)
    assert members(merged) == [["c3"], ["c4"]]
    assert [(row.segment, row.weight) for row in merged.rows] == [(0, 0.5), (1, 0.5)]
    assert merged.too_long == 2
    # What the history did is told whole, whatever of it trains.
    assert splits(merged) == splits(merge(turns))
    assert members(merge(turns, max_length=5)) == [["c1", "c2"], ["c3"], ["c4"]]


def test_c39_what_only_a_row_left_out_would_have_trained_is_shared_with_none() -> None:
    first, long = turn("c1", [1], [2]), turn("c2", [1, 2, 3], [4, 5, 6, 7])
    branch, below = turn("c3", [1, 2, 8], [9]), turn("c4", [1, 2, 8, 9, 8], [9])
    rows = merge([first, long, branch]).rows
    assert [row.shared for row in rows] == [0, 2]
    (row,) = merge([first, long, branch], max_length=6).rows
    assert (row.shared, row.weight, [t.call_id for t in row.turns]) == (0, 1.0, ["c3"])
    (row,) = merge([first, long, branch, below], max_length=6).rows
    assert [t.call_id for t in row.turns] == ["c3", "c4"]


def test_no_turns_give_no_rows() -> None:
    assert merge([]) == Merged()


def test_prompt_that_extends_two_contexts_takes_the_longer() -> None:
    merged = merge([turn("t1", [1], [2, 3]), turn("t2", [1], [2]), turn("t3", [1, 2, 3, 4], [5])])
    assert ["t1", "t3"] in members(merged)


def test_of_two_equal_contexts_the_later_turn_goes_on() -> None:
    merged = merge([turn("t1", [1], [2]), turn("t2", [1], [2]), turn("t3", [1, 2, 3], [4])])
    assert members(merged) == [["t1"], ["t2", "t3"]]


def test_of_two_equal_choices_the_lower_goes_on() -> None:
    choices = [turn("t1", [1], [2], choice=choice) for choice in (0, 1)]
    merged = merge([*choices, turn("t2", [1, 2, 3], [4])])
    assert [[(p.call_id, p.choice) for p in row.turns] for row in merged.rows] == [
        [("t1", 0), ("t2", 0)],
        [("t1", 1)],
    ]


def test_border_of_prompt_and_response_does_not_matter_for_the_prefix() -> None:
    merged = merge([turn("t1", [1, 2], [3]), turn("t2", [1], [2, 3]), turn("t3", [1, 2, 3], [4])])
    assert members(merged) == [["t1"], ["t2", "t3"]]


def test_shorter_prompt_is_a_root_and_no_split() -> None:
    merged = merge([turn("t1", [1, 2, 3], [4]), turn("t2", [1, 2], [9])])
    assert members(merged) == [["t1"], ["t2"]]
    assert merged.splits == ()


def test_equal_prompt_is_a_second_sample_and_no_split() -> None:
    merged = merge([turn("t1", [1, 2], [3]), turn("t2", [1, 2], [4])])
    assert members(merged) == [["t1"], ["t2"]]
    assert [row.shared for row in merged.rows] == [0, 0]
    assert (merged.splits, merged.abandoned) == ((), 0)


def test_equal_prompts_below_a_parent_branch_and_the_shared_part_trains_once() -> None:
    merged = merge(
        [
            turn("t1", [1], [2]),
            turn("t2", [1, 2, 3], [4]),
            turn("t3", [1, 2, 3], [5, 6]),
        ]
    )
    assert members(merged) == [["t1", "t3"], ["t2"]]
    branch = merged.rows[1]
    assert (branch.token_ids, mask(branch)) == ([1, 2, 3, 4], [0, 0, 0, 1])
    assert (branch.shared, branch.prompt_length) == (2, 3)
    assert branch.logprobs.tolist() == [-4.5]


def test_prompt_equal_to_a_context_adds_no_context_token() -> None:
    (row,) = merge([turn("t1", [1], [2]), turn("t2", [1, 2], [3])]).rows
    assert mask(row) == [0, 1, 1]
    assert [(part.start, part.end) for part in row.turns] == [(1, 2), (2, 3)]


def test_an_empty_response_is_no_node() -> None:
    merged = merge([turn("t1", [1], []), turn("t2", [1, 3], [4])])
    assert members(merged) == [["t2"]]
    assert (merged.rows[0].shared, merged.splits) == (0, ())


def test_the_row_goes_on_with_the_child_that_has_most_sampled_below_it() -> None:
    merged = merge(
        [
            turn("t1", [1], [2]),
            turn("t2", [1, 2, 3], [4, 4]),
            turn("t3", [1, 2, 5], [6]),
            turn("t4", [1, 2, 5, 6, 7], [8, 8]),
        ]
    )
    assert members(merged) == [["t1", "t3", "t4"], ["t2"]]


def test_lineages_never_cross_a_policy_an_adapter_or_other_media() -> None:
    others: list[dict[str, Any]] = [
        {"policy": "critic", "media": ("ee",)},
        {"adapter": "coder-lora", "media": ("ee",)},
        {"media": ("ff",)},
    ]
    for fields in others:
        first = turn("t1", [1], [2], **fields)
        second = turn("t2", [1, 2, 3], [4], media=("ee",))
        assert members(merge([first, second])) == [["t1"], ["t2"]], fields


def test_an_image_added_later_goes_on_with_the_row() -> None:
    first = turn("t1", [1], [2], media=("ee",))
    second = turn("t2", [1, 2, 3], [4], media=("ee", "ff"))
    (row,) = merge([first, second]).rows
    assert row.media == ("ee", "ff")


def test_another_temperature_starts_a_row_that_shares_its_beginning() -> None:
    merged = merge(
        [
            turn("t1", [1], [2], sampling={"temperature": 1.0}),
            turn("t2", [1, 2, 3], [4], sampling={"temperature": 0.5}),
            turn("t3", [1, 2, 3, 4, 5], [6], sampling={"temperature": 0.5}),
        ]
    )
    assert members(merged) == [["t1"], ["t2", "t3"]]
    assert [row.sampling["temperature"] for row in merged.rows] == [1.0, 0.5]
    assert merged.rows[1].shared == 2
    assert merged.splits == ()


def test_each_choice_is_a_branch_and_one_left_behind_is_abandoned() -> None:
    first = [turn("t1", [1], [2 + choice], choice=choice) for choice in range(3)]
    turns = [*first, turn("t2", [1, 3, 8], [9])]
    kept = merge(turns)
    assert members(kept) == [["t1"], ["t1", "t2"], ["t1"]]
    assert (kept.abandoned, kept.splits) == (2, ())
    dropped = merge(turns, keep_abandoned=False)
    assert members(dropped) == [["t1", "t2"]]
    assert (dropped.abandoned, dropped.rows[0].weight) == (2, 1.0)


def test_samples_of_one_prompt_that_nothing_extends_are_not_abandoned() -> None:
    assert merge([turn("t1", [1], [2], choice=choice) for choice in range(4)]).abandoned == 0


def test_history_that_breaks_below_a_parent_is_counted_too() -> None:
    merged = merge(
        [
            turn("t1", [1], [2]),
            turn("t2", [1, 2, 3], [4, 5]),
            turn("t3", [1, 2, 3, 4, 9, 6], [7]),
        ]
    )
    assert members(merged) == [["t1", "t2"], ["t3"]]
    assert splits(merged) == [("t3", 4)]


def test_sub_agents_that_branch_from_one_context_are_no_splits() -> None:
    merged = merge(
        [
            turn("t1", [1], [2]),
            turn("t2", [1, 2, 3, 4], [5]),
            turn("t3", [1, 2, 3, 6], [7]),
        ]
    )
    assert merged.splits == ()


def test_prompts_of_one_call_are_no_splits_of_each_other() -> None:
    batch = [turn("t1", [prompt], [5], choice=choice) for choice, prompt in enumerate((1, 2))]
    assert merge(batch).splits == ()


def test_split_index_is_that_of_the_context_with_most_in_common() -> None:
    merged = merge(
        [turn("t1", [1, 2, 3], [4, 5]), turn("t2", [1, 8], [9]), turn("t3", [1, 2, 3, 4, 6], [7])]
    )
    assert splits(merged) == [("t2", 1), ("t3", 4)]


def test_split_is_found_past_the_first_block_of_a_long_prompt() -> None:
    long = list(range(10_000))
    changed = [*long[:9_123], 77_777, *long[9_124:], 5]
    assert splits(merge([turn("t1", long, [1, 2]), turn("t2", changed, [3])])) == [("t2", 9_123)]


@pytest.mark.parametrize(
    ("given", "spans"),
    [
        ({"version_spans": ((0, 7), (2, 8))}, ((0, 7), (2, 8))),
        ({"version_start": 7, "version_end": 7}, ((0, 7),)),
        ({"version_start": 7, "version_end": 9}, ((0, 7), (2, 9))),
        ({"version_start": 7}, ((0, 7),)),
        ({}, None),
    ],
)
def test_version_spans_of_a_row_hold_lowest_and_highest_version(given: Any, spans: Any) -> None:
    (row,) = merge([turn("t1", [1], [2, 3, 4], **given)]).rows
    assert row.turns[0].version_spans == spans


def recorded(case: str, seq: int) -> Turn:
    body = json.loads((RECORDINGS / case / "response.body").read_text())
    (choice,) = body["choices"]
    return Turn(
        call_id=body["id"],
        seq=seq,
        policy=body["model"],
        prompt=pack_ids(body["prompt_token_ids"]),
        response=pack_ids(choice["token_ids"]),
        logprobs=array("d", [token["logprob"] for token in choice["logprobs"]["content"]]),
    )


@pytest.mark.parametrize("case", ["length", "text", "tool", "tool_named", "unicode"])
def test_recorded_conversation_whose_prefix_holds_is_one_row(case: str) -> None:
    first, second = (recorded(f"prefix_holds_{case}_turn{n}", n) for n in (1, 2))
    merged = merge([first, second])
    (row,) = merged.rows
    assert row.ids == second.prompt + second.response
    assert row.trained_tokens == first.response_length + second.response_length
    assert merged.splits == ()


@pytest.mark.parametrize(
    ("case", "index"), [("think", 30), ("sampled", 32), ("stop", 40), ("strip", 46)]
)
def test_recorded_conversation_whose_prefix_breaks_splits_there(case: str, index: int) -> None:
    merged = merge([recorded(f"prefix_breaks_{case}_turn{n}", n) for n in (1, 2)])
    assert len(merged.rows) == 2
    assert [split.index for split in merged.splits] == [index]


@st.composite
def forests(draw: st.DrawFn) -> list[Turn]:
    """Calls that start anew, extend, repeat or alter what is there, over an alphabet of three."""
    tokens = st.lists(st.integers(0, 2), max_size=3)
    turns: list[Turn] = []
    contexts: list[list[int]] = []
    for seq in range(1, draw(st.integers(1, 12)) + 1):
        extends = draw(st.booleans())
        before = draw(st.sampled_from(contexts)) if contexts and extends else []
        kept = draw(st.sampled_from([len(before), len(before), max(len(before) - 1, 0)]))
        prompt = [*before[:kept], *draw(tokens)] or [0]
        for choice in range(draw(st.sampled_from([1, 1, 1, 2]))):
            response = [draw(st.integers(0, 2)), *draw(tokens)]
            contexts.append(prompt + response)
            policy = draw(st.sampled_from(["coder", "coder", "coder", "critic"]))
            turns.append(turn(f"t{seq}", prompt, response, choice=choice, policy=policy))
    return turns


@given(forests())
def test_each_sampled_token_trains_exactly_once(turns: list[Turn]) -> None:
    merged = merge(turns)
    trained: dict[tuple[str, int], tuple[list[int], list[int], list[float]]] = {}
    for row in merged.rows:
        ids, logprobs = row.token_ids, row.logprobs.tolist()
        assert row.prompt_length == row.turns[0].start
        assert row.turns[-1].end == len(ids)
        for part in row.turns:
            assert (part.call_id, part.choice) not in trained
            count = part.end - part.start
            trained[part.call_id, part.choice] = (
                ids[: part.start],
                ids[part.start : part.end],
                logprobs[:count],
            )
            del logprobs[:count]
        assert logprobs == []
    assert trained == {
        (t.call_id, t.choice): (t.prompt_token_ids, t.response_token_ids, t.logprobs.tolist())
        for t in turns
    }
    assert sum(row.weight for row in merged.rows) == pytest.approx(1)


@given(forests())
def test_rows_are_as_few_as_the_forest_allows(turns: list[Turn]) -> None:
    """Against a plain search over lists: a row for each root, and one for each further child."""

    def context(t: Turn) -> list[int]:
        return t.prompt_token_ids + t.response_token_ids

    children: dict[Turn | None, int] = {}
    for t in turns:
        prompt = t.prompt_token_ids
        fitting = [
            other
            for other in turns
            if other.policy == t.policy and prompt[: other.context_length] == context(other)
        ]
        parent = max(
            fitting,
            key=lambda other: (other.context_length, other.seq, -other.choice),
            default=None,
        )
        children[parent] = children.get(parent, 0) + 1
    rows = children.get(None, 0) + sum(n - 1 for p, n in children.items() if p is not None)
    assert len(merge(turns).rows) == rows


@given(forests(), st.randoms(use_true_random=False))
def test_order_of_arrival_does_not_matter(turns: list[Turn], random: Any) -> None:
    shuffled = list(turns)
    random.shuffle(shuffled)
    assert merge(shuffled) == merge(turns)


@given(forests())
def test_a_split_index_is_where_the_prompt_departs_from_every_earlier_context(
    turns: list[Turn],
) -> None:
    by_name = {(t.call_id, t.choice): t for t in turns}
    for split in merge(turns).splits:
        t = by_name[split.call_id, split.choice]
        prompt = t.prompt_token_ids
        assert split.index < len(prompt)
        shared = [
            next(
                (n for n, (a, b) in enumerate(zip(prompt, context, strict=False)) if a != b),
                min(len(prompt), len(context)),
            )
            for other in turns
            if other.policy == t.policy and other.seq < t.seq
            for context in [other.prompt_token_ids + other.response_token_ids]
        ]
        assert split.index in shared


@pytest.mark.parametrize("drops_reasoning", [False, True])
def test_200_calls_to_100k_tokens_merge_in_seconds(drops_reasoning: bool) -> None:
    turns, prompt = [], list(range(500))
    for seq in range(1, 201):
        response = [seq * 7 + n for n in range(300)]
        turns.append(turn("t", prompt, response, seq=seq))
        prompt = [*prompt, *response[150 * drops_reasoning :], *range(200)]
    started = time.perf_counter()
    merged = merge(turns)
    elapsed = time.perf_counter() - started
    assert len(merged.rows) == (200 if drops_reasoning else 1)
    assert len(merged.splits) == (199 if drops_reasoning else 0)
    # Some 0.1 s on an idle core; a merge that copies contexts takes minutes.
    assert elapsed < 5
