"""The order of things: model, processes, measurements, three requests, table, stay up."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import sys
from collections.abc import Sequence

import aiohttp
from rich.console import Console

from pdhub.api import Launcher, PDHubError
from pdhub.config.build import Plan
from pdhub.config.settings import cache_dir
from pdhub.operate.console import TreeConsole
from pdhub.operate.member import Event, Member
from pdhub.operate.quickstart import measure, model, report
from pdhub.operate.quickstart.client import Answer, Endpoint, Question
from pdhub.operate.quickstart.options import Options
from pdhub.operate.quickstart.progress import Bars
from pdhub.operate.quickstart.source import config_file
from pdhub.operate.supervisor import Supervisor
from pdhub.operate.tree import router_url, stages
from pdhub.operate.up import run_tree, settled_plan


def questions(tight_ms: float) -> tuple[Question, ...]:
    """Three requests with different targets. The tight one copies, as edits do: what speculation is good at."""
    return (
        Question(
            "Repeat the following text word for word.\n\nThe speed of light in a vacuum is exactly 299,792,458 metres "
            "per second, and nothing that carries information can travel faster.",
            tpot_ms=tight_ms,
        ),
        Question("Write two sentences about how a lighthouse works.", ttft_ms=5_000, tpot_ms=500),
        Question("What is the capital of France, and what is it known for?"),
    )


def run(options: Options) -> int:
    """Block until Ctrl-C, or until the table with ``once``.

    Returns 0; 1 if the tree or a request failed. Raises ConfigError for what is missing, before anything starts.
    """
    gguf, key = model.find_gguf()
    out = model.converted_path(cache_dir(), key)
    overrides = [f"model.path={json.dumps(str(out))}"]
    if options.port is not None:
        overrides.append(f"router.port={options.port}")
    plan, overrides = settled_plan(config_file(), overrides)
    stderr = Console(stderr=True, highlight=False)
    with Bars(stderr) as bars:
        if not model.is_converted(out):
            bars.say(f"converting {gguf.name} once, into {out}")
            model.convert(gguf, out, lambda percent: bars.step("convert", percent, 100))
        return asyncio.run(_Show(options, plan, overrides, bars, stderr).run())


class _Show:
    """One quickstart, from the first process to the last."""

    def __init__(self, options: Options, plan: Plan, overrides: Sequence[str], bars: Bars, stderr: Console) -> None:
        self._options = options
        self._plan = plan
        self._bars = bars
        self._url = router_url(plan)
        self._members: tuple[list[Member], list[Member]] = stages(plan, overrides)
        names = [member.name for stage in self._members for member in stage]
        self._logs = TreeConsole(names, stderr.file)
        self._settled = False
        self._tight_ms = 0.0

    async def run(self) -> int:
        launcher: Launcher = self._plan.launcher.spec.factory(self._plan.launcher.config)
        return await run_tree(
            launcher, self._members, say=self._say, on_event=self._event, on_line=self._line, work=self._work
        )

    def _say(self, text: str) -> None:
        self._bars.say(text)

    def _event(self, event: Event) -> None:
        if self._settled:
            self._logs.event(event)
        else:
            self._bars.event(event)

    def _line(self, name: str, line: str) -> None:
        if self._settled:  # while it loads, lines are kept for the message of a failed start
            self._logs.line(name, line)

    async def _work(self, supervisor: Supervisor) -> int | None:
        timeout = aiohttp.ClientTimeout(total=120)
        async with aiohttp.ClientSession(timeout=timeout, trust_env=False) as session:
            endpoint = Endpoint(session, self._url, self._plan.config.model.name)
            try:
                self._tight_ms = await self._measure(endpoint, supervisor)
                asked = await self._ask(endpoint, questions(self._tight_ms))
            except PDHubError as error:
                self._say(f"failed: {error}")
                return 1
        self._bars.stop()
        self._show(asked)
        self._settled = not self._options.once
        return 0 if self._options.once else None

    async def _measure(self, endpoint: Endpoint, supervisor: Supervisor) -> float:
        """Seed the router's latency model. Returns a TPOT target that only the fast pool meets."""
        self._bars.step("measure", 0, 2, "each pool alone")
        await endpoint.all_pools_ready()
        seeds = await measure.seeds(endpoint)
        for seed in seeds:
            self._say(f"{seed.pool} alone: TTFT {seed.ttft_ms:.0f} ms, TPOT {seed.tpot_ms:.0f} ms")
        self._bars.step("measure", 1, 2, "both under load")
        contrast = await measure.contrast(endpoint)
        self._bars.step("measure", 2, 2, "done")
        self._say(contrast.sentence())
        self._say("the router starts again with the measured latencies")
        words = [word for seed in seeds for override in seed.overrides() for word in ("--set", override)]
        router = self._members[1][0]
        process = dataclasses.replace(router.process, argv=(*router.process.argv, *words))
        await supervisor.replace(dataclasses.replace(router, process=process))
        await endpoint.all_pools_ready()
        return measure.tight_target(seeds)

    async def _ask(self, endpoint: Endpoint, wanted: Sequence[Question]) -> list[tuple[Question, Answer]]:
        asked = []
        for i, question in enumerate(wanted):
            self._bars.step("ask", i, len(wanted), report.slo_text(question))
            if self._options.prompt is not None:
                question = dataclasses.replace(question, prompt=self._options.prompt)
            asked.append((question, await endpoint.ask(question)))
        self._bars.step("ask", len(wanted), len(wanted), "done")
        return asked

    def _show(self, asked: Sequence[tuple[Question, Answer]]) -> None:
        if self._options.json:
            sys.stdout.write(report.as_json(asked) + "\n")
            sys.stdout.flush()
        else:
            console = Console(highlight=False)
            if not console.is_terminal:
                console.width = max(console.width, report.WIDE)
            report.show(asked, console)
        if not self._options.once:
            self._say(f"\nserving {self._plan.config.model.name} at {self._url}/v1   (Ctrl-C stops all)")
            self._say("try: " + report.curl_line(self._url, self._plan.config.model.name, self._tight_ms))
