"""Names, labels and annotations of what we make on a cluster."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from typing import Any

MANAGED_BY_LABEL = "app.kubernetes.io/managed-by"
MANAGED_BY = "agl-lite"
OWN_PREFIX = "agl-lite/"
INSTANCE_LABEL = "agl-lite/instance"
ROLLOUT_LABEL = "agl-lite/rollout-id"
ROLLOUT_ANNOTATION = "agl-lite/rollout-id"
TIMEOUT_ANNOTATION = "agl-lite/timeout-seconds"
SPEC_ANNOTATION = "agl-lite/spec-hash"

SLUG_LENGTH = 40
HASH_LENGTH = 14
LABEL_LENGTH = 63

_NOT_IN_NAMES = re.compile(r"[^a-z0-9]+")
_LABEL_VALUE = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?\Z")


def job_name(rollout_id: str) -> str:
    """The name of a rollout's Job: a DNS label of at most 57 characters, distinct for each id.

    A pod's name adds six characters to it, and is cut by Kubernetes beyond 63.
    """
    slug = _NOT_IN_NAMES.sub("-", rollout_id.lower())[:SLUG_LENGTH].strip("-")
    digest = _digest(rollout_id)
    return f"r-{slug}-{digest}" if slug else f"r-{digest}"


def label_value(rollout_id: str) -> str:
    """The id where it may be the value of a label, else one that stands for it."""
    if _LABEL_VALUE.match(rollout_id):
        return rollout_id
    return job_name(rollout_id)


def selector(instance: str) -> str:
    """Selects the Jobs and pods of one service."""
    return f"{MANAGED_BY_LABEL}={MANAGED_BY},{INSTANCE_LABEL}={instance}"


def rollout_id_of(obj: Mapping[str, Any]) -> str | None:
    """The rollout that a Job or pod was made for; None: it is none of ours."""
    metadata = obj.get("metadata", {})
    if metadata.get("labels", {}).get(MANAGED_BY_LABEL) != MANAGED_BY:
        return None
    found = metadata.get("annotations", {}).get(ROLLOUT_ANNOTATION)
    return found if isinstance(found, str) else None


def _digest(rollout_id: str) -> str:
    return hashlib.sha256(rollout_id.encode()).hexdigest()[:HASH_LENGTH]
