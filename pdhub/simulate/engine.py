"""Engines that are only cost models: prefill instances and decode nodes under virtual time."""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict, deque
from collections.abc import Callable

from pdhub.simulate.cost import DecodeCost, PrefillCost
from pdhub.simulate.loop import Loop
from pdhub.simulate.traces import BLOCK_TOKENS
from pdhub.simulate.truth import Factor
from pdhub.simulate.workload import Arrival

RECHECK_S = 0.5
"""Speed that drifts is looked at again after this, even if nobody comes or goes."""


class Prefill:
    """One prompt after the other, with a prefix cache."""

    __slots__ = ("_cache", "_cost", "_factor", "_jobs", "_loop", "busy_s", "name", "tail_s")

    def __init__(self, loop: Loop, name: str, cost: PrefillCost, factor: Factor) -> None:
        self.name = name
        self.busy_s = 0.0
        self.tail_s = 0.0
        self._loop = loop
        self._cost = cost
        self._factor = factor
        self._cache: OrderedDict[int, None] = OrderedDict()
        self._jobs: deque[tuple[Arrival, Callable[[int], None]]] = deque()

    def submit(self, request: Arrival, done: Callable[[int], None]) -> None:
        """``done`` is called with the number of cached tokens when the prompt is computed. ``tail_s`` is about when
        everything will be that is here."""
        self.tail_s = self.ready_s(request)
        self._jobs.append((request, done))
        if len(self._jobs) == 1:
            self._start()

    def ready_s(self, request: Arrival) -> float:
        """True time at which this prompt would be computed if it came now, but for prefixes that are cached by
        then."""
        now = self._loop.now
        cached = self._cached(request)
        return max(now, self.tail_s) + self._time_s(request, cached, now)

    def alone_s(self, request: Arrival) -> float:
        """True time that this prompt takes, but for prefixes that are not cached yet."""
        return self._time_s(request, self._cached(request), self._loop.now)

    def _time_s(self, request: Arrival, cached: int, now: float) -> float:
        time_ms = self._cost.time_ms(request.prompt_tokens, cached) * self._factor.at(now)
        if self._cost.spread:
            time_ms *= math.exp(self._cost.spread * request.luck)
        return time_ms / 1000

    def _start(self) -> None:
        request, done = self._jobs[0]
        now = self._loop.now
        cached = self._cached(request)
        took = self._time_s(request, cached, now)
        self.busy_s += took
        self._loop.at(now + took, self._finish, (request, done, cached))

    def _finish(self, job: tuple[Arrival, Callable[[int], None], int]) -> None:
        request, done, cached = job
        self._remember(request)
        self._jobs.popleft()
        if self._jobs:
            self._start()
        done(cached)

    def _cached(self, request: Arrival) -> int:
        if not self._cost.cache_tokens:
            return 0
        blocks = 0
        for block in request.prefix:
            if block not in self._cache:
                break
            blocks += 1
        return min(request.prompt_tokens - 1, blocks * BLOCK_TOKENS)

    def _remember(self, request: Arrival) -> None:
        if not self._cost.cache_tokens:
            return
        for block in reversed(request.prefix):
            self._cache.pop(block, None)
            self._cache[block] = None
        while len(self._cache) * BLOCK_TOKENS > self._cost.cache_tokens:
            self._cache.popitem(last=False)


class Running:
    """One request in a slot. ``slow`` multiplies its time of a token."""

    __slots__ = ("begun", "done", "end", "first", "number", "request", "slow", "start_s")

    def __init__(
        self,
        request: Arrival,
        slow: float,
        begun: float,
        start_s: float,
        number: int,
        first: Callable[[], None],
        done: Callable[[], None],
    ) -> None:
        self.request = request
        self.slow = slow
        self.begun = begun
        self.end = begun + (request.output_tokens - 1) * slow
        self.start_s = start_s
        self.number = number
        self.first = first
        self.done = done

    def __lt__(self, other: Running) -> bool:
        return (self.end, self.number) < (other.end, other.number)


class Node:
    """Its running requests share every step. Progress is one number, ``_steps``: how many tokens a request that ran
    from the beginning would have; so that a change of speed costs the same however many are running."""

    __slots__ = (
        "_context", "_due", "_factor", "_loop", "_number", "_since", "_step_ms", "_steps", "_waiting",
        "busy_s", "cost", "name", "prefill", "running", "slot_s", "tokens",
    )  # fmt: skip

    def __init__(self, loop: Loop, name: str, cost: DecodeCost, factor: Factor) -> None:
        self.name = name
        self.cost = cost
        self.prefill = Prefill(loop, name, cost.prefill, factor) if cost.prefill is not None else None
        self.running: list[Running] = []
        self.busy_s = self.slot_s = 0.0
        self.tokens = 0
        self._loop = loop
        self._factor = factor
        self._steps = 0.0
        self._since = 0.0
        self._step_ms = 1.0
        self._context = 0.0
        self._number = 0
        self._due = 0
        self._waiting: deque[tuple[Arrival, Callable[[], None], Callable[[], None]]] = deque()

    def ready(self, request: Arrival, first: Callable[[], None], done: Callable[[], None]) -> None:
        """Its KV is here. ``first`` is called when it has a slot, ``done`` when its last token is there."""
        if len(self.running) >= self.cost.slots:
            self._waiting.append((request, first, done))
            return
        self._advance()
        self._begin(request, first, done)
        self._plan()

    @property
    def waiting(self) -> list[Arrival]:
        """Those that are ready and have no slot, next one first."""
        return [request for request, _, _ in self._waiting]

    def produced(self, run: Running) -> int:
        """Tokens of a running request so far."""
        return 1 + int(max(0.0, self.steps() - run.begun) / run.slow)

    def steps(self) -> float:
        """Tokens that a request of normal speed would have if it had run here whenever somebody did."""
        return self._steps + ((self._loop.now - self._since) * 1000 / self._step_ms if self.running else 0.0)

    def token_ms(self, running: int, context: float) -> float:
        """True time of a token with so many requests, as things are now."""
        return self.cost.token_ms(running, context) * self._factor.at(self._loop.now)

    def factor_at(self, now: float) -> float:
        """How much slower than its cost model it is at that time."""
        return self._factor.at(now)

    def left(self, run: Running) -> float:
        """Tokens that it still has to produce, in tokens of a request of normal speed."""
        return max(0.0, run.end - self.steps())

    def start_s(self, request: Arrival) -> float:
        """From the end of prefill to being ready."""
        return (self.cost.start_ms + self.cost.start_ms_per_token * request.prompt_tokens) / 1000

    @property
    def context(self) -> float:
        """Sum of the mean contexts of those that run."""
        return self._context

    def slow(self, request: Arrival) -> float:
        """How much slower than normal this request's tokens are."""
        return math.exp(self.cost.spread * request.luck) if self.cost.spread else 1.0

    def _advance(self) -> None:
        now = self._loop.now
        passed = now - self._since
        if passed > 0:
            if self.running:
                self._steps += passed * 1000 / self._step_ms
                self.busy_s += passed
                self.slot_s += passed * len(self.running)
            self._since = now

    def _begin(self, request: Arrival, first: Callable[[], None], done: Callable[[], None]) -> None:
        self._number += 1
        run = Running(request, self.slow(request), self._steps, self._loop.now, self._number, first, done)
        heapq.heappush(self.running, run)
        self._context += _context(request)
        self.tokens += request.output_tokens
        first()

    def _plan(self) -> None:
        """Speed as it is now, and a call when the next one is done."""
        self._due += 1
        if not self.running:
            self._context = 0.0
            return
        count = len(self.running)
        self._step_ms = self.token_ms(count, self._context / count)
        wait = max(0.0, self.running[0].end - self._steps) * self._step_ms / 1000
        if not self._factor.steady and wait > RECHECK_S:
            wait = RECHECK_S
        self._loop.at(self._loop.now + wait, self._look, self._due)

    def _look(self, due: int) -> None:
        if due != self._due:
            return
        self._advance()
        ended = []
        while self.running and self.running[0].end <= self._steps + 1e-7:
            run = heapq.heappop(self.running)
            self._context -= _context(run.request)
            ended.append(run)
        while self._waiting and len(self.running) < self.cost.slots:
            self._begin(*self._waiting.popleft())
        self._plan()
        for run in ended:
            run.done()


def _context(request: Arrival) -> float:
    return request.prompt_tokens + request.output_tokens / 2
