"""How often an endpoint that has never answered is asked."""

import asyncio

import pytest

from pdhub.config.models import RouterConfig
from pdhub.router.breaker import Breaker
from pdhub.router.endpoint import Endpoint
from pdhub.router.errors import Unreachable
from pdhub.router.probe import Prober, first_pause


@pytest.mark.parametrize(
    ("waited", "interval", "pause"),
    [(0, 1.0, 0.1), (10, 1.0, 0.1), (30, 1.0, 0.2), (75, 1.0, 0.5), (150, 1.0, 1.0), (3600, 1.0, 1.0), (0, 0.02, 0.02)],
)
def test_a_start_is_seen_at_once_and_an_endpoint_that_never_comes_is_asked_as_any_other(waited, interval, pause):
    assert first_pause(waited, interval) == pytest.approx(pause)


class Nobody:
    """A caller of an address where nobody listens."""

    async def document(self, endpoint, call):
        raise Unreachable("nobody listens there")


async def test_the_pauses_grow_to_the_interval(monkeypatch):
    now, pauses, enough = 1000.0, [], asyncio.Event()

    async def sleep(seconds):
        nonlocal now
        now += seconds
        pauses.append(seconds)
        if now > 1400.0:
            enough.set()
            await asyncio.Event().wait()

    class Clocked:
        timeout, create_task, gather = asyncio.timeout, asyncio.create_task, asyncio.gather

    Clocked.sleep = staticmethod(sleep)
    monkeypatch.setattr("pdhub.router.probe.asyncio", Clocked)
    endpoint = Endpoint("n", "http://127.0.0.1:1", breaker=Breaker(3, 1.0, 1.0), probe_failures=3, hosted=True)
    prober = Prober(Nobody(), RouterConfig(), lambda: now, lambda endpoint: None)
    prober.watch(endpoint, None)
    await asyncio.wait_for(enough.wait(), 30)
    await prober.close()
    assert pauses[0] == 0.1
    assert pauses == sorted(pauses)
    assert pauses[-1] == RouterConfig().probe_interval_s
    assert len(pauses) < 1000, "ten a second would be four thousand"
