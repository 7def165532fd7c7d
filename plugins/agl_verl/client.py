"""``client.verl``: the exports that training reads, as lists."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agl_core.client import AglLiteClient, AsyncAglLiteClient
from agl_core.client.calls import Ids
from agl_core.hookspecs import hookimpl
from agl_core.interfaces import ClientExtension
from agl_verl.no_data import check_batch, check_share

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
        *,
        max_length: int | None = None,
        max_no_data_share: float | None = None,
    ) -> Rows:
        """One line per rollout with its (prompt, response, reward) triplets.

        Args:
            ids: Of rollouts; None: all that have ended, as the next ones select.
            group_id: Of one group.
            policy: Calls of this policy only.
            mode: ``train``, ``val`` or ``all``.
            max_length: Tokens that a triplet may have; longer ones are counted as ``too_long``.
            max_no_data_share: How many of the succeeded rollouts may have nothing to train on,
                between 0 and 1. None: any number but all.

        Raises:
            NoTrainableCalls: More of them have nothing.
        """
        check_share(max_no_data_share)
        asked = _parameters(max_length)
        lines = [*self._client.export("triplet", ids, group_id, policy, mode, **asked)]
        check_batch(lines, max_no_data_share)
        return lines

    def trajectories(
        self,
        ids: Ids | None = None,
        group_id: str | None = None,
        policy: str | None = None,
        mode: str = "train",
        *,
        max_length: int | None = None,
        max_no_data_share: float | None = None,
    ) -> Rows:
        """One line per rollout with its rows of merged turns; arguments as of ``triplets``.

        Raises:
            NoTrainableCalls: Too many of the succeeded rollouts have nothing to train on.
        """
        check_share(max_no_data_share)
        asked = _parameters(max_length)
        lines = [*self._client.export("trajectory", ids, group_id, policy, mode, **asked)]
        check_batch(lines, max_no_data_share)
        return lines


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
        *,
        max_length: int | None = None,
        max_no_data_share: float | None = None,
    ) -> Rows:
        """As on the blocking client.

        Raises:
            NoTrainableCalls: Too many of the succeeded rollouts have nothing to train on.
        """
        check_share(max_no_data_share)
        asked = _parameters(max_length)
        export = self._client.export("triplet", ids, group_id, policy, mode, **asked)
        lines = [line async for line in export]
        check_batch(lines, max_no_data_share)
        return lines

    async def trajectories(
        self,
        ids: Ids | None = None,
        group_id: str | None = None,
        policy: str | None = None,
        mode: str = "train",
        *,
        max_length: int | None = None,
        max_no_data_share: float | None = None,
    ) -> Rows:
        """As on the blocking client.

        Raises:
            NoTrainableCalls: Too many of the succeeded rollouts have nothing to train on.
        """
        check_share(max_no_data_share)
        asked = _parameters(max_length)
        export = self._client.export("trajectory", ids, group_id, policy, mode, **asked)
        lines = [line async for line in export]
        check_batch(lines, max_no_data_share)
        return lines


def _parameters(max_length: int | None) -> dict[str, str]:
    return {} if max_length is None else {"max_length": str(max_length)}


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
