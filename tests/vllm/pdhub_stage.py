"""How tests bring requests into each state of a lease at a node of `pdhub node`, with vLLM as the prefill."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import psutil
from asking import Asking
from faults import PHASE_S, Frozen, new_prompt
from pdhub_worlds import NODES, PDHubWorld

LONG = 1500
"""Tokens of a prompt whose hand-over takes many steps."""

TOKENS = 8
DECODED = 300
"""Tokens of a stream that is still running when everything has been looked at."""

TRIES = 30
"""A prompt's writes take a third of a second on an idle machine: they may have ended when vLLM is stopped."""

STATES = ("claimed", "writing", "ready", "decoding", "quarantined")


class LeaseStage:
    """One tree whose node has one slot, and the states of its leases."""

    def __init__(self, world: PDHubWorld) -> None:
        self.world = world
        self.prefill = world.prefill
        # Found beforehand: walking the process table takes a second on a busy machine.
        self.pids = {server.name: (server.pid, server.engine_pid) for server in world.servers.values()}
        self.node_pid = node_pid(world)

    def kill(self, victim: str) -> float:
        """SIGKILL to the node, or to both processes of the vLLM server. Returns the moment."""
        for pid in self.pids[self.prefill.name] if victim == "prefill" else (self.node_pid,):
            os.kill(pid, signal.SIGKILL)
        return time.monotonic()

    def leases(self) -> dict[str, int]:
        """Of the node, by state."""
        return dict(self.world.node_load()["leases"])

    @contextlib.contextmanager
    def held_in(self, state: str) -> Iterator[tuple[list[Asking], Frozen | None]]:
        """Requests, and what is stopped to hold them, while at least one of their leases is in the state."""
        with getattr(self, f"_{state}")() as (asked, frozen):
            assert self.leases().get(state), f"{state}: {self.leases()}"
            yield asked, frozen

    @contextlib.contextmanager
    def _claimed(self) -> Iterator[tuple[list[Asking], Frozen | None]]:
        with Frozen(self.pids[self.prefill.name][1]) as frozen:
            asked = self._ask_two()
            self._until(lambda: self.leases().get("claimed") == 2, "claimed")
            yield asked, frozen

    @contextlib.contextmanager
    def _writing(self) -> Iterator[tuple[list[Asking], Frozen | None]]:
        for _ in range(TRIES):
            asked = self._ask_two(LONG)
            self._until(
                lambda asked=asked: bool(self.leases().get("writing")) or all(one.ended for one in asked),  # type: ignore[misc]
                "writing",
            )
            with Frozen(self.pids[self.prefill.name][1]) as frozen:
                if self.leases().get("writing"):
                    yield asked, frozen
                    return
            for one in asked:
                one.join(60)
        raise AssertionError(f"{TRIES} times the writes had ended before vLLM was stopped\n{self.world.log()}")

    @contextlib.contextmanager
    def _ready(self) -> Iterator[tuple[list[Asking], Frozen | None]]:
        with self._decoding() as (asked, _):
            asked += self._ask_two()
            self._until(lambda: self.leases().get("ready") == 2, "ready")
            yield asked, None

    @contextlib.contextmanager
    def _decoding(self) -> Iterator[tuple[list[Asking], Frozen | None]]:
        stream = self._ask(stream=True, tokens=DECODED)
        self._until(lambda: stream.pieces >= 3, f"tokens come: {stream}")
        yield [stream], None

    @contextlib.contextmanager
    def _quarantined(self) -> Iterator[tuple[list[Asking], Frozen | None]]:
        with self._writing() as (asked, frozen):
            for one in asked:
                one.leave()
            self._until(lambda: bool(self.leases().get("quarantined")), "quarantined")
            yield asked, frozen

    def _ask_two(self, length: int = 300) -> list[Asking]:
        return [self._ask(stream=stream, length=length) for stream in (False, True)]

    def _ask(self, *, stream: bool, tokens: int = TOKENS, length: int = 300) -> Asking:
        body = {
            "model": "m", "prompt": new_prompt(length), "max_tokens": tokens, "temperature": 0, "ignore_eos": True,
            "return_token_ids": True, "stream": stream,
        }  # fmt: skip
        return Asking(f"{self.world.router_url}/v1/completions", body, self.world.via(NODES))

    def _until(self, what: Callable[[], bool], why: str) -> None:
        deadline = time.monotonic() + PHASE_S
        while not what():
            assert time.monotonic() < deadline, f"{why}: {self.leases()}\n{self.world.log()}"
            time.sleep(0.002)  # some states last half a second


def node_pid(world: PDHubWorld) -> int:
    """Of the process that `pdhub up` runs as the node just now."""
    for process in psutil.Process(world.pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            words = process.cmdline()
            guard = any(word.endswith("guard.py") for word in words)
            if not guard and "node" in words and NODES in words:
                return process.pid
    raise AssertionError(f"the node has no process\n{world.log()}")


def node_idle(world: PDHubWorld) -> bool:
    """No lease, no quarantine, every landing and slot free; False if it does not answer."""
    with contextlib.suppress(ValueError):
        load = world.node_load()
        pool = next(pool for pool in world.data["pools"] if pool["name"] == NODES)
        free = (load["landings_free"], load["slots_free"]) == (pool["landings"], pool["engine"]["config"]["slots"])
        return free and not load["leases"] and not load.get("quarantined")
    return False


def one_slot(document: dict[str, Any]) -> None:
    """Change of a configuration: the node decodes one request, and has landings for three more."""
    pool = next(pool for pool in document["pools"] if pool["name"] == NODES)
    pool["engine"]["config"]["slots"] = 1
    pool["landings"] = 4
