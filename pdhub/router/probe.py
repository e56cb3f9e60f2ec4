"""Keeps asking every endpoint whether it can serve, and what it can do."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Any

from pdhub.api.client import Call, EngineClient
from pdhub.api.engine import EngineLoad
from pdhub.api.errors import AdmissionRejected, EngineFailed, InvalidRequest, PDHubError
from pdhub.config.models import RouterConfig
from pdhub.router.caller import Caller
from pdhub.router.endpoint import Endpoint
from pdhub.router.errors import Unreachable

log = logging.getLogger("pdhub.router.probe")

EAGER_S = 0.1
"""Between the first probes of an endpoint that has never answered: a start is not slowed down by the interval."""

EAGER_SHARE = 1 / 150
"""Of the time waited for a first answer, what may pass between two probes: noticing a start adds so little to it, and
an endpoint that never comes is soon asked no oftener than any other."""

SIGNALS = ("running", "waiting", "kv_usage")
"""Of an engine's load, what a foreign server is expected to tell; the rest only nodes of pdhub know."""

HEALTH = Call("GET", "/health")
PREFILL = Call("GET", "/prefill")


class Prober:
    """One task an endpoint.

    Args:
        changed: called with the endpoint after every probe.
    """

    def __init__(
        self, caller: Caller, config: RouterConfig, clock: Callable[[], float], changed: Callable[[Endpoint], None]
    ) -> None:
        self._caller = caller
        self._config = config
        self._clock = clock
        self._changed = changed
        self._tasks: list[asyncio.Task[None]] = []
        self._said: set[tuple[str, str]] = set()

    def watch(self, endpoint: Endpoint, client: EngineClient | None) -> None:
        """Start asking. ``client`` describes the calls; None for an embedded prefill instance."""
        self._tasks.append(asyncio.create_task(self._loop(endpoint, client), name=f"probe {endpoint.name}"))

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()

    async def _loop(self, endpoint: Endpoint, client: EngineClient | None) -> None:
        began = self._clock()
        while True:
            await self._probe(endpoint, client)
            try:
                self._changed(endpoint)
            except Exception:  # a plugin's client; probing goes on
                log.exception("what '%s' told cannot be used", endpoint.name)
            interval = self._config.probe_interval_s
            await asyncio.sleep(interval if endpoint.info else first_pause(self._clock() - began, interval))

    async def _probe(self, endpoint: Endpoint, client: EngineClient | None) -> None:
        limit = min(self._config.probe_timeout_s, self._config.idle_timeout_s)
        before = endpoint.problem
        try:
            async with asyncio.timeout(limit):
                info = await self._ask(endpoint, client)
            endpoint.answered(info, self._clock())
            endpoint.writes = _writes(endpoint, client)
            if before:
                log.info("'%s' is ready", endpoint.name)
            return
        except AdmissionRejected as error:  # it answers, and says that it takes nothing new
            endpoint.seen(self._clock())
            endpoint.draining = True
            problem = error.message
        except TimeoutError:
            problem = f"does not answer within {limit:g} s"
            endpoint.missed(problem)
        except PDHubError as error:
            problem = error.message
            endpoint.missed(problem, gone=isinstance(error, Unreachable))
        except Exception as error:  # a plugin's client stumbled over an answer
            log.exception("the probe of '%s' failed", endpoint.name)
            problem = f"its answer cannot be read: {type(error).__name__}"
            endpoint.missed(problem)
        if problem != before:
            log.warning("'%s' is not ready: %s", endpoint.name, problem)
        endpoint.problem = problem

    async def _ask(self, endpoint: Endpoint, client: EngineClient | None) -> Mapping[str, Any]:
        if endpoint.hosted:
            await self._caller.document(endpoint, HEALTH)
        if client is None:
            return await self._caller.document(endpoint, PREFILL)
        target = endpoint.target()
        info: Mapping[str, Any] = await self._caller.document(endpoint, client.probe(target))
        if details := client.details(target):
            info = {**info, **{name: await self._caller.document(endpoint, call) for name, call in details.items()}}
        client.capabilities(info)  # raises while the node cannot serve
        await self._ask_load(endpoint, client)
        return info

    async def _ask_load(self, endpoint: Endpoint, client: EngineClient) -> None:
        """A load that cannot be told is unknown, and says nothing against the endpoint."""
        if (call := client.load(endpoint.target())) is None:
            return
        try:
            load = client.parse_load(await self._caller.answer(endpoint, call))
        except (EngineFailed, InvalidRequest) as error:
            endpoint.told(EngineLoad(), self._clock())
            self._say(endpoint, f"it cannot be read: {error.message}")
            return
        for signal in SIGNALS:
            if getattr(load, signal) is None:
                self._say(endpoint, f"it does not tell '{signal}', which counts as unknown")
        endpoint.told(load, self._clock())

    def _say(self, endpoint: Endpoint, what: str) -> None:
        """Once."""
        if (endpoint.name, what) not in self._said:
            self._said.add((endpoint.name, what))
            log.warning("load of '%s': %s", endpoint.name, what)


def first_pause(waited_s: float, interval_s: float) -> float:
    """Seconds to the next probe of an endpoint that was asked for ``waited_s`` and has never answered."""
    return min(interval_s, max(EAGER_S, waited_s * EAGER_SHARE))


def _writes(endpoint: Endpoint, client: EngineClient | None) -> frozenset[str]:
    if client is not None:
        return client.writes(endpoint.target())
    fingerprint = endpoint.info.get("fingerprint")
    return frozenset({fingerprint}) if isinstance(fingerprint, str) and fingerprint else frozenset()
