"""Turns as nodes of a forest, and the training rows cut from it (pure functions).

A turn continues another when its prompt starts with exactly that turn's prompt and response. The
parent is looked for over all turns of one attempt, longest context first, so neither the order of
arrival nor calls of sub-agents in between matter. The forest is cut into paths: each becomes a row,
each sampled token trains in exactly one of them, and all that stands before or between sampled
tokens is context.

Token ids are kept as packed little-endian int32. A response starts at a multiple of four bytes, so
a common prefix of bytes is a common prefix of ids, and comparing ids is a memory comparison that
copies nothing.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

from attrs import field, frozen

from agl_core.turns import ID_BYTES, Turn, unpack_ids

_CHUNK_BYTES = 16_384
_ROW_SAMPLING = ("temperature", "top_p", "top_k", "min_p")


@frozen(kw_only=True)
class RowTurn:
    """The part of a row that one turn sampled: ``token_ids[start:end]`` trains."""

    call_id: str
    choice: int
    start: int
    end: int
    version_spans: tuple[tuple[int, int], ...] | None
    """(first token, version), counted from this turn's first sampled token; see ``Turn.spans``."""
    reward: float | None
    finish_reason: str | None
    extras: Mapping[str, Any] = field(factory=dict)
    """What else the engine told of this turn's choice; see ``Turn.extras``."""


@frozen(kw_only=True)
class Row:
    """One sequence to train on: a path of turns, each of which extends the one before."""

    policy: str
    segment: int
    """Place among the rows of the attempt, by the time of their first turns, from 0."""
    weight: float
    """Trained tokens / trained tokens of all rows; the weights of an attempt sum to 1."""
    shared: int
    """Leading tokens that are, in part, trained in another row. Here they are context."""
    prompt_length: int
    """Tokens before the first trained one."""
    ids: bytes
    """All ids, packed little-endian int32, [tokens]."""
    logprobs: array[float]
    """Of the trained tokens alone, in order, float64, [trained_tokens]."""
    turns: tuple[RowTurn, ...]
    sampling: Mapping[str, Any]
    logprobs_mode: str | None
    media: tuple[str, ...]

    @property
    def token_ids(self) -> list[int]:
        return unpack_ids(self.ids)

    @property
    def trained_tokens(self) -> int:
        return len(self.logprobs)


@frozen(kw_only=True)
class Split:
    """A prompt that departs from what came before, and the index of the first differing token."""

    call_id: str
    choice: int
    index: int


@frozen(kw_only=True)
class Merged:
    """The rows of one attempt, by segment, and how its turns fell apart."""

    rows: tuple[Row, ...] = ()
    splits: tuple[Split, ...] = ()
    abandoned: int = 0
    """Turns that nothing extends while another turn with an equal prompt is extended."""
    too_long: int = 0
    """Turns of rows that were longer than allowed, and are therefore no rows."""


def merge(
    turns: Iterable[Turn], *, keep_abandoned: bool = True, max_length: int | None = None
) -> Merged:
    """Merge the turns of one attempt into rows.

    Lineages never cross a policy or an adapter, and a turn continues another only if it has the
    other's media first. A row has one temperature, top_p, top_k, min_p and logprobs mode: where
    these change, the lineage goes on in a new row whose beginning is context.

    Args:
        turns: Turns of a single attempt, in any order; those without a response are left out.
        keep_abandoned: Whether abandoned turns train. They are counted either way.
        max_length: Tokens that a row may have. A longer one is left out whole: a cut could go
            through an image's placeholders, and would train what led to an end that is not there.
    """
    lineages: dict[tuple[str, str | None], list[Turn]] = defaultdict(list)
    for turn in sorted(turns, key=_by_time):
        if turn.response:
            lineages[turn.policy, turn.adapter].append(turn)
    parents: dict[Turn, Turn | None] = {}
    splits: list[tuple[Turn, int]] = []
    abandoned: set[Turn] = set()
    for lineage in lineages.values():
        found = _find_parents(lineage)
        splits += _find_splits(lineage, found)
        abandoned |= _find_abandoned(lineage, found)
        parents |= found
    if not keep_abandoned:
        # They are leaves, so the rest of the forest stays as it is.
        parents = {turn: parent for turn, parent in parents.items() if turn not in abandoned}
    paths = _cut(parents)
    if max_length is not None:
        paths = [path for path in paths if path[-1].context_length <= max_length]
    training = {turn for path in paths for turn in path}
    trained = sum(turn.response_length for turn in training)
    return Merged(
        rows=tuple(
            _row(path, _training_ancestor(path[0], parents, training), n, trained)
            for n, path in enumerate(paths)
        ),
        splits=tuple(
            Split(call_id=turn.call_id, choice=turn.choice, index=index)
            for turn, index in sorted(splits, key=lambda split: _by_time(split[0]))
        ),
        abandoned=len(abandoned),
        too_long=len(parents) - len(training),
    )


def _by_time(turn: Turn) -> tuple[int, int]:
    return turn.seq, turn.choice


def _find_parents(lineage: Sequence[Turn]) -> dict[Turn, Turn | None]:
    """Find for each turn the one with the longest context that its prompt starts with.

    A parent's context is no longer than its child's prompt and a response is never empty, so
    contexts grow along every path: there are no cycles.
    """
    ordered = sorted(lineage, key=lambda turn: (-turn.context_length, -turn.seq, turn.choice))
    lengths = [-turn.context_length for turn in ordered]
    candidates = [(turn.response, len(turn.prompt), turn.prompt, turn) for turn in ordered]
    parents: dict[Turn, Turn | None] = {}
    for turn in lineage:
        starts_with = turn.prompt.startswith
        parents[turn] = None
        for at in range(bisect_left(lengths, -turn.prompt_length), len(candidates)):
            response, offset, prompt, candidate = candidates[at]
            # A wrong candidate mostly fails at the first bytes of its response, before its long
            # prompt is read.
            if (
                starts_with(response, offset)
                and starts_with(prompt)
                and turn.media[: len(candidate.media)] == candidate.media
            ):
                parents[turn] = candidate
                break
    return parents


def _find_splits(
    lineage: Sequence[Turn], parents: Mapping[Turn, Turn | None]
) -> list[tuple[Turn, int]]:
    """Find the turns whose prompt departs from what came before, with the first differing index.

    Without a parent, a turn departs from the earlier context with which it has most in common,
    unless its prompt lies wholly inside of it: that is a root. With a parent it departs where its
    prompt repeats an earlier prompt that is longer than the parent's context and then differs from
    what was sampled there.
    """
    splits = []
    for position, turn in enumerate(lineage):
        parent = parents[turn]
        best = -1 if parent is None else parent.context_length
        found = False
        # The latest context mostly shares most; one that could not share more is not compared.
        for earlier in reversed(lineage[:position]):
            if earlier.seq == turn.seq or not _may_share_more(turn.prompt, earlier, best):
                continue
            if parent is not None and not turn.prompt.startswith(earlier.prompt):
                continue
            common = _common_length(turn.prompt, earlier)
            if common > best:
                best, found = common, True
        if found and best < turn.prompt_length:
            splits.append((turn, best))
    return splits


def _may_share_more(prompt: bytes, earlier: Turn, best: int) -> bool:
    """Tell cheaply whether a context could share more than ``best`` tokens with a prompt."""
    if best < 0:
        return True
    at = best * ID_BYTES
    behind = at - len(earlier.prompt)
    if behind >= 0:
        token = earlier.response[behind : behind + ID_BYTES]
    else:
        token = earlier.prompt[at : at + ID_BYTES]
    return bool(token) and token == prompt[at : at + ID_BYTES]


def _common_length(prompt: bytes, earlier: Turn) -> int:
    """Count the leading tokens that a prompt has in common with a turn's context."""
    common = _common_bytes(prompt, earlier.prompt, 0)
    if common == len(earlier.prompt):
        common += _common_bytes(prompt, earlier.response, common)
    return common // ID_BYTES


def _common_bytes(left: bytes, right: bytes, offset: int) -> int:
    """Count the leading bytes that ``left[offset:]`` and ``right`` have in common."""
    limit = min(len(left) - offset, len(right))
    low = 0
    while low < limit:
        high = min(low + _CHUNK_BYTES, limit)
        if left[offset + low : offset + high] != right[low:high]:
            break
        low = high
    else:
        return limit
    # The first difference is in [low, high).
    while high - low > 1:
        middle = (low + high) // 2
        if left[offset + low : offset + middle] == right[low:middle]:
            low = middle
        else:
            high = middle
    return low


def _find_abandoned(
    lineage: Sequence[Turn], parents: Mapping[Turn, Turn | None]
) -> frozenset[Turn]:
    extended = {parent for parent in parents.values() if parent is not None}
    same_length: dict[tuple[int, tuple[str, ...]], list[Turn]] = defaultdict(list)
    for turn in lineage:
        same_length[len(turn.prompt), turn.media].append(turn)
    abandoned: set[Turn] = set()
    for turns in same_length.values():
        # Hashing a long prompt costs more than all the rest, and most have no equal in length.
        if len(turns) > 1:
            prompts = {turn.prompt for turn in turns if turn in extended}
            abandoned |= {t for t in turns if t not in extended and t.prompt in prompts}
    return frozenset(abandoned)


def _cut(parents: Mapping[Turn, Turn | None]) -> list[list[Turn]]:
    """Cut the forest into paths, by the time of their first turns.

    The child with most sampled tokens in and below it goes on with its parent's path, of equal ones
    the earlier.
    """
    children: dict[Turn, list[Turn]] = defaultdict(list)
    below = {turn: turn.response_length for turn in parents}
    for turn in sorted(parents, key=lambda turn: -turn.context_length):
        parent = parents[turn]
        if parent is not None:
            children[parent].append(turn)
            below[parent] += below[turn]
    following: dict[Turn, Turn] = {}
    for turn, candidates in children.items():
        alike = [child for child in candidates if _row_sampling(child) == _row_sampling(turn)]
        if alike:
            following[turn] = min(alike, key=lambda child: (-below[child], *_by_time(child)))
    heads = parents.keys() - set(following.values())
    paths = []
    for head in sorted(heads, key=_by_time):
        path = [head]
        while (turn := path[-1]) in following:
            path.append(following[turn])
        paths.append(path)
    return paths


def _training_ancestor(
    turn: Turn, parents: Mapping[Turn, Turn | None], training: Set[Turn]
) -> Turn | None:
    """Find the nearest turn above one that trains; those of a row left out do not."""
    ancestor = parents[turn]
    while ancestor is not None and ancestor not in training:
        ancestor = parents[ancestor]
    return ancestor


def _row_sampling(turn: Turn) -> tuple[Any, ...]:
    return (turn.logprobs_mode, *(turn.sampling.get(name) for name in _ROW_SAMPLING))


def _row(path: Sequence[Turn], parent: Turn | None, segment: int, trained: int) -> Row:
    first, last = path[0], path[-1]
    logprobs = array("d")
    for turn in path:
        logprobs.extend(turn.logprobs)
    return Row(
        policy=first.policy,
        segment=segment,
        weight=len(logprobs) / trained,
        shared=0 if parent is None else parent.context_length,
        prompt_length=first.prompt_length,
        ids=last.prompt + last.response,
        logprobs=logprobs,
        turns=tuple(
            RowTurn(
                call_id=turn.call_id,
                choice=turn.choice,
                start=turn.prompt_length,
                end=turn.context_length,
                version_spans=turn.spans,
                reward=turn.reward,
                finish_reason=turn.finish_reason,
                extras=turn.extras,
            )
            for turn in path
        ),
        sampling=first.sampling,
        logprobs_mode=first.logprobs_mode,
        media=last.media,
    )
