"""What the kubelet does for one pod, from its start to its end."""

from __future__ import annotations

import asyncio
import itertools
import shutil
from typing import TYPE_CHECKING, Any

from agl_k8s.testing.containers import (
    Container,
    Exit,
    ScriptedContainer,
    last_words,
    start_process,
)
from agl_k8s.testing.kinds import Object, Objects
from agl_k8s.testing.pod_env import (
    CannotConfigureError,
    command_of,
    image_variables,
    variables_of,
)
from agl_k8s.testing.reporting import is_over, post_event, set_condition
from agl_k8s.testing.scripts import Script

if TYPE_CHECKING:
    from agl_k8s.testing.node import Kubelet

NEVER = "1970-01-01T00:00:00Z"
_DEADLINE = "Pod was active on the node longer than the specified deadline"


class PodWorker:
    """Runs the containers of a pod, and reports.

    Args:
        node: Where it runs.
        pod: As it was bound to the node.
    """

    def __init__(self, node: Kubelet, pod: Object) -> None:
        self._node = node
        self._pod = pod
        self._uid: str = pod["metadata"]["uid"]
        self._key = ("pods", pod["metadata"]["namespace"], pod["metadata"]["name"])
        spec = pod["spec"]
        self._mains: Objects = spec["containers"]
        self._inits: Objects = spec.get("initContainers") or []
        self._sidecars = {c["name"] for c in self._inits if c.get("restartPolicy") == "Always"}
        waiting = "PodInitializing" if self._inits else "ContainerCreating"
        self._states: dict[str, Object] = {
            container["name"]: {"waiting": {"reason": waiting}}
            for container in (*self._inits, *self._mains)
        }
        self._containers: dict[str, Container] = {}
        self._status: Object = {"phase": "Pending", "conditions": []}
        self._fate: tuple[str, str] | None = None
        self._ending = asyncio.Event()
        self._grace = float("inf")
        self._is_killed = False

    def start(self) -> None:
        self._node.background.spawn(self._run())
        seconds = self._pod["spec"].get("activeDeadlineSeconds")
        if seconds is not None:
            limit = seconds * self._node.timings.deadline_scale
            self._node.background.spawn(self._keep_deadline(limit))

    def end(self, grace_seconds: float) -> None:
        """Let the pod end, within a grace that later calls can only shorten."""
        if grace_seconds >= self._grace:
            return
        self._grace = grace_seconds
        is_first = not self._ending.is_set()
        self._ending.set()
        for name, container in self._containers.items():
            if is_first and name not in self._sidecars:
                container.terminate()
        if grace_seconds <= 0:
            self._kill_all()
        else:
            self._node.background.spawn(self._kill_later(grace_seconds))

    def evict(self, message: str, *, is_own_fault: bool) -> None:
        """End the pod because it, or the node, uses too much."""
        if is_over({"status": self._status}):
            return
        self._fate = ("Evicted", message)
        if not is_own_fault:
            self._condition("DisruptionTarget", "True", "TerminationByKubelet", message)
        self.end(0)

    async def kill(self) -> None:
        """End every process at once, and wait until they are gone."""
        self._ending.set()
        self._kill_all()
        await asyncio.gather(*(container.wait() for container in self._containers.values()))

    def remove_files(self) -> None:
        shutil.rmtree(self._node.root / self._uid, ignore_errors=True)

    def read_log(self, container: str) -> bytes | None:
        """None: it has none."""
        found = self._containers.get(container)
        return None if found is None else found.read_log()

    def is_running(self, container: str) -> bool:
        return "running" in self._states.get(container, {})

    def report(self) -> None:
        """Write the status to the API, if the kubelet runs and the pod is there still."""
        if not self._node.is_up.is_set():
            return
        own = self._compose()

        def change(item: Object) -> None:
            if item["metadata"]["uid"] != self._uid or (is_over(item) and not is_over(self._own)):
                return
            status = item["status"]
            status.update({name: value for name, value in own.items() if name != "conditions"})
            for c in own["conditions"]:
                set_condition(
                    status,
                    c["type"],
                    c["status"],
                    c["lastTransitionTime"],
                    reason=c.get("reason", ""),
                    message=c.get("message", ""),
                )

        if self._node.store.peek(self._key) is not None:
            self._node.store.update(*self._key, change)

    # -- The life of a pod ------------------------------------------------------------------------

    async def _run(self) -> None:
        self._status |= {
            "startTime": self._now(),
            "hostIP": "127.0.0.1",
            "podIP": "127.0.0.1",
            "podIPs": [{"ip": "127.0.0.1"}],
        }
        self._condition("PodReadyToStartContainers", "True")
        if not self._inits:
            self._condition("Initialized", "True")
        self.report()
        script = self._node.scripts.of(self._pod)
        if script is not None:
            await self._run_script(script)
        else:
            await self._run_containers()
        await self._finish()

    async def _run_containers(self) -> None:
        if not await self._mount():
            return
        for container in self._inits:
            if not await self._start(container):
                break
            if container["name"] in self._sidecars:
                continue
            if (await self._wait(container)).code:
                break
        else:
            if self._inits:
                self._condition("Initialized", "True")
            await asyncio.gather(*(self._run_main(container) for container in self._mains))
        await self._end_sidecars()

    async def _run_main(self, container: Object) -> None:
        if await self._start(container):
            await self._wait(container)

    async def _run_script(self, script: Script) -> None:
        if script.event is not None:
            reason, text = script.event.reason, script.event.message
            post_event(self._node.store, self._pod, "Warning", reason, text, "kubelet")
        for wait in itertools.cycle(script.waits):
            await self._node.is_up.wait()
            for container in self._mains:
                self._hold(container["name"], wait.reason, wait.message)
            if len(script.waits) == 1:
                await self._ending.wait()
            if await self._node.background.wait_for(self._ending, script.turn_seconds):
                return
        for container in self._mains:
            self._add(container["name"], ScriptedContainer(script, self._node.clock))
        self.report()
        await asyncio.gather(*(self._wait(container) for container in self._mains))
        if script.evicted is not None and not self._ending.is_set():
            self._fate = ("Evicted", script.evicted)

    async def _finish(self) -> None:
        await self._node.is_up.wait()
        await self._node.clock.sleep(self._node.timings.phase_delay_seconds)
        await self._node.is_up.wait()
        ends = [self._states[c["name"]].get("terminated") for c in self._mains]
        has_succeeded = all(end is not None and end["exitCode"] == 0 for end in ends)
        self._status["phase"] = "Succeeded" if has_succeeded and not self._fate else "Failed"
        if self._fate is not None:
            self._status["reason"], self._status["message"] = self._fate
        self.report()
        pod = self._node.store.peek(self._key)
        is_here = pod is not None and pod["metadata"]["uid"] == self._uid
        if pod is not None and is_here and "deletionTimestamp" in pod["metadata"]:
            self._node.store.delete(*self._key, uid=self._uid, grace_seconds=0)

    async def _keep_deadline(self, seconds: float) -> None:
        await self._node.clock.sleep(seconds)
        await self._node.is_up.wait()
        has_ended = all("terminated" in self._states[c["name"]] for c in self._mains)
        if not has_ended and not self._ending.is_set():
            self._fate = ("DeadlineExceeded", _DEADLINE)
            self.end(self._pod["spec"]["terminationGracePeriodSeconds"])

    # -- Containers -------------------------------------------------------------------------------

    async def _mount(self) -> bool:
        """Wait until the Secrets of all volumes are there; False: the pod ends first."""
        is_told = False
        while missing := self._missing_secret():
            if not is_told:
                text = (
                    f'MountVolume.SetUp failed for volume "{missing[0]}" : '
                    f'secret "{missing[1]}" not found'
                )
                store = self._node.store
                post_event(store, self._pod, "Warning", "FailedMount", text, "kubelet")
                is_told = True
            if await self._pause():
                return False
        return True

    def _missing_secret(self) -> tuple[str, str] | None:
        namespace = self._key[1]
        for volume in self._pod["spec"].get("volumes") or ():
            sources = [volume, *((volume.get("projected") or {}).get("sources") or ())]
            for source in sources:
                secret = source.get("secret") or {}
                name = secret.get("secretName") or secret.get("name")
                if not name or secret.get("optional"):
                    continue
                if self._node.store.peek(("secrets", namespace, name)) is None:
                    return volume["name"], name
        return None

    async def _start(self, container: Object) -> bool:
        """Start a container as soon as it can be; False: the pod ends first."""
        name = container["name"]
        while True:
            await self._node.is_up.wait()
            if self._ending.is_set():
                return False
            try:
                own = variables_of(self._node.store, self._present(), container)
                break
            except CannotConfigureError as exc:
                self._hold(name, "CreateContainerConfigError", str(exc))
            await self._pause()
        root = self._node.root / self._uid
        folder, home, log = root / "work", root / "homes" / name, root / "logs" / f"{name}.log"
        for path in (folder, home, log.parent):
            path.mkdir(parents=True, exist_ok=True)
        variables = image_variables(self._pod, str(home)) | own
        command = command_of(container, own)
        starting = asyncio.ensure_future(
            start_process(command, variables, folder=folder, home=home, log=log)
        )
        try:
            await asyncio.shield(starting)
        finally:  # a cancelled start would leave children that nobody knows of
            self._add(name, await starting)
        self.report()
        return True

    def _add(self, name: str, container: Container) -> None:
        self._containers[name] = container
        self._states[name] = {"running": {"startedAt": self._now()}}
        if self._is_killed:
            container.kill()
        elif self._ending.is_set():
            container.terminate()

    async def _wait(self, container: Object) -> Exit:
        """Wait for the end of a container and note it."""
        name = container["name"]
        started_at = self._states[name].get("running", {}).get("startedAt", NEVER)
        end = await self._containers[name].wait()
        state: dict[str, Any] = {
            "exitCode": end.code,
            "reason": end.reason,
            "startedAt": started_at if end.has_run else NEVER,
            "finishedAt": self._now(),
            "containerID": self._container_id(name),
        }
        message = end.message
        if end.code and container.get("terminationMessagePolicy") == "FallbackToLogsOnError":
            message = message or last_words(self._containers[name].read_log())
        if message:
            state["message"] = message
        self._states[name] = {"terminated": state}
        if any("running" in state for state in self._states.values()):
            self.report()  # the last one shows together with the phase
        return end

    async def _end_sidecars(self) -> None:
        running = [c for c in self._inits if c["name"] in self._sidecars & {*self._containers}]
        for container in reversed(running):
            self._containers[container["name"]].terminate()
        if running:
            grace = self._pod["spec"]["terminationGracePeriodSeconds"]
            timer = self._node.background.spawn(self._kill_later(grace))
            await asyncio.gather(*(self._wait(container) for container in running))
            timer.cancel()

    async def _kill_later(self, seconds: float) -> None:
        await self._node.clock.sleep(seconds)
        await self._node.is_up.wait()
        self._kill_all()

    def _kill_all(self) -> None:
        self._is_killed = True
        for container in self._containers.values():
            container.kill()

    async def _pause(self) -> bool:
        """Wait a moment before another look; True: the pod ends."""
        seconds = self._node.timings.retry_seconds
        is_ending = await self._node.background.wait_for(self._ending, seconds)
        await self._node.is_up.wait()
        return is_ending

    # -- Status -----------------------------------------------------------------------------------

    def _hold(self, name: str, reason: str, message: str) -> None:
        waiting = {"reason": reason} | ({"message": message} if message else {})
        if self._states[name] != {"waiting": waiting}:
            self._states[name] = {"waiting": waiting}
            self.report()

    def _condition(self, name: str, value: str, reason: str = "", message: str = "") -> None:
        set_condition(self._status, name, value, self._now(), reason=reason, message=message)

    @property
    def _own(self) -> Object:
        return {"status": self._status}

    def _compose(self) -> Object:
        """The status as it is now."""
        mains = [self._states[container["name"]] for container in self._mains]
        if not is_over(self._own):
            is_waiting = any("waiting" in state for state in mains)
            self._status["phase"] = "Pending" if is_waiting else "Running"
        is_ready = all("running" in state for state in mains)
        for name in ("ContainersReady", "Ready"):
            if is_ready:
                self._condition(name, "True")
            else:
                reason = "PodCompleted" if is_over(self._own) else "ContainersNotReady"
                self._condition(name, "False", reason)
        status = self._status | {"containerStatuses": self._describe(self._mains)}
        if self._inits:
            status["initContainerStatuses"] = self._describe(self._inits)
        return status

    def _describe(self, containers: Objects) -> Objects:
        found = []
        for container in containers:
            name = container["name"]
            state = self._states[name]
            item = {
                "name": name,
                "image": container.get("image", ""),
                "imageID": "",
                "ready": "running" in state,
                "started": "running" in state,
                "restartCount": 0,
                "state": state,
                "lastState": {},
            }
            if name in self._containers:
                item["containerID"] = self._container_id(name)
            found.append(item)
        return found

    def _container_id(self, name: str) -> str:
        return f"containerd://{self._uid.replace('-', '')}{name.encode().hex()}"

    def _present(self) -> Object:
        """The pod as it is now, for the values that the downward API gives."""
        return self._node.store.peek(self._key) or self._pod

    def _now(self) -> str:
        return self._node.store.time()
