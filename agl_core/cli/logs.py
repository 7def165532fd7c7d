"""``agl logs``: what an agent prints, while it runs or as far as it was kept."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from agl_core.cli.options import config_option, config_path_of, service_options, set_up_logging
from agl_core.errors import NotFound

if TYPE_CHECKING:
    from agl_core.client import AsyncAglLiteClient
    from agl_core.clock import Clock
    from agl_core.interfaces import Runner
    from agl_core.records import Attempt, Event, Rollout

_POLL_SECONDS = 1.0


@click.command()
@click.argument("rollout_id")
@click.option(
    "--attempt",
    "attempt_id",
    help="Of this attempt; its first characters do  [default: the latest]",
)
@click.option("--container", help="Of another container of the pod  [default: the agent's]")
@click.option(
    "--tail", "tail_lines", type=click.IntRange(0), metavar="LINES", help="Only the last lines."
)
@click.option(
    "-f", "--follow", is_flag=True, help="Go on until the rollout ends, with its next attempts too."
)
@config_option
@service_options
def logs(
    rollout_id: str,
    attempt_id: str | None,
    container: str | None,
    tail_lines: int | None,
    follow: bool,
    config_path: str | None,
    url: str | None,
    key: str | None,
) -> None:
    """Show what a rollout's agent has printed.

    The log of an attempt that runs comes from where it runs, so this needs the configuration of the
    controller, and on one machine its directory. Of a failed attempt that is over the service has
    the end. Tokens of rollouts are blacked out.
    """
    from agl_core import app
    from agl_core.client import AsyncAglLiteClient
    from agl_core.clock import SystemClock
    from agl_core.config import read_config

    set_up_logging("warning")
    given: dict[tuple[str, ...], tuple[str, str]] = {}
    if url is not None:
        given["controller", "url"] = ("--url", url)
    loaded = app.load(read_config(config_path_of(config_path), options=given))
    settings, auth = loaded.settings.controller, loaded.settings.auth
    secret = settings.key or auth.controller_key or auth.algorithm_key
    if key is None and secret is not None:
        key = secret.reveal()
    clock = SystemClock()

    async def show() -> None:
        async with AsyncAglLiteClient(settings.url, key) as client:
            shown = Logs(client, loaded, clock, container, tail_lines)
            if follow:
                await shown.follow(rollout_id, attempt_id)
            else:
                await shown.show(rollout_id, attempt_id)

    asyncio.run(show())


class Logs:
    """Writes logs to standard output, and what is to be said of them to standard error."""

    def __init__(
        self,
        client: AsyncAglLiteClient,
        loaded: Any,
        clock: Clock,
        container: str | None,
        tail_lines: int | None,
    ) -> None:
        self._client = client
        self._loaded = loaded
        self._clock = clock
        self._container = container
        self._tail_lines = tail_lines
        self._runner: Runner | None = None

    async def show(self, rollout_id: str, attempt_id: str | None) -> None:
        """One attempt as far as it has come.

        Raises:
            NotFound: There is no such attempt, or nothing is left of it.
        """
        rollout = await self._client.rollout(rollout_id)
        if not rollout.attempts:
            raise NotFound(
                f"rollout {rollout_id!r} is {rollout.status} and has no attempt",
                hint=None if rollout.is_terminal else "--follow waits for the first one",
            )
        attempt = _named(rollout, attempt_id) if attempt_id else rollout.attempts[-1]
        await self._show_attempt(rollout, attempt, follow=False)

    async def follow(self, rollout_id: str, attempt_id: str | None) -> None:
        """The attempt that is named, or all from the latest one on, to their ends.

        Raises:
            NotFound: There is no such attempt, or nothing is left of the only one.
        """
        rollout = await self._client.rollout(rollout_id)
        if attempt_id is not None:
            await self._show_attempt(rollout, _named(rollout, attempt_id), follow=True)
            return
        shown = max(0, len(rollout.attempts) - 1)
        is_told = False
        while True:
            if shown < len(rollout.attempts):
                attempt = rollout.attempts[shown]
                if shown or is_told:
                    _tell(f"attempt {attempt.attempt_id}")
                try:
                    await self._show_attempt(rollout, attempt, follow=True)
                except NotFound as exc:
                    if rollout.is_terminal:
                        raise
                    _tell(str(exc))
                shown += 1
            elif rollout.is_terminal:
                if not shown:
                    raise NotFound(f"rollout {rollout_id!r} ended without any attempt")
                _tell(f"rollout {rollout_id} has {rollout.status}")
                return
            else:
                if not is_told:
                    _tell(f"rollout {rollout_id} is {rollout.status}: waiting for an attempt")
                    is_told = True
                await self._clock.sleep(_POLL_SECONDS)
            rollout = await self._client.rollout(rollout_id)

    async def _show_attempt(self, rollout: Rollout, attempt: Attempt, *, follow: bool) -> None:
        if not attempt.is_ended:
            if attempt.node is None:
                raise NotFound(
                    f"attempt {attempt.attempt_id!r} was started by no controller",
                    hint="its log is where you run it",
                )
            try:
                await self._show_live(rollout, attempt, follow=follow)
                return
            except NotFound:
                # It may have ended while we asked; what was kept of it comes right before that.
                rollout = await self._client.rollout(rollout.rollout_id)
                if not _named(rollout, attempt.attempt_id).is_ended:
                    raise
        if await self._show_stored(rollout, attempt):
            return
        try:
            await self._show_live(rollout, attempt, follow=False)
        except NotFound as exc:
            raise NotFound(
                f"nothing is left of the log of attempt {attempt.attempt_id!r}",
                hint="the end of it is kept where an attempt fails",
            ) from exc

    async def _show_live(self, rollout: Rollout, attempt: Attempt, *, follow: bool) -> None:
        if self._runner is None:
            self._runner = self._loaded.plugins.provide_runner(self._clock)
        pieces = self._runner.logs(
            rollout.rollout_id,
            attempt.attempt_id,
            container=self._container,
            tail_lines=self._tail_lines,
            follow=follow,
        )
        async for piece in pieces:
            _write(piece)

    async def _show_stored(self, rollout: Rollout, attempt: Attempt) -> bool:
        """What the runner has kept of an attempt; whether there was anything."""
        events = await self._client.events(rollout.rollout_id, attempt.attempt_id, "log")
        kept = [event for event in events if self._is_wanted(event)]
        for event in kept:
            name = event.data.get("container")
            what = f"of container {name} " if name else ""
            is_cut = event.data.get("truncated")
            _tell(f"the log {what}as the service has it{', only its end' if is_cut else ''}")
            if problem := event.data.get("problem"):
                _tell(str(problem))
            _write(_last_lines(event.data["text"], self._tail_lines).encode(errors="replace"))
        return bool(kept)

    def _is_wanted(self, event: Event) -> bool:
        """Kept by a runner, as agents may post events of the same type."""
        data = event.data
        is_ours = isinstance(data.get("text"), str) and ("container" in data or "stream" in data)
        return is_ours and self._container in (None, data.get("container"))


def _named(rollout: Rollout, attempt_id: str) -> Attempt:
    found = [a for a in rollout.attempts if a.attempt_id.startswith(attempt_id)]
    exact = [a for a in found if a.attempt_id == attempt_id]
    if len(exact or found) == 1:
        return (exact or found)[0]
    known: Sequence[str] = [a.attempt_id for a in found or rollout.attempts]
    problem = "several attempts that begin with" if found else "no attempt"
    raise NotFound(
        f"rollout {rollout.rollout_id!r} has {problem} {attempt_id!r}",
        hint=f"it has {', '.join(known)}" if known else "it has none yet",
    )


def _last_lines(text: str, count: int | None) -> str:
    if count is None:
        return text
    lines = text.splitlines(keepends=True)
    return "".join(lines[len(lines) - count :]) if count < len(lines) else text


def _write(piece: bytes) -> None:
    sys.stdout.buffer.write(piece)
    sys.stdout.buffer.flush()


def _tell(text: str) -> None:
    click.echo(f"agl: {text}", err=True)
