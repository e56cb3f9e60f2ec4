"""The host of an embedded prefill instance: one engine's prefill facet, one transport, one sender, one HTTP server."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import asdict

from pdhub import __version__
from pdhub.api.engine import EngineContext
from pdhub.api.errors import ConfigError
from pdhub.api.prefill import PrefillEngine, PrefillInfo
from pdhub.api.transport import Transport
from pdhub.config.build import Plan
from pdhub.config.models import PrefillConfig
from pdhub.node.prefill_http import make_app
from pdhub.node.prefill_metrics import PrefillMetrics
from pdhub.node.prefill_service import PrefillService
from pdhub.sender import Sender
from pdhub.wire.capabilities import told
from pdhub.wire.control import PROTOCOL
from pdhub.wire.http import PrefillInfoReply
from pdhub.wire.server import HttpServer

log = logging.getLogger("pdhub.prefill")

BODY_SLACK = 1 << 16
"""Bytes that the router adds to a client's body."""


class PrefillServer:
    """Usable in process; installs no signal handlers.

    Args:
        plan: validated configuration. prefill: this instance's section of it.
    """

    def __init__(self, plan: Plan, prefill: PrefillConfig) -> None:
        self._plan = plan
        self._prefill = prefill
        self._transport: Transport | None = None
        self._engine: PrefillEngine | None = None
        self._sender: Sender | None = None
        self._service: PrefillService | None = None
        self._http: HttpServer | None = None

    @property
    def url(self) -> str:
        """Where it listens; after :meth:`start`."""
        if self._http is None:
            raise RuntimeError("not started")
        return self._http.url

    @property
    def sender(self) -> Sender:
        """The sending half, for tests and metrics; after :meth:`start`."""
        if self._sender is None:
            raise RuntimeError("not started")
        return self._sender

    @property
    def active(self) -> int:
        """Requests that are not over, hand-overs in the background included."""
        return self._service.active if self._service is not None else 0

    async def start(self) -> None:
        """Load the engine, then listen. Raises ConfigError or PluginError; nothing is left behind then."""
        try:
            await self._start()
        except BaseException:
            await self.close()
            raise

    async def drain(self, timeout_s: float) -> bool:
        """Refuse new requests, let open ones end. True if they all did within ``timeout_s`` seconds."""
        return await self._service.drain(timeout_s) if self._service is not None else True

    async def close(self) -> None:
        """Stop everything, at once. Idempotent."""
        service, self._service = self._service, None
        if service is not None:
            await service.close()
        if self._http is not None:
            await self._http.stop()
        sender, self._sender = self._sender, None
        if sender is not None:
            await asyncio.to_thread(sender.close)
        engine, self._engine = self._engine, None
        if engine is not None:
            await engine.close()
        transport, self._transport = self._transport, None
        if transport is not None:
            transport.close()

    async def _start(self) -> None:
        plan, prefill = self._plan, self._prefill
        resolved = plan.prefill[prefill.name]
        if resolved.spec.prefill is None:
            raise ConfigError(
                f"engine '{resolved.spec.name}' has no embedded prefill",
                where=f"prefill '{prefill.name}'",
                hint="choose an engine with a prefill facet, or run that engine's own server",
            )
        transport = plan.transport.spec.factory(plan.transport.config)
        caps = transport.open()
        self._transport = transport
        context = EngineContext(transport, 0, plan.config.model.path, prefill.name, prefill.threads)
        engine = resolved.spec.prefill(resolved.config, context)
        self._engine = engine
        info = await engine.start()
        sender = Sender(
            transport,
            name=prefill.name,
            layout=info.layout,
            chunk_tokens=min(info.chunk_tokens, info.capabilities.max_context),
            staging_bytes=plan.config.handoff.staging_bytes,
            verify=plan.config.handoff.verify,
            max_ops=caps.max_ops,
            connect_timeout_s=plan.config.router.connect_timeout_s,
        )
        self._sender = sender
        metrics = PrefillMetrics()
        service = PrefillService(
            engine,
            info,
            sender,
            metrics,
            waiting_limit=plan.config.admission.queue_limit,
            idle_timeout_s=plan.config.router.idle_timeout_s,
        )
        self._service = service
        metrics.watch("waiting", "Requests that wait for their turn.", lambda: service.waiting)
        metrics.watch("active", "Requests that are not over.", lambda: service.active)
        metrics.watch("staging_slots_free", "Free staging slots.", lambda: sender.stats().slots_free)
        app = make_app(
            service,
            info,
            lambda: self._reply(info),
            metrics,
            model=plan.config.model.name,
            aliases=plan.config.model.aliases,
            body_limit=plan.config.router.body_limit_bytes + BODY_SLACK,
        )
        self._http = HttpServer(app, prefill.host, prefill.port, f"prefill '{prefill.name}'")
        await self._http.start()
        log.info("prefill %s listens on %s", prefill.name, self.url)

    def _reply(self, info: PrefillInfo) -> PrefillInfoReply:
        return PrefillInfoReply(
            node=self._prefill.name,
            version=__version__,
            protocol=PROTOCOL,
            engine=self._plan.prefill[self._prefill.name].spec.name,
            model=info.layout.model,
            transport=self._plan.transport.spec.name,
            fingerprint=info.layout.fingerprint,
            max_model_len=info.capabilities.max_context,
            capabilities=told(info.capabilities),
            sampling_defaults={name: float(value) for name, value in info.sampling_defaults.items()},
            eos_token_ids=list(info.eos_token_ids),
            layout=asdict(info.layout),
        )
