"""The resolver for vLLM servers: the contract of all resolvers, and its four ways to balance."""

from __future__ import annotations

import asyncio
import os
import sys
from collections import Counter
from collections.abc import Iterable, Sequence

import attrs
import pytest

from agl_core.interfaces import Candidate, RouteRequest
from agl_core.records import ModelServer
from agl_core.testing.contracts import RouteResolverContract
from agl_core.testing.contracts.resolver import POLICY, make_servers, offer
from agl_vllm import VllmConfig, VllmRouteResolver


class TestStickyContract(RouteResolverContract):
    @pytest.fixture
    async def resolver(self) -> VllmRouteResolver:
        return VllmRouteResolver()


class TestRendezvousContract(RouteResolverContract):
    most_apart = 40

    @pytest.fixture
    async def resolver(self) -> VllmRouteResolver:
        return VllmRouteResolver(VllmConfig(balance="rendezvous"))


class TestRoundRobinContract(RouteResolverContract):
    @pytest.fixture
    async def resolver(self) -> VllmRouteResolver:
        return VllmRouteResolver(VllmConfig(balance="round_robin"))


class TestLeastInflightContract(RouteResolverContract):
    @pytest.fixture
    async def resolver(self) -> VllmRouteResolver:
        return VllmRouteResolver(VllmConfig(balance="least_inflight"))


async def pick(
    resolver: VllmRouteResolver,
    rollout_id: str,
    candidates: Sequence[Candidate],
    *,
    failed: Iterable[ModelServer] = (),
    policy: str = POLICY,
) -> ModelServer:
    request = RouteRequest(
        rollout_id=rollout_id,
        attempt_id="attempt-1",
        policy=policy,
        model=policy,
        api="chat",
        failed=frozenset(server.key for server in failed),
    )
    route = await resolver.resolve(request, candidates)
    assert route is not None
    assert route.changes == {}
    return route.server


async def spread(
    resolver: VllmRouteResolver, rollout_ids: Iterable[str], servers: Sequence[ModelServer]
) -> Counter[str]:
    """How many of the rollouts go where, with nothing in flight."""
    return Counter([(await pick(resolver, r, offer(servers))).endpoint for r in rollout_ids])


def test_unknown_balance_is_refused() -> None:
    with pytest.raises(ValueError, match="balance"):
        VllmConfig(balance="random")  # type: ignore[arg-type]


async def test_nothing_on_offer_is_left_to_the_next_resolver() -> None:
    request = RouteRequest(rollout_id="r", attempt_id="a", policy=POLICY, model=None, api="chat")
    assert await VllmRouteResolver().resolve(request, []) is None


# --- least_loaded_sticky


async def test_rollout_stays_on_its_server_however_busy_it_is() -> None:
    resolver, servers = VllmRouteResolver(), make_servers(4)
    first = await pick(resolver, "rollout", offer(servers))
    for inflight in range(20):
        busy = {first.key: inflight * 10}
        assert await pick(resolver, "rollout", offer(servers, busy)) == first


async def test_idle_rollouts_are_spread_within_one_over_sixteen_servers() -> None:
    resolver, servers = VllmRouteResolver(), make_servers(16)
    counts = await spread(resolver, (f"rollout-{n}" for n in range(1000)), servers)
    assert len(counts) == 16
    assert max(counts.values()) - min(counts.values()) <= 1


async def test_equal_load_goes_to_the_first_in_order() -> None:
    resolver, servers = VllmRouteResolver(), make_servers(3)
    picked = [await pick(resolver, f"rollout-{n}", offer(servers)) for n in range(6)]
    assert picked == [*servers, *servers]


async def test_load_is_assigned_rollouts_and_calls_in_flight() -> None:
    resolver, (one, two) = VllmRouteResolver(), make_servers(2)
    assert await pick(resolver, "a", offer([one, two])) == one
    assert await pick(resolver, "b", offer([one, two], {two.key: 2})) == one
    assert await pick(resolver, "c", offer([one, two], {two.key: 1})) == two


async def test_rollouts_that_ended_make_room_for_new_ones() -> None:
    resolver, servers = VllmRouteResolver(), make_servers(2)
    at: dict[str, ModelServer] = {}
    for n in range(10):
        at[f"rollout-{n}"] = await pick(resolver, f"rollout-{n}", offer(servers))
    for rollout_id, server in at.items():
        if server == servers[1]:
            resolver.forget(rollout_id)
            resolver.forget(rollout_id)  # counts once
    counts = await spread(resolver, (f"new-{n}" for n in range(5)), servers)
    assert counts == {servers[1].endpoint: 5}


async def test_missing_server_moves_its_rollouts_and_they_stay_where_they_went() -> None:
    resolver, servers = VllmRouteResolver(), make_servers(3)
    ids = [f"rollout-{n}" for n in range(30)]
    await spread(resolver, ids, servers)
    assert await spread(resolver, ids, servers[1:]) == {s.endpoint: 15 for s in servers[1:]}
    assert await spread(resolver, ids, servers) == {s.endpoint: 15 for s in servers[1:]}
    # Its ten rollouts are not counted there any more: it is the emptiest now.
    new = await spread(resolver, (f"new-{n}" for n in range(15)), servers)
    assert new == {servers[0].endpoint: 15}


async def test_c07_failover_moves_the_rollout_for_good() -> None:
    resolver, servers = VllmRouteResolver(), make_servers(3)
    first = await pick(resolver, "rollout", offer(servers))
    second = await pick(resolver, "rollout", offer(servers), failed=[first])
    assert second != first
    for _ in range(3):
        assert await pick(resolver, "rollout", offer(servers)) == second


async def test_c07_call_that_failed_everywhere_keeps_counts_exact() -> None:
    resolver, servers = VllmRouteResolver(), make_servers(2)
    for _ in range(10):
        await pick(resolver, "rollout", offer(servers), failed=servers)
    counts = await spread(resolver, (f"new-{n}" for n in range(3)), servers)
    assert counts == {servers[0].endpoint: 1, servers[1].endpoint: 2}


async def test_new_weights_spread_rollouts_anew() -> None:
    resolver = VllmRouteResolver()
    old = make_servers(2, version=1)
    ids = [f"rollout-{n}" for n in range(40)]
    await spread(resolver, ids, old)
    wider = make_servers(4, version=1)
    assert await spread(resolver, ids, wider) == {s.endpoint: 20 for s in old}
    new = make_servers(4, version=2)
    assert await spread(resolver, ids, new) == {s.endpoint: 10 for s in new}
    first = [await pick(resolver, rollout_id, offer(new)) for rollout_id in ids]
    assert [await pick(resolver, rollout_id, offer(new)) for rollout_id in ids] == first


async def test_server_with_old_weights_keeps_its_rollouts() -> None:
    resolver, servers = VllmRouteResolver(), make_servers(2)
    at = {n: await pick(resolver, f"rollout-{n}", offer(servers)) for n in range(10)}
    updated = [attrs.evolve(servers[0], version=1), servers[1]]
    for n, server in at.items():
        if server == servers[1]:
            assert await pick(resolver, f"rollout-{n}", offer(updated)) == server


async def test_policies_of_one_rollout_stick_apart_and_end_together() -> None:
    resolver = VllmRouteResolver()
    actors, judges = make_servers(2), make_servers(2, policy="judge")
    for rollout_id in ("a", "b"):
        actor = await pick(resolver, rollout_id, offer(actors))
        judge = await pick(resolver, rollout_id, offer(judges), policy="judge")
        assert await pick(resolver, rollout_id, offer(actors)) == actor
        assert await pick(resolver, rollout_id, offer(judges), policy="judge") == judge
    resolver.forget("a")
    assert await pick(resolver, "c", offer(actors)) == actors[0]
    assert await pick(resolver, "c", offer(judges), policy="judge") == judges[0]


async def test_past_the_bound_the_longest_silent_rollout_is_chosen_for_anew() -> None:
    resolver = VllmRouteResolver(VllmConfig(sticky_rollouts=2))
    one, two = servers = make_servers(2)
    assert await pick(resolver, "a", offer(servers)) == one
    assert await pick(resolver, "b", offer(servers)) == two
    assert await pick(resolver, "a", offer(servers)) == one  # heard of after b
    assert await pick(resolver, "c", offer(servers)) == one  # and b's place is given up
    # Only so is two the less loaded: nobody is assigned to it, against a and c.
    assert await pick(resolver, "d", offer(servers, {two.key: 1})) == two


async def test_nothing_is_kept_of_rollouts_that_ended() -> None:
    resolver, servers = VllmRouteResolver(), make_servers(3)
    for n in range(100):
        await pick(resolver, f"rollout-{n}", offer(servers))
        resolver.forget(f"rollout-{n}")
    # Each found all servers empty, so each went to the first; so does the next.
    assert await pick(resolver, "next", offer(servers)) == servers[0]


# --- round_robin


async def test_round_robin_takes_turns_per_policy() -> None:
    resolver = VllmRouteResolver(VllmConfig(balance="round_robin"))
    actors = make_servers(3)
    judges = [attrs.evolve(server, policy="judge") for server in actors[:2]]
    picked: list[ModelServer] = []
    for n in range(6):
        picked.append(await pick(resolver, "same-rollout", offer(actors)))
        judge = await pick(resolver, "same-rollout", offer(judges), policy="judge")
        assert judge == judges[n % 2]
    assert picked == [*actors, *actors]


async def test_round_robin_gives_a_returning_server_one_turn_and_no_more() -> None:
    resolver = VllmRouteResolver(VllmConfig(balance="round_robin"))
    servers = make_servers(3)
    await spread(resolver, map(str, range(3)), servers)
    assert await spread(resolver, map(str, range(20)), servers[:2]) == {
        s.endpoint: 10 for s in servers[:2]
    }
    picked = [await pick(resolver, "r", offer(servers)) for _ in range(4)]
    assert picked[0] == servers[2]
    assert Counter(s.endpoint for s in picked[:3]) == {s.endpoint: 1 for s in servers}


# --- least_inflight


async def test_c06_load_is_read_from_what_is_offered_and_never_remembered() -> None:
    resolver = VllmRouteResolver(VllmConfig(balance="least_inflight"))
    one, two = servers = make_servers(2)
    held = Counter({one.key: 10, two.key: 0})
    for _ in range(5):  # health rounds: servers come and go
        await pick(resolver, "probe", offer([one], held))
    for n in range(10):
        server = await pick(resolver, f"rollout-{n}", offer(servers, held))
        assert server == two
        held[server.key] += 1
    # All ended: the counts are even again, and the first in order is picked.
    assert await pick(resolver, "later", offer(servers)) == one


# --- rendezvous


def rendezvous() -> VllmRouteResolver:
    return VllmRouteResolver(VllmConfig(balance="rendezvous"))


async def places(
    resolver: VllmRouteResolver, servers: Sequence[ModelServer], count: int = 400
) -> dict[str, ModelServer]:
    return {f"r-{n}": await pick(resolver, f"r-{n}", offer(servers)) for n in range(count)}


async def test_rendezvous_is_the_same_for_every_replica_and_every_order_of_servers() -> None:
    servers = make_servers(5)
    assert await places(rendezvous(), servers) == await places(rendezvous(), servers[::-1])


async def test_rendezvous_does_not_depend_on_the_process() -> None:
    servers = make_servers(5)
    script = """
import asyncio
from agl_core.interfaces import RouteRequest
from agl_core.testing.contracts.resolver import POLICY, make_servers, offer
from agl_vllm import VllmConfig, VllmRouteResolver
resolver = VllmRouteResolver(VllmConfig(balance="rendezvous"))
for n in range(20):
    request = RouteRequest(rollout_id=f"r-{n}", attempt_id="a", policy=POLICY, model=None, api="x")
    print(asyncio.run(resolver.resolve(request, offer(make_servers(5)))).server.endpoint)
"""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        script,
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONHASHSEED": "1"},
    )
    async with asyncio.timeout(30):
        printed, _ = await process.communicate()
    here = await places(rendezvous(), servers, 20)
    assert printed.decode().split() == [server.endpoint for server in here.values()]


async def test_rendezvous_moves_only_the_rollouts_of_the_server_that_leaves() -> None:
    resolver, servers = rendezvous(), make_servers(5)
    before, without = await places(resolver, servers), await places(resolver, servers[1:])
    moved = {rollout_id for rollout_id in before if before[rollout_id] != without[rollout_id]}
    assert moved == {rollout_id for rollout_id in before if before[rollout_id] == servers[0]}
    assert len({without[rollout_id].endpoint for rollout_id in moved}) == 4
    assert await places(resolver, servers) == before


async def test_rendezvous_spreads_over_all_servers() -> None:
    counts = Counter(s.endpoint for s in (await places(rendezvous(), make_servers(4))).values())
    assert len(counts) == 4
    assert min(counts.values()) > 60


async def test_c07_rendezvous_leaves_the_server_that_the_call_failed_on() -> None:
    resolver, servers = rendezvous(), make_servers(3)
    first = await pick(resolver, "rollout", offer(servers))
    second = await pick(resolver, "rollout", offer(servers), failed=[first])
    assert second != first
    assert await pick(resolver, "rollout", offer(servers)) == first
