from __future__ import annotations

import asyncio

from agl_core.testing.clock import FakeClock


async def test_advance_wakes_whose_time_has_come_in_order() -> None:
    clock = FakeClock(start=100.0)
    woken: list[str] = []

    async def sleep(name: str, seconds: float) -> None:
        await clock.sleep(seconds)
        woken.append(name)

    tasks = [
        asyncio.create_task(sleep(name, seconds))
        for name, seconds in (("c", 3), ("a", 1), ("b", 2))
    ]
    async with asyncio.timeout(5):
        await clock.until_sleeping(3)
        clock.advance(2)
        await asyncio.gather(tasks[1], tasks[2])
        assert woken == ["a", "b"]
        assert (clock.now(), clock.monotonic(), clock.sleeping) == (102.0, 2.0, 1)
        clock.advance(1)
        await tasks[0]
    assert woken == ["a", "b", "c"]


async def test_sleep_of_nothing_lets_others_run_without_the_time() -> None:
    clock = FakeClock()
    ran: list[bool] = []
    asyncio.get_running_loop().call_soon(ran.append, True)
    await clock.sleep(0)
    assert ran == [True]
    assert clock.monotonic() == 0.0


async def test_cancelled_sleeper_counts_no_more() -> None:
    clock = FakeClock()
    task = asyncio.create_task(clock.sleep(10))
    await clock.until_sleeping()
    task.cancel()
    await asyncio.wait({task})
    assert clock.sleeping == 0
    clock.advance(20)
