"""Continuous batching: one thread that runs steps over whoever is decoding. Requests join and leave between steps."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Sequence
from contextlib import nullcontext

import torch
from torch import Tensor

from pdhub.api import EngineFailed, Finished, RequestCancelled, TokenLogprob
from pdhub_transformers.model import LoadedModel
from pdhub_transformers.stream import Item, Stream

_log = logging.getLogger("pdhub.transformers")

Delivery = list[tuple[Stream, list[Item]]]


class DecodeWorker:
    """Runs until :meth:`close`. Everything a step gave reaches the event loop in one call.

    Args:
        model: what computes.
        slots: streams in one step; more wait in order.
    """

    def __init__(self, model: LoadedModel, slots: int, loop: asyncio.AbstractEventLoop, name: str) -> None:
        self._model = model
        self._slots = slots
        self._loop = loop
        self._wake = threading.Condition()
        self._waiting: deque[Stream] = deque()
        self._active: list[Stream] = []
        self._closing = False
        self._thread = threading.Thread(target=self._run, name=f"{name}-decode", daemon=True)
        self._thread.start()

    def submit(self, stream: Stream) -> None:
        """Decode ``stream`` from its first token on."""
        with self._wake:
            self._waiting.append(stream)
            self._wake.notify()

    def cancel(self, stream: Stream) -> None:
        """End it before the next step; its row is not touched after it ended."""
        with self._wake:
            stream.cancelled = True
            self._wake.notify()

    def load(self) -> tuple[int, int, int]:
        """Streams running and waiting, and tokens that they may still produce."""
        with self._wake:
            streams = [*self._active, *self._waiting]
            running = min(len(streams), self._slots)
            return running, len(streams) - running, sum(stream.remaining for stream in streams)

    def close(self) -> None:
        """Cancel everything and end the thread. Blocks for at most one step."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join()

    def _run(self) -> None:
        device = self._model.geometry.device
        with torch.inference_mode(), torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            while True:
                dropped, active = self._turn()
                self._deliver([(stream, [RequestCancelled("the request was cancelled")]) for stream in dropped])
                if active is None:
                    return
                if active:
                    self._deliver(self._step(active))

    def _turn(self) -> tuple[list[Stream], list[Stream] | None]:
        """Wait for work. Streams that were cancelled, and those of the next step (None: the end)."""
        with self._wake:
            while not (self._closing or self._active or self._waiting):
                self._wake.wait()
            everyone = [*self._active, *self._waiting]
            dropped = [stream for stream in everyone if stream.cancelled or self._closing]
            kept = [stream for stream in everyone if stream not in dropped]
            self._active = kept[: self._slots]
            self._waiting = deque(kept[self._slots :])
            return dropped, None if self._closing else list(self._active)

    def _step(self, active: list[Stream]) -> Delivery:
        try:
            feeds = [stream.feed() for stream in active]
            logits = self._model.decode(feeds)
            delivery = _sample(active, [len(feed.tokens) for feed in feeds], logits)
        except Exception:  # noqa: BLE001 - one bad step must end its requests, not the node
            _log.exception("a decode step failed")
            delivery = [(stream, [EngineFailed("the engine failed in a decode step")]) for stream in active]
        ended = {stream for stream, items in delivery if items and isinstance(items[-1], (Finished, BaseException))}
        if ended:
            with self._wake:
                self._active = [stream for stream in self._active if stream not in ended]
        return delivery

    def _deliver(self, delivery: Delivery) -> None:
        if not delivery:
            return
        try:
            self._loop.call_soon_threadsafe(_put, delivery)
        except RuntimeError:
            _log.warning("the event loop closed before %d streams ended", len(delivery))


def _put(delivery: Delivery) -> None:
    for stream, items in delivery:
        stream.outbox.put(items)


def _sample(active: Sequence[Stream], sizes: Sequence[int], logits: Tensor) -> Delivery:
    """Pick tokens from a step's logits; guesses are kept as far as the sampler picks the same."""
    delivery: Delivery = []
    largest = logits.argmax(-1).tolist() if any(stream.sampler.plain for stream in active) else []
    values = logits if all(stream.sampler.plain for stream in active) else logits.cpu()
    at = 0
    for stream, size in zip(active, sizes, strict=True):
        picks: list[tuple[int, TokenLogprob | None]] = []
        end = None
        for index in range(size):
            pick = (largest[at + index], None) if stream.sampler.plain else stream.sampler.pick(values[at + index])
            picks.append(pick)
            end = stream.accept(pick[0])
            if end or not stream.agrees(index, pick[0]):
                break
        delivery.append((stream, stream.take(picks, end)))
        at += size
    return delivery
