"""Signals, drain and exit status of a node's process."""

import asyncio
import os
import signal

import pytest

from pdhub.api import ConfigError
from pdhub.node.lifecycle import EXIT_RESTART, RESTART_DRAIN_S, serve


class Fake:
    def __init__(self, *, start=None, drain=None):
        self.calls = []
        self.started = asyncio.Event()
        self._start, self._drain = start, drain

    async def start(self):
        self.calls.append("start")
        if self._start is not None:
            await self._start()
        self.started.set()

    async def drain(self, timeout_s):
        self.calls.append(("drain", timeout_s))
        if self._drain is not None:
            await self._drain()

    async def close(self):
        self.calls.append("close")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_drains_then_closes(number):
    server = Fake()
    task = asyncio.create_task(serve(server, 7.0))
    await server.started.wait()
    os.kill(os.getpid(), number)
    assert await task == 0
    assert server.calls == ["start", ("drain", 7.0), "close"]


async def test_a_second_signal_cuts_the_drain_short():
    draining = asyncio.Event()

    async def forever():
        draining.set()
        await asyncio.Event().wait()

    server = Fake(drain=forever)
    task = asyncio.create_task(serve(server, 1e6))
    await server.started.wait()
    os.kill(os.getpid(), signal.SIGTERM)
    await draining.wait()
    os.kill(os.getpid(), signal.SIGTERM)
    assert await task == 0
    assert server.calls[-1] == "close"


async def test_a_signal_while_it_starts_closes_without_serving():
    loading = asyncio.Event()

    async def forever():
        loading.set()
        await asyncio.Event().wait()

    server = Fake(start=forever)
    task = asyncio.create_task(serve(server, 5))
    await loading.wait()
    os.kill(os.getpid(), signal.SIGTERM)
    assert await task == 0
    assert server.calls == ["start", "close"]


async def test_a_server_that_must_be_replaced_says_so_by_its_status():
    server, restart = Fake(), asyncio.Event()
    task = asyncio.create_task(serve(server, 1e6, restart))
    await server.started.wait()
    restart.set()
    assert await task == EXIT_RESTART == 75
    assert server.calls == ["start", ("drain", RESTART_DRAIN_S), "close"]


async def test_a_server_that_cannot_start_is_closed_and_its_error_raised():
    async def fail():
        raise ConfigError("port taken")

    server = Fake(start=fail)
    with pytest.raises(ConfigError, match="port taken"):
        await serve(server, 1)
    assert server.calls == ["start", "close"]
