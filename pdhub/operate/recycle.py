"""Members that the router wants started again: decode nodes that hold KV for nobody, and have no work."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

from pdhub.operate.supervisor import Supervisor

LOOK_EVERY_S = 1.0

Ask = Callable[[], Awaitable[dict[str, Any]]]


async def recycle(supervisor: Supervisor, ask: Ask, every_s: float = LOOK_EVERY_S) -> None:
    """For ever: look at the router's `/ready` document, and start again what it names, one member at a time.

    Args:
        ask: reads the document; empty while the router does not answer.
    """
    while True:
        for name, why in wanted(await ask()):
            if await supervisor.again(name, why):
                break  # the document is of before
        await asyncio.sleep(every_s)


def wanted(document: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """(node, why, for people) of those that may be started again now."""
    stranded = document.get("stranded")
    for name, found in stranded.items() if isinstance(stranded, dict) else ():
        if isinstance(found, dict) and found.get("state") == "restart":
            yield name, f"{found.get('kv', 0):.1%} of its KV memory was held for nobody"
