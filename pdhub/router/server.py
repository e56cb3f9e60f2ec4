"""The router as an object: start it on a running loop, use its URL, close it. No signal handling inside."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pydantic import BaseModel

from pdhub.api.client import EngineClient
from pdhub.api.errors import ConfigError
from pdhub.api.policy import Health
from pdhub.config.build import Plan
from pdhub.config.models import NodeConfig, PoolConfig, RouterConfig
from pdhub.config.parsing import parser_context, parser_features, refuse_parser, splits_reasoning
from pdhub.config.seeds import latency_seeds
from pdhub.config.settings import secret
from pdhub.core.admission import AdmissionQueue
from pdhub.core.latency import LatencyModel
from pdhub.router.app import make_app
from pdhub.router.breaker import Breaker
from pdhub.router.caches import Caches
from pdhub.router.caller import Caller
from pdhub.router.clients.node import NodeClient
from pdhub.router.context import Context
from pdhub.router.endpoint import Endpoint
from pdhub.router.fleet import Fleet, Pool
from pdhub.router.gate import Gate
from pdhub.router.generation import Generation, load_generation
from pdhub.router.janitor import Janitor
from pdhub.router.leftovers import Leftovers
from pdhub.router.lines import Lines, ahead_of
from pdhub.router.paircheck import PairChecker
from pdhub.router.parsing import Parsing
from pdhub.router.presentation import load_text_decoder
from pdhub.router.probe import Prober
from pdhub.router.recycle import Recycler
from pdhub.router.relay import Upstream
from pdhub.router.reload import Reloader
from pdhub.router.rulebook import rulebook
from pdhub.telemetry.decisions import DecisionFile, DecisionLog, to_logger
from pdhub.telemetry.observer import Observer
from pdhub.telemetry.router import LiveRules, RouterMetrics
from pdhub.wire.server import HttpServer

STALE_PROBES = 2
"""So many probe intervals, and one probe, after it was told, an engine's load is no longer known."""

ABSENT = frozenset({Health.STARTING, Health.DRAINING, Health.DOWN})


class RouterServer:
    """Args:
    plan: validated configuration. Nodes need not be up yet: they are probed until they are.
    reload: reads it again, for a change of ``policy`` or ``admission``; called in a thread. None = it never changes.

    Raises:
        ConfigError: no tokenizer though a pool speaks tokens, a missing key, an engine that cannot be routed.
    """

    def __init__(self, plan: Plan, reload: Callable[[], Plan] | None = None) -> None:
        self.plan = plan
        self._upstream = Upstream()
        config, clock = plan.config, time.monotonic
        latency = LatencyModel(latency_seeds(config))
        limit = config.admission.queue_limit
        gate = Gate({pool.name: AdmissionQueue(limit=limit, capacity=0) for pool in config.pools}, clock)
        lines = Lines([p.name for p in config.prefill], ahead_of(config.admission), clock)
        fleet = Fleet(
            [self._pool(pool) for pool in config.pools],
            [
                self._endpoint(p, hosted=e.spec.prefill is not None, options=e.config, role="prefill", serves=p.pools)
                for p, e in ((p, plan.prefill[p.name]) for p in config.prefill)
            ],
            pair_open_s=config.router.breaker_open_s,
            latency=latency,
            load_stale_s=STALE_PROBES * config.router.probe_interval_s + config.router.probe_timeout_s,
            waiting=gate.waiting,
        )
        caches, leftovers = Caches(), Leftovers(clock)
        recycler = Recycler(fleet, config.router.recycle, clock)
        metrics = RouterMetrics(
            lambda: [(e.name, e.in_flight, e.usable(clock())) for e in fleet.endpoints()],
            gate.waiting,
            lambda: [(name, *told) for name, told in lines.told().items()],
            latency.errors,
            self._live,
            lambda: [(p, n, not found.held) for (p, n), found in fleet.pairs.found.items()],
            caches.blocks,
            leftovers.held,
            recycler.ratios,
        )
        caller = Caller(self._upstream, config.router, clock)
        tokenizer = self._tokenizer(fleet)
        parsing = self._parsing(fleet)
        self.context = Context(
            plan=plan,
            fleet=fleet,
            rules=rulebook(plan),
            caller=caller,
            gate=gate,
            lines=lines,
            janitor=Janitor(lambda result: metrics.cancels.labels(result).inc()),
            metrics=metrics,
            text=None if tokenizer is None else load_text_decoder(tokenizer),
            generation=Generation() if tokenizer is None else load_generation(tokenizer),
            parsing=parsing,
            observer=None,
            clock=clock,
            recycler=recycler,
            decisions=_decisions(config.router),
            caches=caches,
            leftovers=leftovers,
        )
        self.reloader = Reloader(self.context, reload, plan.path, config.router.reload_interval_s)
        self._told: dict[str, tuple[bool, Mapping[str, Any]]] = {}
        self._prober = Prober(caller, config.router, clock, self._probed)
        self._instances = {name: self._instance(name) for name in fleet.prefills}
        self._checker: PairChecker | None = None
        if config.router.pair_check:
            checks = metrics.pair_checks
            self._checker = PairChecker(self.context, self._instances.get, lambda verdict: checks.labels(verdict).inc())
        self._http = HttpServer(
            make_app(self.context, self.reloader), config.router.host, config.router.port, "the router"
        )

    @property
    def url(self) -> str:
        return self._http.url

    async def start(self) -> None:
        """Bind and serve. ``/ready`` says when nodes are there. Raises ConfigError if the port is taken or a package is
        missing."""
        await self._upstream.start()
        if self.plan.registry.has_observers:
            self.context.observer = Observer(self.plan.registry.request_finished)
        try:
            self._listen()
            await self.context.parsing.start()
            await self._http.start()
        except BaseException:
            await self._http.stop()
            await self.context.parsing.close()
            await self.context.caches.close()
            await self._upstream.close()
            raise
        self.reloader.start()
        fleet = self.context.fleet
        for pool in fleet.pools.values():
            for node in pool.nodes.values():
                self._prober.watch(node, pool.client)
        for prefill in fleet.prefills.values():
            self._prober.watch(prefill, self._instances[prefill.name])

    def _listen(self) -> None:
        """To what engines tell unasked. Raises ConfigError if what it takes is not installed."""
        fleet = self.context.fleet
        known = [(node, pool.client) for pool in fleet.pools.values() for node in pool.nodes.values()]
        for endpoint, client in [*known, *((p, self._instances[p.name]) for p in fleet.prefills.values())]:
            if client is not None:
                endpoint.reads = client.told_load
                self.context.caches.watch(endpoint, client)

    async def drain(self, timeout_s: float) -> bool:
        """Refuse new requests with 503 and let open answers end. True if all ended in time."""
        context = self.context
        context.draining = True
        context.gate.close()
        context.lines.close()
        try:
            async with asyncio.timeout(timeout_s):
                await context.requests.none()
        except TimeoutError:
            return False
        return True

    async def close(self) -> None:
        """Stop at once, but tell nodes what was cut off. Idempotent."""
        self.context.draining = True
        self.context.gate.close()
        self.context.lines.close()
        await self.reloader.close()
        await self._http.stop()
        await self._prober.close()
        await self.context.caches.close()
        if self._checker is not None:
            await self._checker.close()
        await self.context.janitor.close()
        await self.context.parsing.close()
        await self._upstream.close()
        if self.context.observer is not None:
            self.context.observer.close()
        self.context.decisions.close()

    def _live(self) -> LiveRules:
        context, last = self.context, self.reloader.last
        rules = context.rules
        failing = last is not None and bool(last.problem)
        return LiveRules(rules.policy.name, rules.version, rules.since_s, failing, context.decisions.dropped)

    def _probed(self, endpoint: Endpoint) -> None:
        if endpoint.gone:
            self.context.caches.gone(endpoint.name)
        self.context.recycler.probed(endpoint)
        self._refresh(endpoint)
        if self._checker is not None:
            self._checker.probed(endpoint)

    def _refresh(self, endpoint: Endpoint) -> None:
        """After a probe: capabilities, capacity and the policies' picture follow. Most probes bring nothing new."""
        context = self.context
        now = context.clock()
        told = (endpoint.health(now) in ABSENT, endpoint.info)
        if told == self._told.get(endpoint.name):
            context.fleet.changed(endpoint)
            return
        for pool in context.fleet.pools.values():
            pool.learn()
            # Not of nodes whose breaker is open: that passes by itself, and the policy already leaves them out.
            there = [n for n in pool.nodes.values() if n.health(now) not in ABSENT]
            context.gate.resize(pool.name, sum(_places(pool.client, n) for n in there))
        context.fleet.changed()
        self._told[endpoint.name] = told

    def _instance(self, name: str) -> EngineClient | None:
        """What speaks to a prefill instance; None for one of `pdhub node`."""
        engine = self.plan.prefill[name]
        embedded = engine.spec.prefill is not None or engine.spec.client is None
        return None if embedded or engine.spec.client is None else engine.spec.client(engine.config)

    def _pool(self, pool: PoolConfig) -> Pool:
        engine = self.plan.pools[pool.name]
        hosted = engine.spec.client is None
        client: EngineClient
        if engine.spec.client is None:
            client = NodeClient(self.plan.config.handoff.claim_ttl_s)
        else:
            client = engine.spec.client(engine.config)
        return Pool(
            name=pool.name,
            client=client,
            nodes={n.name: self._endpoint(n, hosted=hosted, options=engine.config) for n in pool.nodes},
            models=frozenset({self.plan.config.model.name}),
            cost=pool.cost,
            labels=pool.labels,
        )

    def _endpoint(
        self, node: NodeConfig, *, hosted: bool, options: BaseModel, role: str = "decode", serves: Sequence[str] = ()
    ) -> Endpoint:
        router: RouterConfig = self.plan.config.router
        host = f"[{node.host}]" if ":" in node.host else node.host
        return Endpoint(
            node.name,
            f"{node.scheme}://{host}:{node.port}",
            breaker=Breaker(router.breaker_failures, router.breaker_open_s, router.first_byte_timeout_s),
            probe_failures=router.probe_failures,
            hosted=hosted,
            api_key=secret(node.api_key_env),
            labels=node.labels,
            config=options.model_dump(mode="json"),
            role=role,
            serves=serves,
        )

    def _parsing(self, fleet: Fleet) -> Parsing:
        """Only where a pool speaks tokens; but what clients are told of the model does not depend on it. Raises
        ConfigError for what the plugin finds wrong."""
        plan, reasons = self.plan, splits_reasoning(self.plan)
        if plan.parser is None or not any(pool.client.speaks_tokens for pool in fleet.pools.values()):
            return Parsing(reasons=reasons)
        refuse_parser(plan)
        factory = plan.parser.spec.factory(plan.parser.config, parser_context(plan, self._parser_changed))
        parsing = Parsing(factory, parser_features(plan), reasons=reasons)
        for pool in fleet.pools.values():
            pool.lends = parsing.features
        return parsing

    def _parser_changed(self) -> None:
        """What pools that speak tokens can do is another thing now."""
        fleet = self.context.fleet
        for pool in fleet.pools.values():
            pool.learn()
        fleet.changed()

    def _tokenizer(self, fleet: Fleet) -> str | None:
        """Where the detokeniser is, if any pool speaks tokens."""
        if not any(pool.client.speaks_tokens for pool in fleet.pools.values()):
            return None
        model = self.plan.config.model
        path = model.tokenizer or model.path
        if path is None:
            hint = "set model.tokenizer to a directory that has a tokenizer.json, or to that file"
            raise ConfigError("the router needs the model's tokenizer", where="model.tokenizer", hint=hint)
        return path


def _places(client: EngineClient, node: Endpoint) -> int:
    """Requests that a node takes at once: landings of a hosted node, else what its client declares."""
    landings = node.info.get("landings")
    return landings if isinstance(landings, int) else client.capabilities(node.info).slots


def _decisions(config: RouterConfig) -> DecisionLog:
    """Kept in memory only where somebody can look at them."""
    wanted = config.decisions
    keep = wanted.keep if config.debug_headers else 0
    if not wanted.sample:
        return DecisionLog(keep)
    write = to_logger if wanted.file is None else DecisionFile(wanted.file, wanted.file_bytes)
    return DecisionLog(keep, wanted.sample, write)
