"""Does a trained server return what training needs? One token is asked for, and looked at.

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
from agl_core.gateway.registry import Registry, ServerState
from agl_core.gateway.replies import headers_upstream
from agl_core.gateway.upstream import Timeouts, UpstreamClient, UpstreamRequest, upstream_url
from agl_core.settings import GatewaySettings
from agl_core.wire import read_json, to_json

log = logging.getLogger(__name__)

_SECONDS = 30.0
_AGAIN_SECONDS = 2.0
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
        while any(known is state for known in self._registry.states):
            if not is_paused(state.server.policy):
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
                    return
            await self._clock.sleep(_AGAIN_SECONDS)

    async def _ask(self, state: ServerState) -> tuple[str | None, bool]:
        """What is missing, or None; and whether asking again could change that."""
        problem: str | None = None
        for path, fields in _PROBES:
            try:
                status, answer = await self._send(state, path, fields)
            except AglError as exc:
                return f"unreachable: {exc.message}", False
            if status == 200:
                return missing_field(answer), True
            problem = f"status {status} to a probe of {path}"
            if status not in (400, 404, 405, 422):
                return problem, False
        return problem, False

    async def _send(self, state: ServerState, path: str, fields: dict[str, Any]) -> tuple[int, Any]:
        server = state.server
        secret = self._settings.credentials.get(server.credential or "")
        headers = headers_upstream(
            [(b"content-type", b"application/json"), (b"accept", b"application/json")],
            secret.reveal() if secret else None,
        )
        answer = await self._client.open(
            UpstreamRequest(
                method="POST",
                url=upstream_url(server.endpoint, f"/{path}"),
                headers=headers,
                body=to_json({"model": server.upstream_model, **fields}),
            ),
            timeouts=Timeouts(
                connect_seconds=self._settings.connect_seconds,
                first_byte_seconds=_SECONDS,
                idle_seconds=_SECONDS,
            ),
        )
        async with answer:
            body = await answer.read_all(2**20)
            try:
                return answer.status, read_json(body)
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
