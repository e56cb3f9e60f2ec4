"""``pdhub up CONFIG``: the nodes that the configuration wants launched, then the router, as one supervised tree."""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from pdhub.api import Launcher
from pdhub.config.build import Plan, load_plan
from pdhub.config.parsing import refuse_parser
from pdhub.operate.backoff import RestartRule
from pdhub.operate.console import TreeConsole
from pdhub.operate.keeper import OnEvent, OnLine
from pdhub.operate.member import Member, StartFailed
from pdhub.operate.ports import settle
from pdhub.operate.readiness import HttpProbe
from pdhub.operate.recycle import recycle
from pdhub.operate.signals import StopSignals
from pdhub.operate.supervisor import Supervisor
from pdhub.operate.tree import router_url, stages

Work = Callable[[Supervisor], Awaitable[int | None]]
Say = Callable[[str], None]


async def _first(*jobs: Awaitable[Any]) -> tuple[int, Any]:
    """Index and result of the job that ends first; the others are cancelled."""
    tasks = [asyncio.ensure_future(job) for job in jobs]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        index = next(i for i, task in enumerate(tasks) if task.done())
        return index, tasks[index].result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def run_tree(
    launcher: Launcher,
    members: Sequence[Sequence[Member]],
    *,
    say: Say,
    on_event: OnEvent,
    on_line: OnLine,
    work: Work,
    rule: RestartRule | None = None,
) -> int:
    """Run a tree until a signal, a loss, or ``work`` (begun when all are ready) returns an exit status.

    ``work`` that returns None leaves the tree up. Returns the exit status; no process is left then.
    """
    async with HttpProbe() as probe:
        supervisor = Supervisor(launcher, members, probe=probe, on_event=on_event, on_line=on_line, rule=rule)

        def killed() -> None:
            say("killing everything")
            supervisor.kill()

        with StopSignals(killed) as signals:
            try:
                index, _ = await _first(signals.wait(), supervisor.start())
                if index == 0:
                    say(f"{signals.name}: stopping")
                    return 130

                async def work_then_watch() -> int:
                    status = await work(supervisor)
                    if status is not None:
                        return status
                    await asyncio.Event().wait()
                    return 0

                index, result = await _first(signals.wait(), supervisor.lost(), work_then_watch())
                if index == 0:
                    say(f"{signals.name}: stopping; once more kills")
                    return 0
                if index == 1:
                    say(str(result))
                    return 1
                return int(result)
            except StartFailed as error:
                say(str(error))
                return 1
            finally:
                await supervisor.stop()


def settled_plan(config_path: str | Path, overrides: Sequence[str]) -> tuple[Plan, list[str]]:
    """The plan with every port known, and the overrides that make the children see the same.

    Raises ConfigError, also for a port that is taken.
    """
    plan = load_plan(config_path, overrides=overrides)
    ports = settle(plan.config, random.Random())
    if not ports:
        return plan, list(overrides)
    all_overrides = [*overrides, *ports]
    return load_plan(config_path, overrides=all_overrides), all_overrides


def run(config_path: str | Path, overrides: Sequence[str] = ()) -> int:
    """Block until stopped. 0 after Ctrl-C or SIGTERM, 1 if the tree could not start or lost its router.

    Raises ConfigError before anything is started.
    """
    plan, overrides = settled_plan(config_path, overrides)
    refuse_parser(plan)  # the router would, when everything else has been started
    members = stages(plan, overrides)
    console = TreeConsole([member.name for stage in members for member in stage], sys.stdout)
    launcher: Launcher = plan.launcher.spec.factory(plan.launcher.config)

    async def work(supervisor: Supervisor) -> None:
        console.say(f"serving {plan.config.model.name} at {router_url(plan)}/v1   (Ctrl-C stops all)")
        async with HttpProbe() as probe:
            await recycle(supervisor, lambda: probe.document(f"{router_url(plan)}/ready"))

    return asyncio.run(
        run_tree(launcher, members, say=console.say, on_event=console.event, on_line=console.line, work=work)
    )
