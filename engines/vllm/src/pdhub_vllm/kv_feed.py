"""The sockets of vLLM's KV cache events. Needs pyzmq: ``pip install 'pdhub-vllm[kv-events]'``."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Final

import zmq
import zmq.asyncio

from pdhub.api import CacheEvent, CacheFeed
from pdhub_vllm.kv_events import EventStream

log = logging.getLogger("pdhub.vllm.kv_events")

REPLAY_WAIT_S: Final = 10.0
"""For the next message of a replay. A publisher looks for requests ten times a second."""

HELD: Final = 100_000
"""Batches that wait here at most, as many as a publisher keeps; more are missed, which their numbers show."""

_END: Final = (-1).to_bytes(8, "big", signed=True)


class ZmqFeed(CacheFeed):
    """Args:
    endpoint: of the PUB socket, ``tcp://host:port``. replay: of the ROUTER socket; None = there is none.
    topic: as the server's.
    """

    def __init__(self, endpoint: str, replay: str | None, topic: str) -> None:
        self._endpoint = endpoint
        self._replay = replay
        self._topic = topic

    async def run(self, told: Callable[[Sequence[CacheEvent]], None]) -> None:
        stream = EventStream(replays=self._replay is not None)
        context = zmq.asyncio.Context()
        events = context.socket(zmq.SUB)
        try:
            events.setsockopt(zmq.RCVHWM, HELD)
            events.setsockopt_string(zmq.SUBSCRIBE, self._topic)
            events.connect(self._endpoint)
            while True:
                while stream.missing is not None:
                    await self._ask_again(context, stream, told)
                number, payload = _numbered(await events.recv_multipart())
                told(stream.live(number, payload))
        finally:
            events.close(0)
            context.destroy(0)

    async def _ask_again(
        self, context: zmq.asyncio.Context, stream: EventStream, told: Callable[[Sequence[CacheEvent]], None]
    ) -> None:
        """A socket for each replay: what is left of one that was not answered must not be taken for the next one's."""
        assert self._replay is not None
        asked = context.socket(zmq.DEALER)
        try:
            asked.connect(self._replay)
            await asked.send_multipart([b"", (stream.missing or 0).to_bytes(8, "big")])
            while True:
                async with asyncio.timeout(REPLAY_WAIT_S):
                    frames = await asked.recv_multipart()
                if frames[-2:-1] == [_END]:
                    told(stream.replay_ended())
                    return
                told(stream.replayed(*_numbered(frames)))
        except TimeoutError:
            log.warning("%s replays no KV events: what was stored before is unknown", self._replay)
            told(stream.no_replay())
        finally:
            asked.close(0)


def ranked(endpoint: str, rank: int) -> str:
    """The endpoint of a data-parallel rank, as vLLM makes it."""
    if rank == 0 or not endpoint.startswith("tcp:"):
        return endpoint
    host, _, port = endpoint.rpartition(":")
    return f"{host}:{int(port) + rank}"


def _numbered(frames: Sequence[bytes]) -> tuple[int, bytes]:
    """Some versions send the topic with a replay, some do not; number and payload are always last."""
    if len(frames) < 2 or len(frames[-2]) != 8:
        raise ValueError("it sends something that is no KV event")
    return int.from_bytes(frames[-2], "big"), frames[-1]
