"""``/api/models``: the registry of model servers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from urllib.parse import urlsplit

import attrs
from quart import Response

from agl_core.api.requests import read_one_or_more
from agl_core.api.routes import READERS, Answer, Call, Route, json_answer
from agl_core.api.shapes import ModelQuery, ModelServerItems, ModelServerSet, ModelServerView
from agl_core.errors import Conflict, Invalid, NotFound, VersionConflict
from agl_core.interfaces import GatewayState
from agl_core.records import ModelServer
from agl_core.services import Services
from agl_core.wire import structure

_PATH = "/api/models"


class ModelRoutes:
    """Handlers of the registry's routes."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._store = services.store

    def routes(self) -> list[Route]:
        """The table of this module."""
        return [
            Route(
                method="GET",
                path=_PATH,
                handler=self.read_page,
                says="List the registered model servers.",
                roles=READERS,
                answers=(Answer(200, ModelServerItems, "The registry."),),
            ),
            Route(
                method="POST",
                path=_PATH,
                handler=self.register,
                says="Register model servers, or new versions of them, by (model, endpoint).",
                body=ModelServer | tuple[ModelServer, ...],
                answers=(
                    Answer(201, ModelServerView | ModelServerItems, "At least one is new."),
                    Answer(200, ModelServerView | ModelServerItems, "All were there before."),
                ),
            ),
            Route(
                method="PUT",
                path=_PATH,
                handler=self.replace,
                says="Replace the whole registry at once, and pause or resume in the same step.",
                body=ModelServerSet,
                answers=(Answer(200, ModelServerItems, "The registry."),),
            ),
            Route(
                method="DELETE",
                path=_PATH,
                handler=self.remove,
                says="Remove a model's servers, or one of them.",
                query=ModelQuery,
                answers=(Answer(200, ModelServerItems, "What was removed."),),
            ),
        ]

    async def read_page(self, call: Call) -> Response:
        state = await self._store.get_gateway_state()
        return self._items(state.servers)

    async def register(self, call: Call) -> Response:
        posted, is_list = read_one_or_more(call.json(), ModelServer, "servers")
        servers = [self._checked(server, "") for server in posted]
        is_new = False

        def upsert(state: GatewayState) -> GatewayState:
            nonlocal is_new
            registry = {server.key: server for server in state.servers}
            is_new = any(server.key not in registry for server in servers)
            for server in servers:
                _check_version(registry.get(server.key), server)
                registry[server.key] = server
            check_names(registry.values())
            return attrs.evolve(state, servers=tuple(registry.values()))

        await self._store.change_gateway_state(upsert)
        await self._services.gateway.registry_changed()
        status = 201 if is_new else 200
        if is_list:
            return self._items(servers, status)
        return json_answer(self._services.gateway.server_view(servers[0]), status)

    async def replace(self, call: Call) -> Response:
        asked = structure(call.json(), ModelServerSet)
        posted = asked.items
        if asked.resume and asked.pause is not None:
            raise Invalid("resume and pause: one of the two, or neither")
        servers = [self._checked(server, f"items[{index}].") for index, server in enumerate(posted)]
        if len({server.key for server in servers}) < len(servers):
            raise Invalid("items: a model stands there twice with the same endpoint")

        def put(state: GatewayState) -> GatewayState:
            registry = {server.key: server for server in state.servers}
            for server in servers:
                _check_version(registry.get(server.key), server)
            check_names(servers)
            return attrs.evolve(state, servers=tuple(servers))

        gateway, pause = self._services.gateway, asked.pause
        if asked.resume:
            await gateway.resume(None, change=put)
        elif pause is not None:
            await gateway.pause(
                pause.policy, pause.mode, pause.reason, pause.drain_seconds, change=put
            )
        else:
            await self._store.change_gateway_state(put)
            await gateway.registry_changed()
        return self._items(servers)

    async def remove(self, call: Call) -> Response:
        asked = call.query(ModelQuery)
        endpoint = None if asked.endpoint is None else asked.endpoint.rstrip("/")
        removed: list[ModelServer] = []

        def drop(state: GatewayState) -> GatewayState:
            removed.clear()
            kept: list[ModelServer] = []
            for server in state.servers:
                is_meant = server.model == asked.model and endpoint in (None, server.endpoint)
                (removed if is_meant else kept).append(server)
            if not removed:
                raise NotFound(
                    f"no server of a model {asked.model!r} is registered"
                    + ("" if endpoint is None else f" at {endpoint}"),
                    hint="GET /api/models lists them",
                )
            return attrs.evolve(state, servers=tuple(kept))

        # What is shown of a server must be read while the gateway still knows it.
        before = await self._store.get_gateway_state()
        views = {s.key: self._services.gateway.server_view(s) for s in before.servers}
        await self._store.change_gateway_state(drop)
        await self._services.gateway.registry_changed()
        return json_answer(
            {
                "items": [
                    views.get(server.key) or self._services.gateway.server_view(server)
                    for server in removed
                ]
            }
        )

    def _items(self, servers: Sequence[ModelServer], status: int = 200) -> Response:
        views = [self._services.gateway.server_view(server) for server in servers]
        return json_answer({"items": views}, status)

    def _checked(self, server: ModelServer, where: str) -> ModelServer:
        """The entry with its endpoint in one spelling.

        Raises:
            Invalid: No request could go there.
        """
        credentials = self._services.settings.gateway.credentials
        if server.credential is not None and server.credential not in credentials:
            names = ", ".join(sorted(credentials)) or "none"
            raise Invalid(
                f"{where}credential: there is no credential {server.credential!r} ({names})",
                hint="name it in [gateway.credentials]; its value is never sent here",
            )
        return attrs.evolve(server, endpoint=_checked_endpoint(server.endpoint, where))


def _checked_endpoint(endpoint: str, where: str) -> str:
    trimmed = endpoint.rstrip("/")
    try:
        url = urlsplit(trimmed)
        is_usable = url.scheme in ("http", "https") and bool(url.hostname)
        is_usable = is_usable and (url.port is None or url.port > 0)
    except ValueError:
        is_usable = False
    if not is_usable or url.query or url.fragment or not trimmed.isprintable() or " " in trimmed:
        raise Invalid(
            f"{where}endpoint: must be an http or https URL, not {endpoint!r}",
            hint="for example http://10.0.0.7:8000/v1",
        )
    if url.username is not None:
        raise Invalid(
            f"{where}endpoint: must not hold a user or password",
            hint="name a credential of [gateway.credentials] instead",
        )
    if not url.path.endswith("/v1"):
        raise Invalid(
            f"{where}endpoint: must end in /v1, not {endpoint!r}",
            hint=f"did you mean {trimmed}/v1?",
        )
    return trimmed


def _check_version(registered: ModelServer | None, server: ModelServer) -> None:
    if registered is not None and server.version < registered.version:
        raise VersionConflict(
            f"{server.model!r} at {server.endpoint} is registered with version "
            f"{registered.version}, which is newer than {server.version}",
            hint="versions only grow; remove the entry to start over",
            details={"version": registered.version},
        )


def check_names(servers: Iterable[ModelServer]) -> None:
    """See to it that each name that agents may ask for means one policy.

    Raises:
        Conflict: ``alias_conflict``.
    """
    owners: dict[str, str] = {}
    for server in servers:
        for name in (server.model, server.policy, *server.aliases):
            owner = owners.setdefault(name, server.policy)
            if owner != server.policy:
                raise Conflict(
                    f"the name {name!r} would mean policy {owner!r} and policy {server.policy!r}",
                    hint="give one of them another model, policy or alias",
                    code="alias_conflict",
                    details=_facts(name, owner, server.policy),
                )


def _facts(name: str, *policies: str) -> Mapping[str, object]:
    return {"name": name, "policies": list(policies)}
