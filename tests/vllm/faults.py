"""How tests bring a request into a phase, and see what a fault in that phase does.

A phase is held by stopping an engine (SIGSTOP), so that no test depends on being quick enough: a stopped prefill engine
does not answer; a decode engine that wants KV from a stopped prefill engine has taken blocks for it and waits.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import secrets
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
from asking import Asking
from calls import at_once, get, post, token_ids
from fault_table import TABLE, Row
from world import Server, World, wait_for

TOKENS = 8
PHASE_S = 60
KILL_S = 2.0
IDLE_S = 60.0
"""Until all is free again: from the fault, or from the last answer, where one goes on after it. Where the tree starts a
decode node again: up to 1 s until the router's next probe, 5 s for which nothing happens there (`topology.RECYCLE`),
1 s for a second look, 1 s until `pdhub up` looks; the rest is the server's own end and start, while prefill starts."""
NEXT = 20


class Frozen:
    """A process that does not run. Leaving the context lets it run again; so does :meth:`thaw`, once."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        os.kill(pid, signal.SIGSTOP)
        self._stopped = True

    def thaw(self) -> None:
        if self._stopped:
            self._stopped = False
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGCONT)

    def __enter__(self) -> Frozen:
        return self

    def __exit__(self, *exc: object) -> None:
        self.thaw()


class Stage:
    """One pool of a tree, and the phases of its requests."""

    def __init__(self, world: World, pool: str) -> None:
        self.world = world
        self.pool = pool
        self.node = world.server(pool)
        self.prefill = world.server(f"prefill-{pool}")
        # Found beforehand: walking the process table takes a second on a busy machine, and phases are to be short.
        self.pids = {server.name: (server.pid, server.engine_pid) for server in world.servers.values()}

    def ask(self, *, stream: bool = False, tokens: int = TOKENS, prompt: str | None = None, **more: object) -> Asking:
        """Send a request through the pool. Its prompt is in no cache."""
        body = {
            "model": "m", "prompt": prompt or new_prompt(), "max_tokens": tokens, "temperature": 0, "ignore_eos": True,
            "return_token_ids": True, "stream": stream, **more,
        }  # fmt: skip
        return Asking(f"{self.world.router_url}/v1/completions", body, self.world.via(self.pool))

    def legs(self, name: str) -> int:
        """That the router has under way at a server."""
        _, text = get(f"{self.world.router_url}/metrics")
        found = re.search(rf'^pdhub_router_in_flight\{{endpoint="{name}"\}} (\S+)$', text, re.MULTILINE)
        assert found is not None, text
        return int(float(found[1]))

    @contextlib.contextmanager
    def in_prefill(self, count: int, **more: object) -> Iterator[tuple[list[Asking], Frozen]]:
        """Requests, alternately not streamed and streamed, whose prompts are being computed."""
        with Frozen(self.pids[self.prefill.name][1]) as frozen:
            asked = self._several(count, **more)
            self._until(lambda: self.legs(self.prefill.name) == count, "prefill legs are under way")
            yield asked, frozen

    @contextlib.contextmanager
    def asked(self, count: int, **more: object) -> Iterator[tuple[list[Asking], Frozen]]:
        """Prefill has answered and holds KV; decode's API server has the requests, its engine does not know yet."""
        with Frozen(self.pids[self.node.name][1]) as frozen:
            before = self.legs(self.node.name)
            asked = self._several(count, **more)
            self._until(lambda: self.legs(self.node.name) == before + count, "all are under way")
            self._until(lambda: self.legs(self.prefill.name) == 0, "prefill has answered")
            self._until(lambda: self.prefill.gauges()["kv_usage"] > 0, "prefill holds KV")
            yield asked, frozen

    @contextlib.contextmanager
    def loading(self, count: int, **more: object) -> Iterator[tuple[list[Asking], Frozen]]:
        """Decode has blocks for the KV of the requests and waits for it. What is yielded is prefill."""
        before = self.node.gauges()["kv_usage"]
        with self.asked(count, **more) as (asked, node), Frozen(self.pids[self.prefill.name][1]) as frozen:
            node.thaw()
            self._until(lambda: self.node.gauges()["kv_usage"] > before, "decode has taken blocks")
            assert not any(a.ended for a in asked), [str(a) for a in asked]
            yield asked, frozen

    def streaming(self, tokens: int = 1500) -> Asking:
        """A stream that has begun."""
        asked = self.ask(stream=True, tokens=tokens)
        self._until(lambda: asked.pieces >= 3, f"tokens come: {asked}")
        return asked

    def until_with_decode(self, count: int) -> None:
        """So many requests are at the node, and none is at the prefill instance."""
        self._until(lambda: self.legs(self.node.name) == count, "decode legs are under way")
        self._until(lambda: self.legs(self.prefill.name) == 0, "prefill has answered")

    def kill(self, server: Server) -> float:
        """SIGKILL to both processes of a server, as the kernel or a container's end does it. Returns the moment."""
        for pid in self.pids[server.name]:
            os.kill(pid, signal.SIGKILL)
        return time.monotonic()

    def _several(self, count: int, **more: object) -> list[Asking]:
        return [self.ask(stream=number % 2 == 1, **more) for number in range(count)]  # type: ignore[arg-type]

    def _until(self, what: Callable[[], bool], why: str) -> None:
        wait_for(what, PHASE_S, lambda: f"{self.pool}: {why}\n{self.world.log()}")


def staged(world: World, pool: str) -> Stage:
    """A pool of two servers, warm and idle."""
    if pool == "whole":
        pytest.skip("has one server")
    found = Stage(world, pool)
    world.warm()
    for server in (found.node, found.prefill):
        server.wait_idle()
    return found


@dataclass
class Outcome:
    """What a fault did, as :meth:`Watch.settle` found it."""

    gauges_s: float
    right: int
    again: bool


class Watch:
    """Before a fault: who lives. After it: does the rest live on, let go of everything, and answer rightly?"""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._rows: list[tuple[str, str, float]] = []
        self._answered_at = 0.0

    def saw(self, fault: str, asked: Asking, since: float, within_s: float | None = KILL_S) -> None:
        """A row of the table: what the client saw, and when. ``since``: of the fault. Fails if it came too late."""
        asked.join(90)
        assert asked.ended, f"{fault}: {asked} has no end\n{self._stage.world.log()}"
        seconds = max(0.0, asked.ended_at - since)
        self._answered_at = max(self._answered_at, asked.ended_at)
        self._rows.append((fault, asked.seen(), seconds))
        if within_s is not None:
            lag = self._lag()
            assert seconds <= within_s + lag, f"{fault}: {asked.seen()} after {seconds:.1f} s (lag {lag:.1f} s)"

    def settle(
        self,
        since: float,
        killed: Server | None = None,
        keeps: Server | None = None,
        may_keep: Server | None = None,
    ) -> Outcome:
        """Wait for idle gauges and, after a kill, for the restart; then ask the next ones. Adds rows to the table.

        Args:
            keeps: a server that by itself would hold on to what it has for longer than a minute: the tree starts it
                again. may_keep: one that does so if it was quick to take it.
        """
        world, stage, holder = self._stage.world, self._stage, keeps or may_keep
        for server in (stage.node, stage.prefill, world.single):
            if server is not killed:
                idle = functools.partial(_idle, server) if server is holder else server.idle
                left_s = max(1.0, max(since, self._answered_at) + IDLE_S - time.monotonic())
                wait_for(idle, left_s, functools.partial(_not_idle, server))
        gauges_s = time.monotonic() - since
        if killed is not None:
            wait_for(lambda: not _gone(killed), 300, lambda: f"{killed.name} has not come back\n{world.log()}")
        world.wait_ready()
        renewed = {s.name for s in world.servers.values() if (s.pid, s.engine_pid) != stage.pids[s.name]}
        again = holder is not None and holder.name in renewed
        assert keeps is None or again, f"{keeps.name} lets go of it after all: say so in docs/vllm.md"
        expected = {s.name for s in (killed, holder if again else None) if s is not None}
        assert renewed == expected, f"{renewed} for {expected}: died, or were started again\n{world.log()}"
        # A node that failed twice in a row is out for two seconds, of which `/ready` says nothing.
        wait_for(lambda: _answered(stage), 30, lambda: f"nobody answers\n{world.log()}")
        right = next_right(stage)
        for fault, seen, seconds in self._rows:
            TABLE.append(Row(stage.pool, fault, seen, seconds, gauges_s, right, again))
        assert right == NEXT, f"{self._rows}: {right} of the next {NEXT} were right\n{world.log()}"
        return Outcome(gauges_s, right, again)

    def _lag(self) -> float:
        """What the machine adds just now: the router's answer to a question that costs nothing."""
        began = time.monotonic()
        get(f"{self._stage.world.router_url}/v1/models", 30)
        return time.monotonic() - began


def next_right(stage: Stage) -> int:
    """How many of the next requests through the pool have the token ids of the single server."""
    world = stage.world
    prompts = [new_prompt(50 + 17 * number) for number in range(NEXT)]
    expected = at_once(2, lambda prompt: token_ids(world.single.url, prompt, TOKENS), prompts)

    def same(item: tuple[int, str]) -> bool:
        number, prompt = item
        try:
            got = token_ids(world.router_url, prompt, TOKENS, world.via(stage.pool), stream=number % 2 == 1)
        except AssertionError as error:
            print(f"{stage.pool}: {error}")
            return False
        return got == expected[number]

    return sum(at_once(4, same, list(enumerate(prompts))))


def new_prompt(length: int = 300) -> str:
    """Characters that no cache has; about as many tokens (byte-level tokenizers)."""
    return secrets.token_hex((length + 1) // 2)[:length]


def _answered(stage: Stage) -> bool:
    one = stage.ask()
    one.join(60)
    return one.status == 200


def refuse(server: Server, status: int) -> None:
    """From now on (``shims/refuse.py``); 0 ends it."""
    assert post(f"{server.url}/refuse?{status}", {})[0] == 200


def _idle(server: Server) -> bool:
    """Of one that may be starting just now: then not yet."""
    return not _gone(server) and server.idle()


def _not_idle(server: Server) -> str:
    gauges = "does not answer" if _gone(server) else server.gauges()
    return f"{server.name} is not idle: {gauges}\n{server.log()}"


def _gone(server: Server) -> bool:
    with contextlib.suppress(AssertionError):
        return not server.alive()
    return True


def json_of(text: str) -> dict[str, object]:
    found = json.loads(text)
    assert isinstance(found, dict)
    return found
