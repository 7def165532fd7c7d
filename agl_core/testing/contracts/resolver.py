"""The rules that every route resolver keeps."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import ClassVar

import attrs
import pytest

from agl_core.interfaces import Candidate, RouteRequest, RouteResolver
from agl_core.records import ModelServer

POLICY = "actor"


def make_servers(count: int, *, version: int = 0, policy: str = POLICY) -> list[ModelServer]:
    """Servers of one policy, in an order that their endpoints show."""
    return [
        ModelServer(model=policy, endpoint=f"http://{policy}-{number:02}.test/v1", version=version)
        for number in range(count)
    ]


def offer(
    servers: Iterable[ModelServer], inflight: Mapping[tuple[str, str], int] | None = None
) -> list[Candidate]:
    """What the core offers to a resolver; servers that ``inflight`` leaves out are idle."""
    inflight = inflight or {}
    return [Candidate(server=s, inflight=inflight.get(s.key, 0)) for s in servers]


class RouteResolverContract:
    """Subclass it and give the fixture ``resolver``: one that was not used before.

    A resolver may leave calls to the next one. One that answers special calls alone makes them in
    its own ``make_request`` and ``make_candidates``.

    Attributes:
        most_apart: Of 1000 rollouts with a held call each on 16 servers, by how many the busiest
            server may be ahead of the idlest. One that places rollouts by hash says more than 1.
    """

    most_apart: ClassVar[int] = 1

    @pytest.fixture
    async def resolver(self) -> RouteResolver:
        """The resolver under test."""
        raise NotImplementedError("give a fixture 'resolver'")

    def make_request(self, rollout_id: str, failed: Iterable[ModelServer] = ()) -> RouteRequest:
        """A call that the resolver answers."""
        return RouteRequest(
            rollout_id=rollout_id,
            attempt_id="attempt-1",
            policy=POLICY,
            model=POLICY,
            api="chat",
            failed=frozenset(server.key for server in failed),
        )

    def make_servers(self, count: int, *, version: int = 0) -> list[ModelServer]:
        """Servers that the resolver chooses among."""
        return make_servers(count, version=version)

    async def pick(
        self,
        resolver: RouteResolver,
        rollout_id: str,
        candidates: Sequence[Candidate],
        failed: Iterable[ModelServer] = (),
    ) -> ModelServer:
        """The server chosen, which is one of those offered, as it was offered."""
        route = await resolver.resolve(self.make_request(rollout_id, failed), candidates)
        assert route is not None
        assert route.server in [candidate.server for candidate in candidates]
        return route.server

    async def test_sole_server_is_picked(self, resolver: RouteResolver) -> None:
        (only,) = self.make_servers(1)
        for call in range(5):
            assert await self.pick(resolver, f"rollout-{call % 2}", offer([only])) == only

    async def test_server_that_is_no_longer_offered_is_not_picked(
        self, resolver: RouteResolver
    ) -> None:
        servers = self.make_servers(3)
        first = await self.pick(resolver, "rollout", offer(servers))
        rest = [server for server in servers if server != first]
        for _ in range(4):
            assert await self.pick(resolver, "rollout", offer(rest)) in rest

    async def test_server_is_given_as_it_is_registered_now(self, resolver: RouteResolver) -> None:
        for version in range(3):
            servers = self.make_servers(2, version=version)
            assert (await self.pick(resolver, "rollout", offer(servers))).version == version

    async def test_c07_server_that_just_failed_is_not_picked(self, resolver: RouteResolver) -> None:
        servers = self.make_servers(3)
        # The failing one looks best: it answers at once, so nothing is ever in flight there.
        for number in range(100):
            rollout_id = f"rollout-{number}"
            first = await self.pick(resolver, rollout_id, offer(servers))
            busy = {server.key: 50 for server in servers if server != first}
            second = await self.pick(resolver, rollout_id, offer(servers, busy), [first])
            assert second != first
            third = await self.pick(resolver, rollout_id, offer(servers, busy), [first, second])
            assert third not in (first, second)

    async def test_call_that_failed_everywhere_is_still_routed(
        self, resolver: RouteResolver
    ) -> None:
        servers = self.make_servers(2)
        assert await self.pick(resolver, "rollout", offer(servers), servers) in servers

    async def test_forgetting_an_unknown_rollout_is_no_error(self, resolver: RouteResolver) -> None:
        resolver.forget("never-heard-of")
        servers = self.make_servers(2)
        await self.pick(resolver, "rollout", offer(servers))
        resolver.forget("rollout")
        resolver.forget("rollout")
        assert await self.pick(resolver, "rollout", offer(servers)) in servers

    async def test_calls_that_are_held_open_are_spread_evenly(
        self, resolver: RouteResolver
    ) -> None:
        servers = self.make_servers(16)
        held: Counter[tuple[str, str]] = Counter()
        for number in range(1000):
            server = await self.pick(resolver, f"rollout-{number}", offer(servers, held))
            held[server.key] += 1
        assert max(held.values()) - min(held[server.key] for server in servers) <= self.most_apart

    async def test_calls_at_once_are_each_routed(self, resolver: RouteResolver) -> None:
        servers = self.make_servers(4)
        picked = await asyncio.gather(
            *(self.pick(resolver, f"rollout-{n % 50}", offer(servers)) for n in range(200))
        )
        assert len(picked) == 200

    async def test_changed_server_of_the_same_endpoint_is_given(
        self, resolver: RouteResolver
    ) -> None:
        (server,) = self.make_servers(1)
        await self.pick(resolver, "rollout", offer([server]))
        renamed = attrs.evolve(server, served_model="adapter-2")
        assert (await self.pick(resolver, "rollout", offer([renamed]))).served_model == "adapter-2"
