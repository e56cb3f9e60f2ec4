"""The process that runs vLLM's parsers (``parser_child.py``): started, asked, and started anew when it dies."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from pdhub.api import ParserFailed

log = logging.getLogger("pdhub.vllm.parser")

SCRIPT: Final = Path(__file__).with_name("parser_child.py")
LINE_LIMIT: Final = 64 << 20
"""Bytes of one answer: no more than a whole chat answer."""
LEAVE_S: Final = 2.0
FIRST_PAUSE_S: Final = 0.5
LONGEST_PAUSE_S: Final = 30.0


class ParserProcess:
    """Args:
    command: what is run. start_within_s, within_s: until it is ready; for one order.
    queue: orders that may wait for their answers. changed: told when ``problem`` changed.

    ``life`` counts its starts: what one of them knew, the next does not.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        start_within_s: float,
        within_s: float,
        queue: int,
        changed: Callable[[], None],
    ) -> None:
        self._command = command
        self._start_within_s = start_within_s
        self._within_s = within_s
        self._queue = queue
        self._changed = changed
        self._process: asyncio.subprocess.Process | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._closed = False
        self.problem = "is starting"
        self.facts: Mapping[str, Any] = {}
        self.life = 0

    def start(self) -> None:
        """On the running loop. Returns at once; ``problem`` becomes empty when it is ready."""
        self._keeper = asyncio.create_task(self._keep(), name="vllm-parsers")

    async def close(self) -> None:
        """End it. Idempotent."""
        self._closed = True
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)
            self._keeper = None

    @property
    def full(self) -> bool:
        """No further order is taken now."""
        return len(self._waiting) >= self._queue

    async def ask(self, life: int, order: Mapping[str, Any]) -> dict[str, Any]:
        """Its answer to an order. One at a time for each ``order["id"]``.

        Args:
            life: in which what the order is about began.

        Raises:
            ParserFailed: it died, does not answer, or has more to do than it may.
        """
        process = self._alive(life)
        if self.full:
            raise ParserFailed("the parser of reasoning and tool calls has too much to do")
        number = order["id"]
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(self._within_s):
                await self._write(process, order)
                told: dict[str, Any] = await answer
                return told
        except TimeoutError:
            if self._process is process and process.returncode is None:
                log.error("vLLM's parsers did not answer for %g s; the process is ended", self._within_s)
                process.kill()
            raise ParserFailed("the parser of reasoning and tool calls does not answer") from None
        finally:
            self._waiting.pop(number, None)

    def tell(self, life: int, order: Mapping[str, Any]) -> None:
        """An order without an answer; forgotten if the process is another one by now."""
        process = self._process
        if life == self.life and process is not None and process.stdin is not None and not process.stdin.is_closing():
            process.stdin.write(_line(order))

    def _alive(self, life: int) -> asyncio.subprocess.Process:
        if life != self.life or self.problem or self._process is None:
            raise ParserFailed("the parser of reasoning and tool calls went away")
        return self._process

    async def _write(self, process: asyncio.subprocess.Process, order: Mapping[str, Any]) -> None:
        assert process.stdin is not None
        try:
            process.stdin.write(_line(order))
            await process.stdin.drain()
        except (BrokenPipeError, ConnectionResetError):
            raise ParserFailed("the parser of reasoning and tool calls went away") from None

    async def _keep(self) -> None:
        pause_s = FIRST_PAUSE_S
        while not self._closed:
            if await self._live():
                pause_s = FIRST_PAUSE_S
            log.warning("vLLM's parsers: the process %s; the next one is started in %g s", self.problem, pause_s)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    async def _live(self) -> bool:
        """One process, from its start to its end. True if it was ever ready."""
        self.life += 1
        ready = False
        try:
            self._process = process = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                limit=LINE_LIMIT,
                start_new_session=True,  # a terminal's Ctrl-C lets the router finish its answers first
            )
        except OSError as error:
            self._say(f"cannot be started: {error}")
            return False
        try:
            problem = await self._hello(process)
            ready = not problem
            self._say(problem)
            if ready:
                problem = await self._listen(process)
        finally:
            await self._end(process)
            self._say("ended" if ready else problem or "ended before it was ready")
        return ready

    async def _hello(self, process: asyncio.subprocess.Process) -> str:
        """Wait for its first line. What is wrong; empty if nothing is."""
        assert process.stdout is not None
        try:
            async with asyncio.timeout(self._start_within_s):
                line = await process.stdout.readline()
            told: dict[str, Any] = json.loads(line or b'{"failed": "ended before it was ready; see the log"}')
        except TimeoutError:
            return f"was not ready after {self._start_within_s:g} s"
        except ValueError as error:
            return f"said something else than what it was expected to: {error}"
        if "ready" not in told:
            return str(told.get("failed"))
        self.facts = told["ready"]
        return ""

    async def _listen(self, process: asyncio.subprocess.Process) -> str:
        assert process.stdout is not None
        try:
            while line := await process.stdout.readline():
                answer = json.loads(line)
                waiting = self._waiting.get(answer.pop("id"))
                if waiting is not None and not waiting.done():
                    waiting.set_result(answer)
        except (ValueError, KeyError, AttributeError, asyncio.LimitOverrunError) as error:
            log.error("vLLM's parsers: an answer that is none: %s", error)
        return "ended"

    async def _end(self, process: asyncio.subprocess.Process) -> None:
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(ParserFailed("the parser of reasoning and tool calls died"))
        if process.stdin is not None:
            process.stdin.close()
        try:
            async with asyncio.timeout(LEAVE_S):
                await process.wait()
        except TimeoutError:
            await _kill(process)
        except asyncio.CancelledError:
            await _kill(process)
            raise

    def _say(self, problem: str) -> None:
        if problem != self.problem:
            self.problem = problem
            self._changed()


async def _kill(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    await process.wait()


def _line(order: Mapping[str, Any]) -> bytes:
    return msgspec.json.encode(order) + b"\n"  # quick, for long prompts, and never more than one line
