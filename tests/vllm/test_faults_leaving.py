"""Clients leave in every phase of a request: both servers let go of it, and the next ones are right."""

from __future__ import annotations

import pytest
from faults import KILL_S, Watch, staged
from world import wait_for

pytestmark = [pytest.mark.world("tiny", "mooncake"), pytest.mark.timeout(900)]

PHASES = {"in_prefill": "while prefill computes", "asked": "before decode loads", "loading": "while decode loads"}


@pytest.fixture
def stage(world, pool):
    return staged(world, pool)


@pytest.mark.parametrize("phase", PHASES)
def test_clients_leave(stage, phase):
    watch = Watch(stage)
    with getattr(stage, phase)(2) as (asked, _):
        left = max(one.leave() for one in asked)
        _no_legs(stage)
    for one in asked:
        watch.saw(f"client leaves {PHASES[phase]}{', streamed' if one.stream else ''}", one, left)
    watch.settle(left)


def test_clients_leave_an_answer(stage):
    watch = Watch(stage)
    whole, streamed = stage.ask(tokens=1500), stage.streaming()
    left = max(whole.leave(), streamed.leave())
    _no_legs(stage)
    for one in (whole, streamed):
        watch.saw(f"client leaves while decode answers{', streamed' if one.stream else ''}", one, left)
        assert len(one.data) == 0 or one.stream
    watch.settle(left)


def _no_legs(stage):
    """The router has closed both connections. With push the prefill call may be made again, so that decode is freed."""
    names = [server.name for server in (stage.node, stage.prefill) if stage.pool != "push" or server is stage.node]
    wait_for(lambda: not any(map(stage.legs, names)), KILL_S + 3, lambda: str([stage.legs(name) for name in names]))
