"""What must not be trained on though its tokens are complete: how it was sampled says so.

A trainer divides by one temperature, and its importance ratios need the log-probabilities of the
distribution that was sampled from. What breaks either would be learned from without a sign.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence, Set
from typing import Any

from agl_core.errors import Invalid
from agl_core.interfaces import ExportOptions
from agl_core.records import Event, Rollout
from agl_core.tokens import attempt_events, untrainable_sampling
from agl_core.wire import unknown_key
from agl_verl.no_data import check_share

ALLOW_RAW = "allow_raw_sampling"
ALLOW_MIXED = "allow_mixed_temperature"
MAX_LENGTH = "max_length"
MAX_NO_DATA_SHARE = "max_no_data_share"
_CLAIMS = (ALLOW_RAW, ALLOW_MIXED)
_PARAMETERS = (*_CLAIMS, MAX_LENGTH, MAX_NO_DATA_SHARE)
_SELECTION = ("ids", "group_id", "policy", "mode")
_TEMPERATURES = "temperatures"
_SHARE = re.compile(r"[0-9]+(\.[0-9]+)?(e-?[0-9]{1,3})?", re.IGNORECASE)  # as JSON writes numbers


def check_parameters(options: ExportOptions) -> None:
    """Refuse parameters that are none of the formats'.

    Raises:
        Invalid: Naming the nearest that there is.
    """
    for name, value in options.parameters.items():
        if name not in _PARAMETERS:
            raise Invalid(unknown_key(name, (*_SELECTION, *_PARAMETERS)))
        if name in _CLAIMS and value not in ("true", "false"):
            raise Invalid(f"{name} is true or false, not {value!r}")
    max_length(options)
    no_data_share(options)


def max_length(options: ExportOptions) -> int | None:
    """Return how many tokens a triplet or a row may have; None: any number.

    Raises:
        Invalid: The parameter is no positive integer.
    """
    value = options.parameters.get(MAX_LENGTH)
    if value is None:
        return None
    length = int(value) if value.isascii() and value.isdecimal() and len(value) < 19 else 0
    if length < 1:
        raise Invalid(f"{MAX_LENGTH} is a positive number of tokens, not {value!r}")
    return length


def no_data_share(options: ExportOptions) -> float | None:
    """Return how many of the succeeded rollouts may have nothing to train on; None: all of them.

    Raises:
        Invalid: The parameter is no number between 0 and 1.
    """
    value = options.parameters.get(MAX_NO_DATA_SHARE)
    if value is None:
        return None
    if _SHARE.fullmatch(value) is None:
        raise Invalid(f"{MAX_NO_DATA_SHARE} is a number between 0 and 1, not {value!r}")
    share = float(value)
    check_share(share)
    return share


def check_sampling(
    rollout: Rollout, events: Sequence[Event], exported: Set[str], options: ExportOptions
) -> None:
    """Refuse the export where a call of a rollout cannot be trained on for its sampling.

    Validation is not trained on, so its rollouts may be sampled in any way.

    Args:
        rollout: Whose calls.
        events: Of the rollout.
        exported: Ids of the calls that its line has.
        options: Of the export.

    Raises:
        Invalid: Naming the call, the values, and the parameter that allows them all the same.
    """
    if rollout.mode != "train":
        return
    allows_raw = options.parameters.get(ALLOW_RAW) == "true"
    allows_mixed = options.parameters.get(ALLOW_MIXED) == "true"
    seen: dict[str, tuple[Any, str]] = options.state.setdefault(_TEMPERATURES, {})
    for event in attempt_events(rollout, events)[1]:
        data = event.data
        if event.event_type != "model_request" or data.get("call_id") not in exported:
            continue
        sampling: Mapping[str, Any] = data.get("sampling") or {}
        name = f"call {data.get('call_id')} of rollout {rollout.rollout_id!r}"
        problem = None if allows_raw else untrainable_sampling(sampling)
        if problem is not None:
            raise Invalid(
                f"{name} cannot be trained on: {problem}",
                hint=f"{ALLOW_RAW}=true exports it all the same",
            )
        temperature = sampling.get("temperature")
        first, first_name = seen.setdefault(str(data.get("policy")), (temperature, name))
        if temperature != first and not allows_mixed:
            raise Invalid(
                f"temperatures differ: {_said(temperature)} in {name}, "
                f"{_said(first)} in {first_name}; a batch has one",
                hint=f"export them apart, or with {ALLOW_MIXED}=true",
            )


def _said(temperature: Any) -> str:
    return "the server's own" if temperature is None else str(temperature)
