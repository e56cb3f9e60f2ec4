from __future__ import annotations

import asyncio

from pdhub.node.prefill_turns import Turns


async def take(turns: Turns, log: list[str], name: str, *, again: bool = False) -> None:
    await turns.take(again=again)
    log.append(name)


async def test_first_come_first_served() -> None:
    turns, log = Turns(), []
    tasks = [asyncio.create_task(take(turns, log, name)) for name in "abc"]
    await asyncio.sleep(0)
    assert (log, turns.waiting) == (["a"], 2)
    for _ in "abc":
        turns.give()
        await asyncio.sleep(0)
    assert log == ["a", "b", "c"]
    await asyncio.gather(*tasks)
    await take(turns, log, "d")
    assert log[-1] == "d"


async def test_who_stepped_back_comes_first() -> None:
    turns, log = Turns(), []
    await take(turns, log, "a")
    waiting = [asyncio.create_task(take(turns, log, name)) for name in "bc"]
    await asyncio.sleep(0)
    turns.give()
    await asyncio.sleep(0)
    again = asyncio.create_task(take(turns, log, "a2", again=True))
    await asyncio.sleep(0)
    for _ in range(2):
        turns.give()
        await asyncio.sleep(0)
    assert log == ["a", "b", "a2", "c"]
    await asyncio.gather(*waiting, again)


async def test_a_cancelled_waiter_is_gone_and_no_turn_is_lost() -> None:
    turns, log = Turns(), []
    await take(turns, log, "a")
    b, c, d = (asyncio.create_task(take(turns, log, name)) for name in "bcd")
    await asyncio.sleep(0)
    b.cancel()
    await asyncio.sleep(0)
    assert turns.waiting == 2
    turns.give()
    c.cancel()  # in the very moment in which it got the turn
    await asyncio.gather(b, c, d, return_exceptions=True)
    assert log == ["a", "d"]
