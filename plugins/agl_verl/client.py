"""``client.verl``: the exports that training reads, as lists."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agl_core.client import AglLiteClient, AsyncAglLiteClient
from agl_core.client.calls import Ids
from agl_core.hookspecs import hookimpl
from agl_core.interfaces import ClientExtension

Rows = list[dict[str, Any]]


class VerlNamespace:
    """What ``client.verl`` is on the blocking client."""

    def __init__(self, client: AglLiteClient) -> None:
        self._client = client

    def triplets(
        self,
        ids: Ids | None = None,
        group_id: str | None = None,
        policy: str | None = None,
        mode: str = "train",
    ) -> Rows:
        """One line per rollout with its (prompt, response, reward) triplets."""
        return [*self._client.export("triplet", ids, group_id, policy, mode)]

    def trajectories(
        self,
        ids: Ids | None = None,
        group_id: str | None = None,
        policy: str | None = None,
        mode: str = "train",
    ) -> Rows:
        """One line per rollout with its rows of merged turns."""
        return [*self._client.export("trajectory", ids, group_id, policy, mode)]


class AsyncVerlNamespace:
    """What ``client.verl`` is on the asynchronous client."""

    def __init__(self, client: AsyncAglLiteClient) -> None:
        self._client = client

    async def triplets(
        self,
        ids: Ids | None = None,
        group_id: str | None = None,
        policy: str | None = None,
        mode: str = "train",
    ) -> Rows:
        """One line per rollout with its (prompt, response, reward) triplets."""
        lines = self._client.export("triplet", ids, group_id, policy, mode)
        return [line async for line in lines]

    async def trajectories(
        self,
        ids: Ids | None = None,
        group_id: str | None = None,
        policy: str | None = None,
        mode: str = "train",
    ) -> Rows:
        """One line per rollout with its rows of merged turns."""
        lines = self._client.export("trajectory", ids, group_id, policy, mode)
        return [line async for line in lines]


class VerlExtension:
    """Adds no headers, only the namespace."""

    name = "verl"

    def headers(self) -> Mapping[str, str]:
        return {}

    def namespace(self, client: Any) -> VerlNamespace | AsyncVerlNamespace:
        if isinstance(client, AsyncAglLiteClient):
            return AsyncVerlNamespace(client)
        return VerlNamespace(client)


class VerlClientPlugin:
    """Offers ``client.verl``."""

    @hookimpl
    def provide_client_extension(self) -> ClientExtension:
        return VerlExtension()
