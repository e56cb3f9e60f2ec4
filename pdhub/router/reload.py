"""Replace policy and admission while requests run: on a change of the file, or when told to.

All or nothing: the whole file is read and validated like at start, beside the event loop; then one assignment makes it
live. Requests that have started keep the rules that they started under. Whatever is wrong changes nothing.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from hashlib import sha256
from pathlib import Path
from typing import Any

from pdhub.api.errors import PDHubError
from pdhub.config.build import Plan
from pdhub.config.models import Config
from pdhub.config.origin import dotted
from pdhub.config.version import RELOADABLE
from pdhub.router.context import Context
from pdhub.router.lines import ahead_of
from pdhub.router.rulebook import Rulebook, rulebook

log = logging.getLogger("pdhub.router.reload")

SHOWN = 5
"""Changed keys that a refusal names."""


class Result(StrEnum):
    """How a reload ended; a closed set.

    ``INVALID``: the file is wrong. ``REFUSED``: it is right, but changes what only a restart can change.
    """

    APPLIED = "applied"
    UNCHANGED = "unchanged"
    INVALID = "invalid"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Reload:
    """The last attempt. ``problem`` is empty if the file agrees with what is live; ``wall_s``: epoch seconds."""

    result: Result
    problem: str
    wall_s: float


class Reloader:
    """Args:
    load: reads and validates everything again; called in a thread. None = there is nothing to read again.
    path: the file to watch; None = none. interval_s: how often to look at it; 0 = never.
    """

    def __init__(self, context: Context, load: Callable[[], Plan] | None, path: Path | None, interval_s: float) -> None:
        self._context = context
        self._load = load
        self._path = path
        self._interval_s = interval_s
        self._one = asyncio.Lock()
        self._watch: asyncio.Task[None] | None = None
        self._used = _content(path) if path is not None else ""
        self.last: Reload | None = None

    def start(self) -> None:
        """Begin to watch the file, if there is one."""
        if self._load is not None and self._path is not None and self._interval_s:
            self._watch = asyncio.create_task(self._watching(self._path), name="pdhub-reload")

    async def close(self) -> None:
        """Stop watching. Idempotent."""
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)

    async def reload(self) -> Reload:
        """Read the file now and make it live if it may. Never raises for what is in the file."""
        async with self._one:
            result, problem = await self._attempt()
            self.last = Reload(result, problem, time.time())
            self._context.metrics.reloads.labels(result.value).inc()
        return self.last

    async def _attempt(self) -> tuple[Result, str]:
        context = self._context
        if self._load is None:
            return self._failed(Result.REFUSED, "this router was not started from a file")
        try:
            plan, rules = await asyncio.to_thread(self._read, self._load, context.rules)
        except PDHubError as error:
            return self._failed(Result.INVALID, error.message, error.hint)
        except Exception as error:
            log.exception("the configuration could not be loaded")
            return self._failed(Result.INVALID, f"loading it failed: {error!r}")
        changed = list(fixed_changes(context.plan.config, plan.config))
        if changed:
            more = f" and {len(changed) - SHOWN} more" if len(changed) > SHOWN else ""
            names = ", ".join(changed[:SHOWN]) + more
            hint = f"restart the router, or undo that change; only {' and '.join(RELOADABLE)} can change while it runs"
            return self._failed(Result.REFUSED, f"a change of {names} needs a restart", hint)
        if rules.version == context.rules.version:
            return Result.UNCHANGED, ""
        old = context.rules.version
        context.plan, context.rules = plan, rules
        context.gate.reconfigure(rules.admission.queue_limit)
        context.lines.set_ahead(ahead_of(rules.admission))
        log.info("policy %s is live, version %s instead of %s", rules.policy.name, rules.version, old)
        return Result.APPLIED, ""

    @staticmethod
    def _read(load: Callable[[], Plan], live: Rulebook) -> tuple[Plan, Rulebook]:
        plan = load()
        return plan, rulebook(plan, live)

    def _failed(self, result: Result, problem: str, hint: str | None = None) -> tuple[Result, str]:
        rules = self._context.rules
        log.error(
            "the new configuration is not used (%s): %s%s; version %s stays live",
            result.value, problem, f" (hint: {hint})" if hint else "", rules.version,
        )  # fmt: skip
        return result, problem

    async def _watching(self, path: Path) -> None:
        """A change counts when the file's content stayed the same between two looks: an editor may write it in
        pieces, and a piece may happen to be valid."""
        seen = self._used
        while True:
            await asyncio.sleep(self._interval_s)
            now = await asyncio.to_thread(_content, path)
            if now == seen and now != self._used:
                self._used = now
                await self.reload()
            seen = now


def _content(path: Path) -> str:
    """What the file holds now, as a digest; empty if it cannot be read."""
    try:
        return sha256(path.read_bytes()).hexdigest()
    except OSError:
        return ""


def fixed_changes(old: Config, new: Config) -> Iterator[str]:
    """Paths that differ outside the sections that can be reloaded."""
    mine, other = (config.model_dump(mode="json", exclude=set(RELOADABLE)) for config in (old, new))
    yield from _differences(mine, other, ())


def _differences(old: Any, new: Any, path: tuple[str | int, ...]) -> Iterator[str]:
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for key in [*old, *(k for k in new if k not in old)]:
            yield from _differences(old.get(key), new.get(key), (*path, key))
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for index, (one, other) in enumerate(zip(old, new, strict=True)):
            yield from _differences(one, other, (*path, index))
    elif old != new:
        yield dotted(path)
