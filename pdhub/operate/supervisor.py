"""A tree of processes in stages: each stage is ready before the next one starts, and stops after it."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Sequence

from pdhub.api import Launcher
from pdhub.operate.backoff import Backoff, RestartRule
from pdhub.operate.keeper import Keeper, OnEvent, OnLine, Probe
from pdhub.operate.member import Member, State


class Supervisor:
    """Starts, watches and stops the members.

    Args:
        launcher: starts processes; closed by :meth:`stop`.
        stages: members of a stage start together, in their order.
        probe: asks a member's ready URL.
        on_event, on_line: told about states (on the loop) and output (from any thread).
        rule, rng: of restarts.
    """

    def __init__(
        self,
        launcher: Launcher,
        stages: Sequence[Sequence[Member]],
        *,
        probe: Probe,
        on_event: OnEvent,
        on_line: OnLine,
        rule: RestartRule | None = None,
        rng: random.Random | None = None,
    ) -> None:
        self._launcher = launcher
        self._stages = stages
        self._probe = probe
        self._on_event = on_event
        self._on_line = on_line
        self._rule = rule or RestartRule()
        self._rng = rng or random.Random()
        self._keepers: list[list[Keeper]] = []
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Returns when every member is ready. Raises StartFailed for the first that fails; call :meth:`stop` then."""
        for stage in self._stages:
            keepers = [
                Keeper(
                    member, self._launcher, self._probe, Backoff(self._rule, self._rng), self._on_event, self._on_line
                )
                for member in stage
            ]
            self._keepers.append(keepers)
            self._tasks += [asyncio.create_task(keeper.run(), name=f"keep {keeper.member.name}") for keeper in keepers]
            await asyncio.gather(*(keeper.first_ready for keeper in keepers))

    async def lost(self) -> str:
        """Returns, with the reason, when a vital member or every member was given up."""
        waiting = set(self._tasks)
        while waiting:
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
            for keeper in (keeper for stage in self._keepers for keeper in stage):
                if keeper.member.vital and keeper.state is State.GIVEN_UP:
                    return f"{keeper.member.name} was given up and nothing works without it"
        return "every process was given up"

    def kill(self) -> None:
        """Everything, now. :meth:`stop` still has to be awaited."""
        for keeper in (keeper for stage in self._keepers for keeper in stage):
            keeper.kill()

    async def stop(self) -> None:
        """The last stage drains first. Idempotent; returns when nothing is left."""
        for task in self._tasks:
            task.cancel()
        for task in self._tasks:
            with contextlib.suppress(asyncio.CancelledError):
                await task
        self._tasks.clear()
        for keepers in reversed(self._keepers):
            for keeper in keepers:
                if not keeper.first_ready.done():
                    keeper.first_ready.cancel()
                elif not keeper.first_ready.cancelled():
                    keeper.first_ready.exception()  # told already; not a second time by the event loop
            await asyncio.gather(*(keeper.stop() for keeper in keepers))
        self._keepers.clear()
        await asyncio.to_thread(self._launcher.close)
