"""Memory of a decode node that only a write of its prefill instance frees.

Where both legs run at once, decode has taken memory for KV before prefill has computed it. If both are cut off then,
some engines (vLLM's NixlPushConnector) keep that memory until the write comes, and it never does. So the same prefill
call is made once more: when the instance has nothing else to do, so that clients who leave delay nobody, or after a
while if that never happens.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from pdhub.api.errors import PDHubError
from pdhub.router.endpoint import Endpoint

log = logging.getLogger("pdhub.router.stranded")

PATIENCE_S = 20.0
PAUSE_S = 0.05


async def write_at_last(
    instance: Endpoint, node: Endpoint, send: Callable[[], Awaitable[object]], clock: Callable[[], float]
) -> None:
    """Make prefill write what decode waits for.

    Args:
        instance: its prefill instance. node: the decode node. send: the prefill call, as it was.
    """
    node.owed += 1
    try:
        for _ in range(round(PATIENCE_S / PAUSE_S)):
            if not instance.in_flight:
                break
            await asyncio.sleep(PAUSE_S)
        if not instance.gone and not node.gone:  # what one of them knew of the hand-over is gone with it
            await _write(instance, node, send, clock)
    finally:
        node.owed -= 1


async def _write(
    instance: Endpoint, node: Endpoint, send: Callable[[], Awaitable[object]], clock: Callable[[], float]
) -> None:
    instance.count(+1, clock())
    try:
        await send()
    except PDHubError as error:
        log.warning("'%s' keeps memory for a prompt that '%s' did not write: %s", node.name, instance.name, error)
    finally:
        instance.count(-1, clock())
