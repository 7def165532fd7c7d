"""Rules of what replicas share: gateway state, listeners, and the life of a store."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import attrs
import pytest

from agl_core.errors import (
    IllegalTransition,
    Invalid,
    RolloutExists,
)
from agl_core.interfaces import Change, GatewayState, Store
from agl_core.records import (
    Group,
    ModelServer,
    PolicyPause,
    Rollout,
)
from agl_core.testing.contracts.store_support import (
    NOW,
    WAIT_SECONDS,
    Heard,
    make_rollout,
    noted,
    patched,
)
from agl_core.transitions import request_cancel


class GatewayRules:
    """Registry and pauses."""

    async def test_gateway_state_is_empty_at_first_and_keeps_what_it_is_given(
        self, store: Store
    ) -> None:
        assert await store.get_gateway_state() == GatewayState()
        state = GatewayState(
            servers=(
                ModelServer(
                    model="actor",
                    endpoint="http://one.test/v1",
                    version=3,
                    policy="p",
                    trained=False,
                    served_model="served",
                    aliases=("claude-*",),
                    logprobs_mode="raw",
                    credential="key",
                    salt=True,
                ),
            ),
            pauses={
                "p": PolicyPause(
                    policy="p", paused=True, mode="keep", since=NOW, paused_seconds=1.5
                )
            },
        )
        assert await store.change_gateway_state(lambda _: state) == state
        assert await store.get_gateway_state() == state

    async def test_of_many_gateway_changes_at_once_none_is_lost(self, store: Store) -> None:
        def registered(number: int) -> Callable[[GatewayState], GatewayState]:
            server = ModelServer(model="actor", endpoint=f"http://{number}.test/v1")
            return lambda state: attrs.evolve(state, servers=(*state.servers, server))

        await asyncio.gather(*(store.change_gateway_state(registered(n)) for n in range(30)))
        servers = (await store.get_gateway_state()).servers
        assert {server.endpoint for server in servers} == {f"http://{n}.test/v1" for n in range(30)}
        assert len(servers) == 30

    async def test_gateway_change_that_raises_changes_nothing(self, store: Store) -> None:
        def refuse(_state: GatewayState) -> GatewayState:
            raise Invalid("no")

        before = await store.change_gateway_state(
            lambda s: attrs.evolve(s, pauses={"p": PolicyPause(policy="p")})
        )
        with pytest.raises(Invalid):
            await store.change_gateway_state(refuse)
        assert await store.get_gateway_state() == before


class ListenerRules:
    """Who is told of changes."""

    async def test_listeners_hear_of_each_kind_of_change(self, store: Store) -> None:
        heard = Heard(store)
        group = Group(id="g", size=1, index=0)
        await store.add_rollouts([make_rollout("a", group=group), make_rollout("b")])
        changes = await heard.until_rollout("b")
        assert Change(kind="rollout", rollout_id="a", group_id="g") in changes
        assert Change(kind="rollout", rollout_id="b") in changes

        for act, is_end in (
            (lambda: store.change_rollout("a", lambda r: attrs.evolve(r, priority=1)), False),
            (lambda: store.change_rollout("a", lambda r: request_cancel(r, NOW)), True),
            (lambda: store.delete_rollout("a"), True),
        ):
            heard.changes.clear()
            await act()
            (change,) = await heard.until_rollout("a")
            assert change == Change(kind="rollout", rollout_id="a", group_id="g", is_end=is_end)

        heard.changes.clear()
        server = ModelServer(model="actor", endpoint="http://one.test/v1")
        await store.change_gateway_state(lambda s: attrs.evolve(s, servers=(server,)))
        assert await heard.until(lambda c: c.kind == "gateway") == [Change(kind="gateway")]

    async def test_listeners_do_not_hear_of_what_did_not_happen(self, store: Store) -> None:
        await store.add_rollouts([make_rollout("a")])
        await store.add_rollouts([make_rollout("marker-0")])
        heard = Heard(store)
        await store.add_rollouts([make_rollout("a")])
        await store.change_rollout("a", lambda r: r)
        await store.change_gateway_state(lambda state: state)
        with pytest.raises(RolloutExists):
            await store.add_rollouts([make_rollout("new"), make_rollout("a", input=2)])
        with pytest.raises(IllegalTransition):
            await store.change_rollout("a", patched(status="succeeded"))
        await store.add_rollouts([make_rollout("marker")])
        changes = await heard.until_rollout("marker")
        assert {change.rollout_id for change in changes} <= {"marker", "marker-0"}

    async def test_listeners_are_called_when_the_change_can_be_read(self, store: Store) -> None:
        await store.add_rollouts([make_rollout("a"), make_rollout("b")])
        readings: list[asyncio.Task[Rollout]] = []
        called = asyncio.Event()

        def read(change: Change) -> None:
            if change.rollout_id == "a":
                reading = asyncio.get_running_loop().create_task(store.get_rollout("a"))
                readings.append(reading)
                called.set()

        store.on_change(read)
        await store.change_rollout("a", noted(n=1))
        async with asyncio.timeout(WAIT_SECONDS):
            await called.wait()
            assert (await readings[0]).version == 2

    async def test_listener_that_was_taken_off_is_not_called(self, store: Store) -> None:
        gone, stays = Heard(store), Heard(store)
        gone.stop()
        gone.stop()
        await store.add_rollouts([make_rollout("a")])
        await stays.until_rollout("a")
        assert gone.changes == []

    async def test_listener_that_raises_harms_nobody_else(self, store: Store) -> None:
        def fail(_change: Change) -> None:
            raise RuntimeError("a listener's fault")

        store.on_change(fail)
        heard = Heard(store)
        added = await store.add_rollouts([make_rollout("a")])
        assert added.created == (True,)
        await heard.until_rollout("a")


class LifeRules:
    """Closing."""

    async def test_closing_twice_is_no_error(self, store: Store) -> None:
        await store.add_rollouts([make_rollout("a")])
        await store.__aexit__(None, None, None)
        await store.__aexit__(None, None, None)

    async def test_store_says_whether_it_is_durable(self, store: Store) -> None:
        assert isinstance(store.is_durable, bool)
