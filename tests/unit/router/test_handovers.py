"""Places for hand-overs out of one prefill instance."""

import asyncio

import pytest

from pdhub.router.handovers import Handovers


async def entered(places, limit=1, within_s=30.0):
    await places.enter(limit, within_s)
    return True


async def settled():
    for _ in range(5):
        await asyncio.sleep(0)


async def test_one_after_the_other_in_the_order_of_arrival():
    places, order = Handovers(), []

    async def work(n):
        await places.enter(1, 30.0)
        order.append(n)
        assert places.taken == 1
        await settled()
        places.leave()

    await asyncio.gather(*(work(n) for n in range(6)))
    assert order == list(range(6))
    assert places.taken == 0


async def test_nobody_passes_those_who_wait():
    places = Handovers()
    await places.enter(1, 1.0)
    waiting = asyncio.create_task(entered(places))
    await settled()
    patient = asyncio.create_task(entered(places, limit=9))
    await settled()
    assert not patient.done()
    places.leave()
    assert await waiting
    assert await patient
    assert places.taken == 2


async def test_who_gives_up_leaves_no_trace():
    places = Handovers()
    await places.enter(1, 1.0)
    with pytest.raises(TimeoutError):
        await places.enter(1, 0.0)
    given_up = asyncio.create_task(entered(places))
    behind = asyncio.create_task(entered(places))
    await settled()
    given_up.cancel()
    await settled()
    places.leave()
    assert await behind
    places.leave()
    assert places.taken == 0


async def test_a_place_that_comes_when_nobody_wants_it_any_more_goes_on():
    places = Handovers()
    await places.enter(1, 1.0)
    first, second = asyncio.create_task(entered(places)), asyncio.create_task(entered(places))
    await settled()
    places.leave()
    first.cancel()  # its place is there, and it has not run yet
    await settled()
    assert await second
    assert places.taken == 1


async def test_a_place_may_come_back_later():
    places = Handovers()
    await places.enter(1, 1.0)
    places.leave(after_s=0.05)
    assert places.taken == 1
    assert await entered(places, within_s=30.0)
