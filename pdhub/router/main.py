"""``pdhub router``: the router as a process."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Sequence

from pdhub.config.build import Plan, load_plan
from pdhub.router.server import RouterServer

log = logging.getLogger("pdhub.router")


def run(config_path: str, overrides: Sequence[str] = ()) -> int:
    """Serve until SIGTERM or SIGINT, then let open answers end for ``drain_s``. The exit status.

    SIGHUP reloads policy and admission, unless it says that the router's terminal was closed.

    Raises:
        ConfigError, PluginError: it cannot start.
    """
    plan = load_plan(config_path, overrides=overrides)
    return asyncio.run(_serve(plan, config_path, overrides))


async def _serve(plan: Plan, config_path: str, overrides: Sequence[str]) -> int:
    signals: asyncio.Queue[int] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        loop.add_signal_handler(number, signals.put_nowait, number)
    server = RouterServer(plan, lambda: load_plan(config_path, registry=plan.registry, overrides=overrides))
    await server.start()
    log.info("listening on %s", server.url)
    attached, reloads = _terminal(), set[asyncio.Task[object]]()

    async def told_to_stop() -> None:
        while await signals.get() == signal.SIGHUP and (_terminal() or not attached):
            if len(reloads) < 2:  # one that reads the file, and one that will read it after this signal
                task: asyncio.Task[object] = asyncio.create_task(server.reloader.reload())
                reloads.add(task)
                task.add_done_callback(reloads.discard)

    try:
        await told_to_stop()
        log.info("draining; a second signal stops at once")
        ended = asyncio.create_task(server.drain(plan.config.router.drain_s))
        hurry = asyncio.create_task(told_to_stop())
        await asyncio.wait([ended, hurry], return_when=asyncio.FIRST_COMPLETED)
        for task in (ended, hurry):
            task.cancel()
        await asyncio.gather(ended, hurry, return_exceptions=True)
    finally:
        await server.close()
    return 0


def _terminal() -> bool:
    """Whether there is a terminal that may close. When it does, SIGHUP means what it meant at first: stop."""
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY | os.O_NONBLOCK))
    except OSError:
        return False
    return True
