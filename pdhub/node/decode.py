"""One node: an engine, a transport, a control channel and an HTTP server, started in order and closed in reverse."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from typing import Final

from pdhub import __version__
from pdhub.api.engine import DecodeEngine, EngineContext, EngineInfo
from pdhub.api.errors import ConfigError, PluginError
from pdhub.api.transport import Transport
from pdhub.config.build import Plan
from pdhub.config.models import NodeConfig, PoolConfig
from pdhub.core.lease_state import LeaseTimes
from pdhub.node.blocking import in_thread
from pdhub.node.control import ControlServer
from pdhub.node.http import make_app
from pdhub.node.receiver import Receiver
from pdhub.node.trace import Event
from pdhub.telemetry.node import NodeMetrics
from pdhub.wire.capabilities import told
from pdhub.wire.control import PROTOCOL
from pdhub.wire.http import NodeInfo
from pdhub.wire.server import HttpServer

log = logging.getLogger("pdhub.node")

CLOSE_SLACK_S: Final = 3.0
"""Beyond the time that a fence and a cancelled stream may take."""


class NodeServer:
    """A node of a pool, in this process. Signals are the caller's business.

    Args:
        plan: validated. pool: name of its pool. node: its own section.
    """

    def __init__(self, plan: Plan, pool: str, node: NodeConfig) -> None:
        self._plan = plan
        self._pool: PoolConfig = next(p for p in plan.config.pools if p.name == pool)
        self._node = node
        self._transport: Transport | None = None
        self._engine: DecodeEngine | None = None
        self._receiver: Receiver | None = None
        self._control: ControlServer | None = None
        self._http: HttpServer | None = None
        self._closing: asyncio.Task[None] | None = None
        self.restart_wanted = asyncio.Event()
        self.restart_reason: str | None = None

    @property
    def url(self) -> str:
        """Of the HTTP server; after :meth:`start`."""
        assert self._http is not None, "not started"
        return self._http.url

    @property
    def control(self) -> tuple[str, int]:
        """Host and port of the control channel; after :meth:`start`."""
        assert self._control is not None, "not started"
        return self._control.host, self._control.port

    @property
    def receiver(self) -> Receiver:
        """Leases, slots and landings; after :meth:`start`."""
        assert self._receiver is not None, "not started"
        return self._receiver

    @property
    def events(self) -> deque[Event]:
        """The newest events, oldest first; after :meth:`start`."""
        return self.receiver.trace.events

    async def start(self) -> None:
        """Load the engine, then listen. Closes what it opened if anything fails.

        Raises:
            ConfigError, PluginError: with what to do.
        """
        try:
            await self._start()
        except BaseException:
            await self.close()
            raise

    async def _start(self) -> None:
        plan, name = self._plan, self._node.name
        resolved = plan.pools[self._pool.name]
        if resolved.spec.runtime is None:
            raise ConfigError(
                f"engine '{resolved.spec.name}' of pool '{self._pool.name}' is not hosted by `pdhub node`",
                hint="start it with its own command and set `launch: false`",
            )
        transport = self._transport = plan.transport.spec.factory(plan.transport.config)
        caps = await in_thread(transport.open, "pdhub-open")
        log.info("%s: transport %s, fenced by: %s", name, transport.name, caps.fences_by or "not said")
        context = EngineContext(
            transport=transport,
            landings=self._pool.landings or 0,
            model_path=plan.config.model.path,
            name=name,
            threads=self._node.threads,
        )
        engine = self._engine = resolved.spec.runtime(resolved.config, context)
        info = await engine.start()
        _check(info, resolved.spec.name)
        handoff = plan.config.handoff
        receiver = self._receiver = Receiver(
            engine,
            info,
            transport,
            capacity=self._pool.landings or info.capabilities.slots + 1,
            times=LeaseTimes(
                deadline_s=handoff.deadline_s,
                ready_ttl_s=handoff.ready_ttl_s,
                fence_within_s=handoff.fence_within_s,
            ),
            claim_ttl_s=handoff.claim_ttl_s,
            metrics=NodeMetrics(name),
            restart=self._want_restart,
        )
        control = self._control = ControlServer(
            receiver,
            self._node.host,
            self._node.control_port,
            node=name,
            transport=transport.name,
            metadata=transport.export_metadata().data,
            accepts=frozenset(layout.fingerprint for layout in info.accepts),
        )
        await control.start()
        app = make_app(
            receiver,
            self._info,
            verify=handoff.verify,
            connections=lambda: control.connections,
            body_limit=plan.config.router.body_limit_bytes,
        )
        self._http = HttpServer(app, self._node.host, self._node.port, f"node {name}")
        await self._http.start()
        log.info("%s: %s serves at %s, senders at %s:%d", name, resolved.spec.name, self.url, *self.control)

    def _info(self) -> NodeInfo:
        info = self.receiver.info
        return NodeInfo(
            node=self._node.name,
            version=__version__,
            protocol=PROTOCOL,
            engine=self._plan.pools[self._pool.name].spec.name,
            model=info.model,
            transport=self._transport.name if self._transport is not None else "",
            capabilities=told(info.capabilities),
            accepts=[layout.fingerprint for layout in info.accepts],
            landings=self.receiver.table.landings.capacity,
            control=self.control,
        )

    def _want_restart(self, reason: str) -> None:
        """Memory or a slot is lost for good in this process: take no more work, let the owner replace it."""
        if self.restart_reason is not None:
            return
        log.critical("%s must restart: %s", self._node.name, reason)
        self.restart_reason = reason
        if self._receiver is not None:
            self._receiver.refuse_claims = "restarting"
        self.restart_wanted.set()

    async def drain(self, timeout_s: float) -> None:
        """Refuse new claims; let claimed and running requests finish, at most ``timeout_s`` seconds."""
        receiver = self.receiver
        receiver.refuse_claims = receiver.refuse_claims or "draining"
        try:
            async with asyncio.timeout(timeout_s):
                await receiver.idle.wait()
        except TimeoutError:
            log.warning("%s: %d leases did not finish within %g s", self._node.name, len(receiver.table), timeout_s)

    async def close(self) -> None:
        """End what still runs (clients get an error), then release everything. Idempotent."""
        if self._closing is None:
            self._closing = asyncio.get_running_loop().create_task(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        receiver = self._receiver
        if receiver is not None:
            receiver.end_all()
        if self._control is not None:
            await self._control.close()
        if receiver is not None:
            slowest = max(self._plan.config.handoff.fence_within_s, receiver.info.capabilities.cancel_within_s)
            await receiver.close(slowest + CLOSE_SLACK_S)
        if self._http is not None:
            await self._http.stop()
        if self._engine is not None:
            await self._engine.close()
        if self._transport is not None:
            await in_thread(self._transport.close, "pdhub-close")


def _check(info: EngineInfo, engine: str) -> None:
    caps = info.capabilities
    if not info.accepts:
        raise PluginError(f"engine '{engine}' accepts no KV layout, so it cannot be hosted by `pdhub node`")
    if caps.max_context < 2 or caps.slots < 1:
        raise PluginError(f"engine '{engine}' declares {caps.slots} slots and a context of {caps.max_context} tokens")
