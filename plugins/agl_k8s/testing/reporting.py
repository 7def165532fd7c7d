"""Conditions and Events, as the parts of a cluster write them."""

from __future__ import annotations

import uuid
from typing import Any

from agl_k8s.testing.kinds import Object
from agl_k8s.testing.objects import ObjectStore

FINAL_PHASES = ("Succeeded", "Failed")


def set_condition(
    status: Object, name: str, value: str, time: str, *, reason: str = "", message: str = ""
) -> None:
    """Set one condition; its transition time moves only where its value does."""
    conditions = status.setdefault("conditions", [])
    present = next((c for c in conditions if c["type"] == name), None)
    if present is None:
        present = {"type": name}
        conditions.append(present)
    if present.get("status") != value:
        present["lastTransitionTime"] = time
    present["status"] = value
    for part, text in (("reason", reason), ("message", message)):
        if text:
            present[part] = text
        else:
            present.pop(part, None)


def condition_of(item: Object, name: str) -> Object:
    """A condition of an object; empty where it has none of that name."""
    conditions = (item.get("status") or {}).get("conditions") or ()
    return next((c for c in conditions if c["type"] == name), {})


def is_met(item: Object, name: str) -> bool:
    return condition_of(item, name).get("status") == "True"


def is_over(pod: Object) -> bool:
    """Whether a pod's phase is one of the last."""
    return (pod.get("status") or {}).get("phase") in FINAL_PHASES


def disrupt(store: ObjectStore, pod: Object, reason: str, message: str, **status: Any) -> None:
    """Give a pod the condition that says the cluster, not the agent, ends it."""

    def change(item: Object) -> None:
        set_condition(
            item["status"],
            "DisruptionTarget",
            "True",
            store.time(),
            reason=reason,
            message=message,
        )
        item["status"].update(status)

    metadata = pod["metadata"]
    store.update("pods", metadata["namespace"], metadata["name"], change)


def post_event(
    store: ObjectStore, about: Object, type_: str, reason: str, message: str, component: str
) -> None:
    """Write an Event; repeated ones are not put together."""
    metadata, time = about["metadata"], store.time()
    namespace = metadata.get("namespace", "default")
    store.create(
        "events",
        namespace,
        {
            "metadata": {"name": f"{metadata['name']}.{uuid.uuid4().hex[:16]}"},
            "involvedObject": {
                "kind": about["kind"],
                "apiVersion": about["apiVersion"],
                "namespace": namespace,
                "name": metadata["name"],
                "uid": metadata["uid"],
            },
            "type": type_,
            "reason": reason,
            "message": message,
            "source": {"component": component},
            "reportingComponent": component,
            "firstTimestamp": time,
            "lastTimestamp": time,
            "count": 1,
        },
    )
