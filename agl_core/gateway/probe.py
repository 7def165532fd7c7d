"""Does a trained server return what training needs? One token is asked for, and looked at.

Once it has answered, it is asked for its context length and, where its registration does not tell,
shows its logprobs mode.

A router between us and the engine that strips ids would otherwise be found out by a trainer with
nothing to train on.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from agl_core.clock import Clock
from agl_core.errors import AglError
from agl_core.gateway.context import context_length_of
from agl_core.gateway.logprobs_mode import MODE_PROBES, mode_of, mode_probe
from agl_core.gateway.registry import Registry, ServerState
from agl_core.gateway.replies import headers_upstream
from agl_core.gateway.upstream import Timeouts, UpstreamClient, UpstreamRequest, upstream_url
from agl_core.settings import GatewaySettings
from agl_core.wire import read_json, to_json

log = logging.getLogger(__name__)

_SECONDS = 30.0
_AGAIN_SECONDS = 2.0
# Statuses that say of a path or a body that this server does not take it.
_NOT_SERVED = frozenset({400, 404, 405, 422})
_COMMON = {"max_tokens": 1, "temperature": 1.0, "return_token_ids": True}
_PROBES: tuple[tuple[str, dict[str, Any]], ...] = (
    (
        "chat/completions",
        {
            "messages": [{"role": "user", "content": "Hello"}],
            "logprobs": True,
            "top_logprobs": 0,
            **_COMMON,
        },
    ),
    ("completions", {"prompt": "Hello", "logprobs": 0, **_COMMON}),
)


class Prober:
    """Probes servers in the background until each has answered once."""

    def __init__(
        self, settings: GatewaySettings, clock: Clock, registry: Registry, client: UpstreamClient
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._registry = registry
        self._client = client
        self._tasks: dict[asyncio.Task[None], ServerState] = {}

    def probe(self, states: list[ServerState], is_paused: Callable[[str], bool]) -> None:
        """Begin to probe servers; ``is_paused(policy)`` says when to leave one alone."""
        for state in states:
            if not any(probed is state for probed in self._tasks.values()):
                state.probe_problem = "not yet probed"
                task = asyncio.create_task(self._until_answered(state, is_paused))
                self._tasks[task] = state
                task.add_done_callback(self._tasks.pop)

    async def close(self) -> None:
        """Stop probing."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _until_answered(self, state: ServerState, is_paused: Callable[[str], bool]) -> None:
        while await self._is_open(state, is_paused):
            problem, is_final = await self._ask(state)
            if problem != state.probe_problem and problem is not None:
                log.warning(
                    "model server failed the probe: %s",
                    problem,
                    extra={"endpoint": state.server.endpoint},
                )
            state.probe_problem = problem
            if is_final:
                state.is_probed = True
                break
            await self._clock.sleep(_AGAIN_SECONDS)
        for learn in (self._learn_context, self._learn_logprobs_mode):
            while await self._is_open(state, is_paused):
                try:
                    await learn(state)
                except AglError:
                    await self._clock.sleep(_AGAIN_SECONDS)  # it does not answer at the moment
                else:
                    break

    async def _is_open(self, state: ServerState, is_paused: Callable[[str], bool]) -> bool:
        """Wait until the server may be asked; returns False once it is not registered any more."""
        while any(known is state for known in self._registry.states):
            if not is_paused(state.server.policy):
                return True
            await self._clock.sleep(_AGAIN_SECONDS)
        return False

    async def _ask(self, state: ServerState) -> tuple[str | None, bool]:
        """What is missing, or None; and whether asking again could change that."""
        problem: str | None = None
        for path, fields in _PROBES:
            try:
                status, answer = await self._post(state, path, fields)
            except AglError as exc:
                return f"unreachable: {exc.message}", False
            if status == 200:
                return missing_field(answer), True
            problem = f"status {status} to a probe of {path}"
            if status not in _NOT_SERVED:
                return problem, False
        return problem, False

    async def _learn_context(self, state: ServerState) -> None:
        """Read the server's context length from its list of models, where it has one."""
        status, answer = await self._send(state, "GET", "models", b"")
        if status == 200:
            state.context_tokens = context_length_of(answer, state.server.upstream_model)

    async def _learn_logprobs_mode(self, state: ServerState) -> None:
        """Find out the logprobs mode of a server whose registration does not tell it."""
        if state.server.logprobs_mode != "unknown":
            return
        for path, _ in MODE_PROBES:
            body = to_json(mode_probe(path, state.server.upstream_model))
            status, answer = await self._send(state, "POST", path, body)
            if status == 200:
                state.probed_logprobs_mode = mode_of(answer)
            if status not in _NOT_SERVED:
                return

    async def _post(self, state: ServerState, path: str, fields: dict[str, Any]) -> tuple[int, Any]:
        body = to_json({"model": state.server.upstream_model, **fields})
        return await self._send(state, "POST", path, body)

    async def _send(
        self, state: ServerState, method: str, path: str, body: bytes
    ) -> tuple[int, Any]:
        """Ask the server; returns the status and the JSON of its answer, None where it is none."""
        server = state.server
        secret = self._settings.credentials.get(server.credential or "")
        headers = [(b"accept", b"application/json")]
        if body:
            headers.append((b"content-type", b"application/json"))
        answer = await self._client.open(
            UpstreamRequest(
                method=method,
                url=upstream_url(server.endpoint, f"/{path}"),
                headers=headers_upstream(headers, secret.reveal() if secret else None),
                body=body,
            ),
            timeouts=Timeouts(
                connect_seconds=self._settings.connect_seconds,
                first_byte_seconds=_SECONDS,
                idle_seconds=_SECONDS,
            ),
        )
        async with answer:
            content = await answer.read_all(2**20)
            try:
                return answer.status, read_json(content)
            except AglError:
                return answer.status, None


def missing_field(answer: Any) -> str | None:
    """Name the field that training needs and an answer lacks; None where all is there."""
    choices = answer.get("choices") if isinstance(answer, dict) else None
    if not choices or not isinstance(choices[0], dict):
        return "choices"
    choice = choices[0]
    if not (answer.get("prompt_token_ids") or choice.get("prompt_token_ids")):
        return "prompt_token_ids (return_token_ids is ignored)"
    if not choice.get("token_ids"):
        return "token_ids (return_token_ids is ignored)"
    logprobs = choice.get("logprobs")
    if not isinstance(logprobs, dict) or not (
        logprobs.get("content") or logprobs.get("token_logprobs")
    ):
        return "logprobs"
    return None
