"""What a pod does instead of running its command: ends that a local process cannot show.

A script stands for the pod's main container (the one called ``agent``, else the first); init
containers and sidecars are not run then.
"""

from __future__ import annotations

from collections.abc import Callable

from attrs import frozen

from agl_k8s.testing.kinds import Object

AGENT = "agent"
SIGTERM_CODE = 143
SIGKILL_CODE = 137


@frozen
class Wait:
    """Why a container does not start."""

    reason: str
    message: str


@frozen(kw_only=True)
class Script:
    """One behaviour; the functions below make the usual ones."""

    after_seconds: float | None = 0.0
    """How long the container runs; None: until it is ended."""
    exit_code: int = 0
    reason: str | None = None
    """Of the container's end; from the exit code where it is None."""
    log: bytes = b""
    code_on_term: int | None = SIGTERM_CODE
    """What SIGTERM makes it exit with; None: nothing does but SIGKILL."""
    waits: tuple[Wait, ...] = ()
    """It never starts, and shows these in turns."""
    turn_seconds: float = 0.05
    """How long each of them shows."""
    event: Wait | None = None
    """A warning about the pod, written when it waits."""
    evicted: str | None = None
    """The kubelet evicts the pod at the end, with this message."""
    unschedulable: str | None = None
    """The scheduler finds no node for it, with this message."""


ScriptFor = Callable[[Object], Script | None]


def exits(code: int = 0, *, after_seconds: float = 0.0, log: bytes = b"") -> Script:
    """Writes a log and exits."""
    return Script(exit_code=code, after_seconds=after_seconds, log=log)


def oom_killed(code: int = SIGKILL_CODE, *, after_seconds: float = 0.0) -> Script:
    """Goes over its memory; ``code`` is the parent's own where only a child was killed."""
    return Script(exit_code=code, after_seconds=after_seconds, reason="OOMKilled")


def hangs(*, log: bytes = b"") -> Script:
    """Runs until it is told to end."""
    return Script(after_seconds=None, log=log)


def hangs_deaf(*, log: bytes = b"") -> Script:
    """Runs until it is killed."""
    return Script(after_seconds=None, log=log, code_on_term=None)


def hangs_politely(*, log: bytes = b"") -> Script:
    """Exits 0 when it is told to end."""
    return Script(after_seconds=None, log=log, code_on_term=0)


def waits(reason: str, message: str = "") -> Script:
    """Never starts."""
    return Script(waits=(Wait(reason, message),))


def cannot_pull(*, turn_seconds: float = 0.05) -> Script:
    """Its image does not exist: the reason flips between two."""
    image = '"nowhere.invalid/agent:1"'
    turns = (
        Wait("ErrImagePull", f"failed to pull and unpack image {image}: not found"),
        Wait("ImagePullBackOff", f"Back-off pulling image {image}: ErrImagePull: not found"),
    )
    return Script(waits=turns, turn_seconds=turn_seconds)


def has_invalid_image() -> Script:
    text = 'Failed to apply default image tag "A B": couldn\'t parse image name "A B"'
    return waits("InvalidImageName", text)


def lacks_configuration() -> Script:
    return waits("CreateContainerConfigError", 'secret "missing" not found')


def cannot_mount() -> Script:
    """A volume's secret is missing, which only an Event says."""
    text = 'MountVolume.SetUp failed for volume "data" : secret "missing" not found'
    return Script(waits=(Wait("ContainerCreating", ""),), event=Wait("FailedMount", text))


def evicted_by_storage(*, after_seconds: float = 0.0) -> Script:
    """Writes more than its own limit of ephemeral storage."""
    return Script(
        after_seconds=after_seconds,
        exit_code=SIGKILL_CODE,
        reason="ContainerStatusUnknown",
        evicted="Pod ephemeral local storage usage exceeds the total limit of containers 10Mi. ",
    )


def never_scheduled(
    message: str = "0/1 nodes are available: 1 Insufficient cpu. preemption: 0/1 nodes are "
    "available: 1 No preemption victims found for incoming pod.",
) -> Script:
    return Script(unschedulable=message)


class ScriptBook:
    """Remembers what was chosen for each pod, so that each is asked for once.

    Attributes:
        choose: Says what a pod does; None for one that runs its command.
    """

    def __init__(self, choose: ScriptFor | None = None) -> None:
        self.choose = choose
        self._chosen: dict[str, Script | None] = {}

    def of(self, pod: Object) -> Script | None:
        uid = pod["metadata"]["uid"]
        if uid not in self._chosen:
            self._chosen[uid] = self.choose(pod) if self.choose is not None else None
        return self._chosen[uid]
