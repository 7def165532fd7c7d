"""``/api/export/{format}``: many rollouts in one streamed answer, in a trainer's form."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Mapping

from quart import Response, request

from agl_core.api.errors import problem_document
from agl_core.api.front import request_id_of
from agl_core.api.reading import default_events, iter_rollouts
from agl_core.api.requests import read_fields
from agl_core.api.routes import READERS, Answer, Call, Route
from agl_core.api.shapes import ExportQuery
from agl_core.errors import AglError, NotFound
from agl_core.interfaces import Exporter, ExportOptions, RolloutQuery
from agl_core.records import Rollout
from agl_core.services import Services
from agl_core.wire import to_json

log = logging.getLogger(__name__)

JSON_LINES = "application/x-ndjson"
_PATH = "/api/export/{format}"
# This much is made before the answer begins, so that a refusal by the exporter mostly is the answer
# and not a stream that breaks off.
_AHEAD_BYTES = 2**20


class ExportRoutes:
    """Handlers of the export's routes."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._store = services.store

    def routes(self) -> list[Route]:
        """The table of this module."""
        answers = (
            Answer(
                200,
                str,
                "One piece per rollout; the format says what it is.",
                media_type=JSON_LINES,
            ),
        )
        return [
            Route(
                method="GET",
                path=_PATH,
                handler=self.export,
                says="Export rollouts: those named, else all terminal ones that the filter leaves.",
                roles=READERS,
                query=ExportQuery,
                is_open_query=True,
                answers=answers,
            ),
            Route(
                method="POST",
                path=_PATH,
                handler=self.export_posted,
                says="The same, for more ids than a URL holds.",
                body=ExportQuery,
                answers=answers,
            ),
        ]

    async def export(self, call: Call) -> Response:
        return await self._answer(call.path["format"], call.query(ExportQuery), call.other_query)

    async def export_posted(self, call: Call) -> Response:
        asked, others = read_fields(call.json(), ExportQuery)
        return await self._answer(call.path["format"], asked, others)

    async def _answer(
        self, name: str, asked: ExportQuery, parameters: Mapping[str, str]
    ) -> Response:
        exporter = self._services.exporters.get(name)
        if exporter is None:
            names = ", ".join(sorted(self._services.exporters)) or "none"
            raise NotFound(
                f"there is no export format {name!r}", hint=f"formats of this service: {names}"
            )
        options = ExportOptions(policy=asked.policy, parameters=parameters)
        # Whatever is wrong with the request is found before the first byte.
        head = exporter.begin(options)
        if asked.ids is not None:
            for rollout_id in asked.ids:
                await self._store.get_rollout(rollout_id)
        pieces = await _begun(self._pieces(exporter, options, head, asked))
        telling = _telling(pieces, exporter, request_id_of(request.scope))
        return Response(telling, 200, content_type=exporter.media_type)

    async def _pieces(
        self, exporter: Exporter, options: ExportOptions, head: bytes, asked: ExportQuery
    ) -> AsyncIterator[bytes]:
        if head:
            yield head
        async for rollout in self._rollouts(asked):
            try:
                events = await default_events(self._services, rollout)
            except NotFound:
                if asked.ids is None:
                    continue  # deleted meanwhile, and nobody asked for it by name
                raise
            piece = exporter.encode(rollout, events, options)
            if piece:
                yield piece
            await self._services.clock.sleep(0)
        tail = exporter.finish(options)
        if tail:
            yield tail

    async def _rollouts(self, asked: ExportQuery) -> AsyncIterator[Rollout]:
        mode = None if asked.mode == "all" else asked.mode
        if asked.ids is None:
            query = RolloutQuery(
                statuses=frozenset({"succeeded", "failed", "cancelled"}),
                group_id=asked.group_id,
                mode=mode,
            )
            async for rollout in iter_rollouts(self._store, query):
                yield rollout
            return
        for rollout_id in dict.fromkeys(asked.ids):
            rollout = await self._store.get_rollout(rollout_id)
            is_of_mode = mode is None or rollout.mode == mode
            is_of_group = asked.group_id is None or (
                rollout.group is not None and rollout.group.id == asked.group_id
            )
            if is_of_mode and is_of_group:
                yield rollout


async def _telling(
    pieces: AsyncIterator[bytes], exporter: Exporter, request_id: str
) -> AsyncIterator[bytes]:
    """Log why an answer breaks off, and tell it in the last line where the format has lines."""
    try:
        async for piece in pieces:
            yield piece
    except AglError as exc:
        log.error(
            "an export of the format %r broke off: %s",
            exporter.format,
            exc,
            extra={"code": exc.code, "request_id": request_id},
        )
        if exporter.media_type == JSON_LINES:
            yield to_json({"error": problem_document(exc)}) + b"\n"
        raise


async def _begun(pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Make the first pieces; returns an iterator over all of them.

    Raises:
        AglError: The exporter refuses what it was given.
    """
    ahead: list[bytes] = []
    size = 0
    failure: Exception | None = None
    try:
        async for piece in pieces:
            ahead.append(piece)
            size += len(piece)
            if size >= _AHEAD_BYTES:
                break
    except AglError:
        raise
    except Exception as exc:
        failure = exc  # no refusal but a fault: it breaks the answer off where it happened

    async def all_pieces() -> AsyncIterator[bytes]:
        for piece in ahead:
            yield piece
        if failure is not None:
            raise failure
        async for piece in pieces:
            yield piece

    return all_pieces()
