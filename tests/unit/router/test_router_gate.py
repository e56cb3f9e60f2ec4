"""The gate: who waits is woken, refused or forgotten; busy nodes are knocked at by one at a time."""

import asyncio

import pytest

from pdhub.api import AdmissionRejected
from pdhub.core.admission import AdmissionQueue, Ticket
from pdhub.router import gate as gate_module
from pdhub.router.gate import Gate


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def make(capacity=1, limit=1):
    clock = Clock()
    gate = Gate({"p": AdmissionQueue(limit=limit, capacity=0)}, clock)
    gate.resize("p", capacity)
    return gate, clock


async def entering(gate, ticket):
    task = asyncio.create_task(gate.enter("p", ticket))
    await asyncio.sleep(0)
    return task


async def test_nobody_is_there():
    gate, _ = make(capacity=0)
    with pytest.raises(AdmissionRejected) as nobody:
        await gate.enter("p", Ticket("a", 10.0))
    assert not nobody.value.contended
    assert (nobody.value.reason, nobody.value.code) == ("rejected-no-endpoints", "no_endpoints")


async def test_who_waits_is_woken_by_who_leaves():
    gate, _ = make()
    await gate.enter("p", Ticket("a", 10.0))
    second = await entering(gate, Ticket("b", 10.0))
    assert gate.waiting() == {"p": 1}
    with pytest.raises(AdmissionRejected) as full:
        await gate.enter("p", Ticket("c", 10.0))
    assert (full.value.contended, full.value.code) == (True, "queue_full")
    gate.leave("p", "a", served=True)
    await second


async def test_the_sheddable_is_told_at_once():
    gate, _ = make()
    await gate.enter("p", Ticket("a", 10.0))
    low = await entering(gate, Ticket("low", 10.0, priority=-1))
    high = await entering(gate, Ticket("high", 10.0))
    await asyncio.sleep(0)
    with pytest.raises(AdmissionRejected) as shed:
        await low
    assert (shed.value.reason, shed.value.code, shed.value.contended) == ("rejected-saturated", "shed", True)
    gate.leave("p", "a", served=True)
    await high


async def test_a_cancelled_one_is_forgotten():
    gate, _ = make()
    await gate.enter("p", Ticket("a", 10.0))
    gone = await entering(gate, Ticket("e", 10.0))
    gone.cancel()
    await asyncio.gather(gone, return_exceptions=True)
    assert gate.waiting() == {"p": 0}


async def test_with_a_free_place_a_target_in_the_past_waits_for_nothing():
    gate, _ = make()
    await gate.enter("p", Ticket("f", -5.0))


async def test_deadlines_and_looks():
    gate, _ = make()
    await gate.enter("p", Ticket("a", 10.0))
    ticket = Ticket("g", 0.05)
    assert not gate.offer("p", ticket)
    assert gate.opens("p", ticket)
    assert not await gate.wait("p", ticket, 0.01)
    with pytest.raises(AdmissionRejected) as expired:
        await gate.wait("p", ticket, 9.0)
    assert (expired.value.reason, expired.value.code) == ("rejected-ttl-expired", "queue_timeout")
    assert gate.waiting() == {"p": 0}


async def test_retry_after_is_the_predicted_wait():
    gate, clock = make(limit=1)
    await gate.enter("p", Ticket("a", 100.0))
    clock.now = 7.0
    gate.leave("p", "a", served=True)
    await gate.enter("p", Ticket("b", 100.0))
    waits = await entering(gate, Ticket("c", 100.0))
    with pytest.raises(AdmissionRejected) as full:
        await gate.enter("p", Ticket("d", 100.0))
    assert full.value.retry_after_s == 14.0
    waits.cancel()
    await asyncio.gather(waits, return_exceptions=True)


async def test_closing_refuses_those_who_wait():
    gate, _ = make()
    await gate.enter("p", Ticket("a", 10.0))
    waits = await entering(gate, Ticket("h", 10.0))
    gate.close()
    with pytest.raises(AdmissionRejected) as closed:
        await waits
    assert not closed.value.contended
    with pytest.raises(AdmissionRejected):
        gate.busy("p", Ticket("a", 10.0))


async def test_a_refusal_that_nobody_waits_for_is_no_noise():
    gate, _ = make()
    await gate.enter("p", Ticket("a", 10.0))
    assert not gate.offer("p", Ticket("b", 10.0))
    gate.close()
    gate.leave("p", "b", served=False)


async def test_one_at_a_time_knocks_at_busy_nodes(monkeypatch):
    monkeypatch.setattr(gate_module, "KNOCK_S", 0.01)
    gate, _ = make(capacity=4, limit=8)
    knocks, inside, busy = [], [], True

    async def request(n):
        ticket = Ticket(f"t{n}", 100.0 + n)
        if not gate.offer("p", ticket):
            assert await gate.wait("p", ticket, 100.0)
        while True:
            await asyncio.sleep(0)  # the call to the node
            knocks.append(n)
            if not busy:
                break
            gate.busy("p", ticket)
            assert await gate.wait("p", ticket, 100.0)
        inside.append(n)
        gate.entered("p", ticket.id)

    tasks = [asyncio.create_task(request(n)) for n in range(4)]
    while len(knocks) < 4:
        await asyncio.sleep(0)
    assert knocks == [0, 1, 2, 3], "the first time each of them believed that there is a place"
    knocks.clear()
    while len(knocks) < 3:
        await asyncio.sleep(0.005)
    assert set(knocks) == {0}, "the most urgent, again and again"
    busy = False
    await asyncio.gather(*tasks)
    assert inside == [0, 1, 2, 3]
    gate.close()
