"""Keeps one member alive: start, wait until ready, watch, restart with back-off, give up."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from pdhub.api import Launcher, PDHubError, Running
from pdhub.operate.backoff import Backoff
from pdhub.operate.member import Event, Member, StartFailed, State, how_it_ended
from pdhub.operate.tail import Tail

POLL_S = 0.05
PROBE_EVERY_S = 0.1

UNSERVED_S = 2.0
"""What a process that has never served gets between the request to stop and the end: it has nothing to drain, and one
that is reading weights does not hear it for a minute."""

Probe = Callable[[str], Awaitable[bool]]
OnEvent = Callable[[Event], None]
OnLine = Callable[[str, str], None]


class Keeper:
    """The life of one member.

    ``first_ready`` resolves when it first served; it raises StartFailed if it never will.
    """

    def __init__(
        self, member: Member, launcher: Launcher, probe: Probe, backoff: Backoff, on_event: OnEvent, on_line: OnLine
    ) -> None:
        self.member = member
        self.state = State.STARTING
        self.running: Running | None = None
        self.first_ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._launcher = launcher
        self._probe = probe
        self._backoff = backoff
        self._on_event = on_event
        self._on_line = on_line
        self._tail = Tail()
        self._served = False
        self._again = ""
        self._asked_at: float | None = None
        self._not_before = 0.0

    def again(self, why: str) -> bool:
        """Drain it and start it anew; that is no failure. The state is ``STARTING`` then, until it serves.

        Refused (False) unless it serves, and has served for as long as it took to start it so the last time: whoever
        asks again and again must not keep it from serving.

        Args:
            why: for people.
        """
        now = time.monotonic()
        if self.state is not State.READY or now < self._not_before:
            return False
        self._again, self._asked_at = why, now
        self._tell(State.STARTING, f"stopping, to be started again: {why}")
        return True

    async def run(self) -> None:
        """Until given up or cancelled. The process itself is stopped by :meth:`stop`, not by cancelling this."""
        while True:
            ready_at, why = await self._one_life()
            if self._again:
                self._again = ""
                continue
            if not self.first_ready.done():
                self.first_ready.set_exception(self._start_failed(why))
                self._tell(State.GIVEN_UP, why)
                return
            ready_for = None if ready_at is None else time.monotonic() - ready_at
            delay = self._backoff.died(ready_for)
            if delay is None:
                self._tell(State.GIVEN_UP, f"{why}; given up after {self._backoff.failures} failures in a row")
                return
            self._tell(State.WAITING, f"{why}; starting again in {delay:.1f} s")
            await asyncio.sleep(delay)

    async def _one_life(self) -> tuple[float | None, str]:
        """Start once and watch to the end: when it was ready, and how it ended."""
        process = self.member.process
        self._tail.forget(self.member.name)
        self._served = False
        self._tell(State.STARTING, "starting")
        began = time.monotonic()
        try:
            self.running = self._launcher.start(self.member.name, process, self._line)
        except PDHubError as error:
            return None, str(error)
        ready_at: float | None = None
        next_probe = began
        while True:
            status = self.running.poll()
            now = time.monotonic()
            if status is not None:
                return ready_at, f"ended: {how_it_ended(status)}"
            if self._again:
                await self._drain()
                return ready_at, self._again
            if ready_at is None and now >= next_probe:
                if await self._probe(process.ready_url):
                    ready_at = time.monotonic()
                    self._served = True
                    if self._asked_at is not None:
                        self._not_before = ready_at + (ready_at - self._asked_at)
                        self._asked_at = None
                    self._tell(State.READY, f"ready after {ready_at - began:.1f} s")
                    if not self.first_ready.done():
                        self.first_ready.set_result(None)
                elif now - began > process.ready_within_s:
                    self.running.kill()
                    await self._gone(5.0)
                    return None, f"not ready after {process.ready_within_s:g} s ({process.ready_url})"
                next_probe = time.monotonic() + PROBE_EVERY_S
            await asyncio.sleep(POLL_S)

    def _line(self, name: str, line: str) -> None:
        self._tail.add(name, line)
        self._on_line(name, line)

    def _tell(self, state: State, text: str) -> None:
        self.state = state
        self._on_event(Event(self.member.name, state, text))

    def _start_failed(self, why: str) -> StartFailed:
        lines = self._tail.last(self.member.name)
        said = "\n".join(f"    {line}" for line in lines) or "    (it wrote nothing)"
        command = " ".join(self.member.process.argv)
        return StartFailed(
            f"{self.member.name} did not start: {why}. Its last lines:\n{said}",
            hint=f"fix what the lines say; to see it alone, run: {command}",
        )

    async def _gone(self, within_s: float) -> bool:
        deadline = time.monotonic() + within_s
        while self.running is not None and self.running.poll() is None:
            if time.monotonic() > deadline:
                return False
            await asyncio.sleep(POLL_S)
        return True

    async def stop(self) -> None:
        """Ask the process to drain, wait ``stop_within_s``, kill. :meth:`run` must have ended."""
        if self.running is None or self.running.poll() is not None:
            return
        late = f"did not stop within {self._patience:g} s: killed"
        self._tell(State.STOPPED, "stopped" if await self._drain() else late)

    @property
    def _patience(self) -> float:
        return self.member.stop_within_s if self._served else min(self.member.stop_within_s, UNSERVED_S)

    async def _drain(self) -> bool:
        """Returns when it has ended: by itself, or (False) because it was killed."""
        assert self.running is not None
        self.running.terminate()
        if await self._gone(self._patience):
            return True
        self.running.kill()
        await self._gone(5.0)
        return False

    def kill(self) -> None:
        """Now, without a drain."""
        if self.running is not None:
            self.running.kill()
