"""What goes wrong at the start says where and what, and leaves nothing behind."""

from __future__ import annotations

import dataclasses
import socket
import threading

import pytest

from pdhub.api import ConfigError, PrefillInfo, TransportSpec
from pdhub.node.prefill import PrefillServer
from pdhub.testing import toy
from pdhub.testing.memory import MemoryTransport
from tests.unit.prefill_host.planned import make_plan


class Watched(MemoryTransport):
    closed = 0

    def close(self) -> None:
        self.closed += 1
        super().close()


class Broken(toy.ToyPrefill):
    async def start(self) -> PrefillInfo:
        raise ConfigError("no such model", where="model.path")


async def fails(match: str, **options: object) -> None:
    transport = Watched()
    spec = TransportSpec(name="memory", summary="watched", factory=lambda config: transport)
    plan = make_plan(transport=spec, **options)  # type: ignore[arg-type]
    server = PrefillServer(plan, plan.config.prefill[0])
    before = threading.active_count()
    with pytest.raises(ConfigError, match=match):
        await server.start()
    assert transport.closed == 1
    assert threading.active_count() <= before
    await server.close()


async def test_staging_that_holds_no_two_chunks() -> None:
    await fails(r"handoff\.staging_bytes", handoff={"staging_bytes": 1000})


async def test_an_engine_that_cannot_start() -> None:
    spec = dataclasses.replace(toy.pdhub_register_engines()[0], prefill=Broken)
    await fails("no such model", engine=spec)


async def test_a_port_in_use() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        transport = Watched()
        spec = TransportSpec(name="memory", summary="watched", factory=lambda config: transport)
        plan = make_plan(transport=spec)
        section = plan.config.prefill[0].model_copy(update={"port": taken.getsockname()[1]})
        with pytest.raises(ConfigError, match="cannot listen"):
            await PrefillServer(plan, section).start()
        assert transport.closed == 1


async def test_an_engine_without_a_prefill_facet() -> None:
    spec = dataclasses.replace(toy.pdhub_register_engines()[0], prefill=None)
    plan = make_plan(engine=spec)
    with pytest.raises(ConfigError, match="has no embedded prefill"):
        await PrefillServer(plan, plan.config.prefill[0]).start()
