"""A Job that tries what an agent needs: its image, a node, and the way to the service."""

from __future__ import annotations

import asyncio
import copy
import logging
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from agl_core.clock import Clock
from agl_core.errors import AglError
from agl_core.interfaces import Finding, Work
from agl_k8s.api import KubeApi
from agl_k8s.config import K8sConfig
from agl_k8s.errors import KubeError, kind_of
from agl_k8s.layers import MAIN, without_dollar
from agl_k8s.manifest import build_secret
from agl_k8s.names import ROLLOUT_LABEL
from agl_k8s.verdict import Ending, judge_pod, why_no_pod, why_waiting

log = logging.getLogger(__name__)

POLL_SECONDS = 0.5
DELETE_SECONDS = 30.0
TTL_SECONDS = 300
# Nothing in the image can speak HTTP.
NO_TOOL_CODE = 42
# A pull that fails is tried a few times by the kubelet: what it says at first may pass.
CONFIG_SECONDS = 15.0
LOG_BYTES = 2000
# Kinds of errors after which something may have been done nevertheless.
_UNSURE = ("busy", "unreachable")

# $0 is the URL; $1 to $3 are its host, port and path where it is plain HTTP, all that bash speaks.
_SCRIPT = f"""\
by_bash() {{
  limit=
  command -v timeout >/dev/null 2>&1 && limit='timeout 10'
  $limit bash -c '
    exec 3<>"/dev/tcp/$0/$1" || exit
    printf "GET %s HTTP/1.0\\r\\nHost: %s:%s\\r\\n\\r\\n" "$2" "$0" "$1" >&3
    read -r -t 10 version status rest <&3
    [ "$status" = 200 ] || {{ echo "answered $version $status $rest"; exit 1; }}
  ' "$@"
}}
for tool in curl wget python3 python node bash; do
  [ "$tool" = bash ] && [ $# = 0 ] && continue
  command -v "$tool" >/dev/null 2>&1 || continue
  case "$tool" in
    curl) curl -fsS -m 10 -o /dev/null "$0" ;;
    wget) wget -q -T 10 -O /dev/null "$0" ;;
    python*) "$tool" -c '
import sys, urllib.request
try:
    urllib.request.urlopen(sys.argv[1], None, 10)
except OSError as exc:
    sys.exit(str(exc))
' "$0" ;;
    node) node -e 'fetch(process.argv[1]).then(r => process.exit(r.ok ? 0 : 1))' "$0" ;;
    bash) by_bash "$@" ;;
  esac && {{ echo "reached with $tool"; exit 0; }}
  echo "not reached with $tool"
  exit 1
done
exit {NO_TOOL_CODE}
"""


async def probe(
    api: KubeApi, clock: Clock, config: K8sConfig, work: Work, job: Mapping[str, Any]
) -> Finding:
    """Run the probe and take it away again, whatever becomes of it.

    Args:
        api: Of the cluster.
        clock: Waits.
        config: The runner's settings.
        work: The rollout that the Job is of; its time-out is how long the probe may take.
        job: Its manifest, as a rollout's.
    """
    url = f"{work.agent_url.rstrip('/')}/healthz"
    seconds = work.rollout.config.timeout_seconds or 120.0
    manifest = _manifest(job, url, seconds)
    creation = asyncio.ensure_future(api.create("jobs", manifest))
    try:
        # To cancel the request would leave open whether there is a Job to delete.
        made = await asyncio.shield(creation)
        secret = build_secret(made, work)
        secret["metadata"]["name"] = job["metadata"]["name"]  # as its pod asks for
        await api.create("secrets", secret)
        return await _await_end(api, clock, config, made, url, seconds)
    except KubeError as exc:
        told = "" if _may_exist(creation) else "no Job can be created: "
        return _finding("failed", f"{told}{exc.message}", exc.hint)
    finally:
        await asyncio.shield(_remove(api, clock, creation, manifest["metadata"]["name"]))


def _manifest(job: Mapping[str, Any], url: str, seconds: float) -> dict[str, Any]:
    """The rollout's Job with another command.

    Its name tells controllers that it is none of theirs, though its labels are, by which
    NetworkPolicies know agents.
    """
    made: dict[str, Any] = copy.deepcopy(dict(job))
    made["metadata"]["name"] = f"agl-doctor-{job['metadata']['name'][-14:]}"
    spec = made["spec"]
    spec["backoffLimit"] = 0
    spec["ttlSecondsAfterFinished"] = TTL_SECONDS
    # The backstop of one that nobody takes away; it may wait in a queue before.
    spec["template"]["spec"]["activeDeadlineSeconds"] = max(1, round(seconds))
    for container in spec["template"]["spec"]["containers"]:
        if container["name"] == MAIN:
            arguments = [_SCRIPT, url, *_plain_parts(url)]
            container["command"] = ["sh", "-c", *map(without_dollar, arguments)]
            container.pop("args", None)
    return made


def _plain_parts(url: str) -> tuple[str, ...]:
    """Host, port and path of a URL of plain HTTP; nothing of any other."""
    parts = urlsplit(url)
    if parts.scheme != "http" or parts.hostname is None:
        return ()
    return parts.hostname, str(parts.port or 80), parts.path


async def _await_end(
    api: KubeApi, clock: Clock, config: K8sConfig, job: Mapping[str, Any], url: str, seconds: float
) -> Finding:
    due = clock.monotonic() + seconds
    stuck_since: float | None = None
    while True:
        pod = await _pod_of(api, job)
        waiting = None
        if pod is not None:
            ending = judge_pod(pod, asked=None, is_gone=False, has_word=False, now=clock.now())
            if ending is not None:
                return await _tell_end(api, pod, ending, url)
            waiting = why_waiting(pod, clock.now())
        now = clock.monotonic()
        if waiting is not None and waiting.is_config:
            stuck_since = stuck_since or now
            if now - stuck_since > min(CONFIG_SECONDS, config.start_grace_seconds):
                message = f"the pod cannot start: {waiting.code}: {waiting.message}"
                return _finding("failed", message, None)
        else:
            stuck_since = None
        if now > due:
            if waiting is not None:
                message = f"no start in {seconds:g} s: {waiting.code}: {waiting.message}"
                return _finding("failed", message, "see what the cluster lacks, or allow more time")
            if pod is not None:
                return _finding("failed", f"the probe did not end in {seconds:g} s", None)
            return await _tell_no_pod(api, job, seconds)
        if pod is None and (refused := await _refusal(api, job)) is not None:
            return _finding("failed", f"no pod can be created: {refused}", None)
        await clock.sleep(POLL_SECONDS)


async def _tell_end(api: KubeApi, pod: Mapping[str, Any], ending: Ending, url: str) -> Finding:
    node = pod.get("spec", {}).get("nodeName")
    if ending.phase == "succeeded":
        return _finding("ok", f"the image runs on {node} and reaches {url}", None)
    if ending.exit_code == NO_TOOL_CODE:
        message = f"the image runs on {node}, but has nothing that could try {url}"
        return _finding("warning", message, "try it from an image with curl: --image")
    if ending.reason == "config":
        if "cannot start" in ending.message:
            return _finding(
                "warning",
                f"the image is on {node}, but has no shell to try {url} with",
                "try it from an image with a shell and curl: --image",
            )
        return _finding("failed", ending.message, None)
    if ending.reason != "agent":
        return _finding("failed", ending.message, None)
    text = await _log_of(api, pod)
    return _finding(
        "failed",
        f"{url} is not reached from a pod on {node}: {text or ending.message}",
        "set controller.agent_url to what pods can reach; a NetworkPolicy or a proxy may be "
        "in the way",
    )


async def _tell_no_pod(api: KubeApi, job: Mapping[str, Any], seconds: float) -> Finding:
    found = await api.get("jobs", job["metadata"]["name"])
    if found.get("spec", {}).get("suspend"):
        return _finding(
            "warning",
            f"the Job waited in its queue for {seconds:g} s",
            "look at Kueue's workloads, or allow more time with --timeout",
        )
    return _finding("failed", f"no pod was created in {seconds:g} s", "is the Job controller up?")


async def _refusal(api: KubeApi, job: Mapping[str, Any]) -> str | None:
    """Why the Job controller cannot create the pod."""
    selector = f"involvedObject.uid={job['metadata']['uid']}"
    refused = why_no_pod((await api.list("events", field_selector=selector)).items)
    return None if refused is None else refused.message


async def _pod_of(api: KubeApi, job: Mapping[str, Any]) -> dict[str, Any] | None:
    label = job["metadata"]["labels"][ROLLOUT_LABEL]
    found = await api.list("pods", label_selector=f"{ROLLOUT_LABEL}={label}")
    return found.items[0] if found.items else None


async def _log_of(api: KubeApi, pod: Mapping[str, Any]) -> str:
    try:
        raw = await api.log_tail(pod["metadata"]["name"], MAIN, lines=5, size_bytes=LOG_BYTES)
    except AglError:
        return ""
    return " / ".join((raw or b"").decode(errors="replace").split("\n")).strip(" /")


def _may_exist(creation: asyncio.Future[dict[str, Any]]) -> bool:
    """Whether there may be a Job: only a refusal says that there is none."""
    error = creation.exception()
    return not isinstance(error, KubeError) or kind_of(error) in _UNSURE


async def _remove(
    api: KubeApi, clock: Clock, creation: asyncio.Future[dict[str, Any]], name: str
) -> None:
    """Delete the Job, also one of which only the name is known: it is nobody else's."""
    await asyncio.wait([creation])
    if not _may_exist(creation):
        return
    uid = None if creation.exception() else creation.result()["metadata"]["uid"]
    try:
        async with asyncio.timeout(DELETE_SECONDS):
            await _delete(api, clock, name, uid)
    except (KubeError, TimeoutError) as exc:
        # Its TTL does it in the end.
        log.warning("the probe's Job was not deleted", extra={"job": name, "problem": str(exc)})


async def _delete(api: KubeApi, clock: Clock, name: str, uid: str | None) -> None:
    while True:
        try:
            await api.delete("jobs", name, propagation="Foreground", uid=uid)
        except KubeError as exc:
            if kind_of(exc) not in _UNSURE:
                raise
            await clock.sleep(POLL_SECONDS)
        else:
            return


def _finding(status: Any, message: str, hint: str | None) -> Finding:
    return Finding(subject="probe", status=status, message=message, hint=hint)
