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

_LOOK_EVERY_S = 0.1


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
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def start(self) -> None:
        """Returns when every member is ready. Raises StartFailed for the first that fails; call :meth:`stop` then."""
        for stage in self._stages:
            keepers = [self._keep(member) for member in stage]
            self._keepers.append(keepers)
            await asyncio.gather(*(keeper.first_ready for keeper in keepers))

    def _keep(self, member: Member) -> Keeper:
        backoff = Backoff(self._rule, self._rng)
        keeper = Keeper(member, self._launcher, self._probe, backoff, self._on_event, self._on_line)
        self._tasks[member.name] = asyncio.create_task(keeper.run(), name=f"keep {member.name}")
        return keeper

    async def replace(self, member: Member) -> None:
        """Drain the member of this name, then start ``member`` in its place; returns when that is ready.

        Raises StartFailed if it does not come up.
        """
        for stage in self._keepers:
            for i, keeper in enumerate(stage):
                if keeper.member.name == member.name:
                    await self._end(self._tasks.pop(member.name))
                    await keeper.stop()
                    stage[i] = self._keep(member)
                    await stage[i].first_ready
                    return
        raise KeyError(member.name)

    async def again(self, name: str, why: str) -> bool:
        """Drain the member of this name and start it anew; returns when it serves, or is in trouble of its own.

        False at once if it cannot be just now (:meth:`Keeper.again`), or if there is no such member.
        """
        keeper = next((k for stage in self._keepers for k in stage if k.member.name == name), None)
        if keeper is None or not keeper.again(why):
            return False
        while True:
            await asyncio.sleep(_LOOK_EVERY_S)
            if keeper.state is not State.STARTING:
                return True

    @staticmethod
    async def _end(task: asyncio.Task[None]) -> None:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    async def lost(self) -> str:
        """Returns, with the reason, when a vital member or every member was given up."""
        while True:
            keepers = [keeper for stage in self._keepers for keeper in stage]
            for keeper in keepers:
                if keeper.member.vital and keeper.state is State.GIVEN_UP:
                    return f"{keeper.member.name} was given up and nothing works without it"
            if all(keeper.state is State.GIVEN_UP for keeper in keepers):
                return "every process was given up"
            for task in self._tasks.values():
                if task.done() and not task.cancelled():
                    task.result()  # a fault of our own must not pass for a quiet tree
            await asyncio.sleep(_LOOK_EVERY_S)

    def kill(self) -> None:
        """Everything, now. :meth:`stop` still has to be awaited."""
        for keeper in (keeper for stage in self._keepers for keeper in stage):
            keeper.kill()

    async def stop(self) -> None:
        """The last stage drains first. Idempotent; returns when nothing is left."""
        for task in self._tasks.values():
            await self._end(task)
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
