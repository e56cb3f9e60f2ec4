"""One trial: bring requests into a state of their leases, do something bad, and see that all is well afterwards."""

from __future__ import annotations

import asyncio
import random
import time
import zlib
from dataclasses import dataclass, field

from safety_board import Gate
from safety_client import Asked
from safety_config import LIMIT_S, NODE, ROUTER, SENDERS
from safety_process import Part
from safety_world import World

from pdhub.testing.faults import Faults

STATES = ("claimed", "writing", "ready", "decoding", "quarantined", "released")
FAULTS = (
    "kill sender", "stop sender", "kill node", "stop node", "kill router", "stop router", "bad wire", "clients leave",
)  # fmt: skip
STATE_S = 20.0
"""Longest wait for the state; a trial that does not reach it goes on, and is not counted."""

AGAIN_S = 0.7
"""Without the state for so long (its requests may all have failed on a bad wire), one more request is sent."""

ANSWER_S = 60.0
"""Within which a request must end, and later ones be right."""

NEXT = 1
"""Requests after each trial that must be right, beside those of the next trials."""


@dataclass
class Result:
    """What one trial did and saw.

    Args:
        held: leases in the state at the moment of the fault. outcomes: of its requests.
        idle_s: from the end of the last request until nothing was held anywhere.
        wrong: what must not be.
    """

    seed: str
    state: str
    fault: str
    held: int = 0
    outcomes: list[str] = field(default_factory=list)
    idle_s: float = 0.0
    wrong: list[str] = field(default_factory=list)


class Trial:
    """Args:
    seed: any text; it decides everything that is random here.
    """

    def __init__(self, world: World, state: str, seed: str) -> None:
        self._world = world
        self._rng = random.Random(seed)
        self._asked: list[Asked] = []
        self._was: dict[str, int] = {}
        self._victim = ""
        self.result = Result(seed, state, self._rng.choice(FAULTS))

    async def run(self) -> Result:
        """Leaves the tree whole and idle, if it can."""
        result, world = self.result, self._world
        self._was = {name: part.pid for name, part in world.parts.items()}
        try:
            self._spoil()
            await getattr(self, f"_{result.state}")()
            await asyncio.sleep(self._rng.uniform(0, 0.02))
            await self._fault()
            result.outcomes = [await one.ended(ANSWER_S) for one in self._asked]
            world.release_all()
            await self._settle()
        except AssertionError as error:
            result.wrong.append(str(error))
        finally:
            world.release_all()
            await self._go_on()
            for one in self._asked:
                one.leave()
        result.wrong += [outcome for outcome in result.outcomes if outcome.startswith("wrong")]
        result.wrong += world.board.complaints()
        return result

    # -- the states ------------------------------------------------------------------------------------------

    async def _claimed(self) -> None:
        """A landing is reserved; no sender has joined."""
        self._world.board.shut(Gate.JOIN)
        await self._in_state("claimed", self._rng.randint(1, 4))

    async def _writing(self) -> None:
        """Senders have joined; some writes have landed, others are held."""
        self._world.board.shut(Gate.WRITE)
        await self._in_state("writing", self._rng.randint(1, 4))
        await asyncio.sleep(self._rng.uniform(0, 0.05))

    async def _ready(self) -> None:
        """The KV is complete, and waits for a slot, or for a router that has stopped."""
        if self._rng.random() < 0.7:
            self._world.board.shut(Gate.DECODE)
            await self._in_state("ready", self._rng.randint(3, 5))
            return
        self._world.board.shut(Gate.JOIN)
        await self._in_state("claimed", self._rng.randint(1, 3))
        self._world.router.stop()
        self._world.board.open(Gate.JOIN)
        await self._in_state("ready", 0, more=False, within_s=LIMIT_S)

    async def _decoding(self) -> None:
        """The engine reads the landing."""
        self._world.board.shut(Gate.DECODE)
        await self._in_state("decoding", self._rng.randint(1, 4))

    async def _quarantined(self) -> None:
        """The request is over, and its sender, which may write, does not answer: it is stopped."""
        await self._writing()
        for name in SENDERS:
            self._world.parts[name].stop()
        for one in self._asked:
            one.leave()
        await self._in_state("quarantined", 0, more=False, within_s=LIMIT_S)
        await asyncio.sleep(self._rng.uniform(0, 0.3))

    async def _released(self) -> None:
        """A stopped sender's landings were fenced, and their memory may be others' already."""
        self._world.board.shut(Gate.WRITE)
        await self._in_state("writing", self._rng.randint(2, 4))
        stopped = await self._world.busy_sender() or self._world.parts[SENDERS[0]]
        stopped.stop()
        for one in self._asked:
            one.leave()
        self._world.board.open(Gate.WRITE)
        await self._world.until(self._none_left, "fenced and released")
        gate, state = self._rng.choice(((Gate.WRITE, "writing"), (Gate.DECODE, "decoding"), (Gate.DECODE, "decoding")))
        self._world.board.shut(gate)
        await self._in_state(state, self._rng.randint(2, 3))
        if self._rng.random() < 0.7:
            stopped.go_on()  # among others: what it had posted goes on now

    async def _none_left(self) -> bool:
        return not await self._world.leases()

    async def _in_state(self, state: str, count: int, *, more: bool = True, within_s: float = STATE_S) -> None:
        self._ask(count)
        began = asked = time.monotonic()
        wanted, patience_s = self._rng.randint(1, 4), self._rng.uniform(0, 0.2)
        while (now := time.monotonic()) < began + within_s:
            self.result.held = (await self._world.leases()).get(state, 0)
            if self.result.held >= wanted or (self.result.held and now > began + patience_s):
                return
            if more and time.monotonic() > asked + AGAIN_S:
                self._ask(1)
                asked = time.monotonic()
            await asyncio.sleep(0.02)

    def _ask(self, count: int) -> None:
        http = self._world.http
        assert http is not None
        url = self._world.router.url
        self._asked += [Asked(http, url, self._rng, self._rng.uniform(0, 0.02)) for _ in range(count)]

    # -- the faults ------------------------------------------------------------------------------------------

    def _spoil(self) -> None:
        """The wire: always bad for `bad wire`, and within its rights in half of the others."""
        rng, rates = self._rng, {}
        bad = self.result.fault == "bad wire"
        if bad or rng.random() < 0.5:
            rates = {"delay_s": rng.choice((0.0, 0.01, 0.1)), "reorder": rng.choice((0.0, 0.5))}
        if bad:
            names = ("fail", "drop", "lose", "flip", "duplicate_done", "lying_abort", "late_write")
            rates |= {name: rng.choice((0.1, 0.5)) for name in rng.sample(names, rng.randint(1, 3))}
        vanish = 0 if bad and rng.random() < 0.1 else None
        self._world.board.arrange(Faults(**rates, vanish_after=vanish), rng.choice((0.0, 0.0, 0.002, 0.01)))

    async def _fault(self) -> None:
        act, _, target = self.result.fault.partition(" ")
        if act in ("kill", "stop"):
            part = await self._part(target)
            self._victim = part.name
            if act == "kill":
                part.kill()
            else:
                part.stop()
        else:
            for one in self._asked:
                if self._rng.random() < (0.8 if act == "clients" else 0.3):
                    one.leave()
                    await asyncio.sleep(self._rng.choice((0.0, 0.005)))
        steps = [self._open, self._go_on]
        self._rng.shuffle(steps)
        for step in steps:
            # seldom beyond every limit of a lease
            await asyncio.sleep(
                self._rng.uniform(1.1, 1.4) * LIMIT_S if self._rng.random() < 0.1 else self._rng.uniform(0, 0.2)
            )
            await step()

    async def _part(self, target: str) -> Part:
        if target == "node":
            return self._world.parts[NODE]
        if target == "router":
            return self._world.parts[ROUTER]
        if (busy := await self._world.busy_sender()) is not None:
            return busy
        return self._world.parts[self._rng.choice(SENDERS)]

    async def _open(self) -> None:
        gates = list(Gate)
        self._rng.shuffle(gates)
        for gate in gates:
            self._world.board.open(gate)

    async def _go_on(self) -> None:
        for part in self._world.parts.values():
            part.go_on()

    # -- afterwards ------------------------------------------------------------------------------------------

    async def _settle(self) -> None:
        world, ended = self._world, time.monotonic()
        await world.until(world.whole, "everything is back")

        async def idle() -> bool:
            return not await world.held()

        try:
            await world.until(idle, "idle")
        except AssertionError:
            self.result.wrong.append(f"held after the trial: {await world.held()}")
            raise
        self.result.idle_s = time.monotonic() - ended
        for name, part in world.parts.items():
            if name != self._victim and part.pid != self._was[name]:
                self.result.wrong.append(f"{name} died too, with status {part.process.exitcode}")
        self.result.wrong += world.files()
        await self._next_are_right()

    async def _next_are_right(self) -> None:
        """A server that has just come back may still be out for the router: until then a refusal is right."""
        until = time.monotonic() + ANSWER_S
        right = 0
        while right < NEXT:
            http = self._world.http
            assert http is not None
            outcome = await Asked(http, self._world.router.url, self._rng).ended(ANSWER_S)
            right += outcome == "right"
            if outcome.startswith("wrong") or (outcome != "right" and time.monotonic() > until):
                self.result.wrong.append(f"the next answer: {outcome}")
                return
            await asyncio.sleep(0.0 if outcome == "right" else 0.05)


def seed_of(base: int, transport: str, state: str, number: int) -> str:
    """Of one trial, for a run's base seed."""
    return f"{base}-{transport}-{state}-{number}-{zlib.crc32(f'{base}{transport}{state}{number}'.encode()):08x}"
