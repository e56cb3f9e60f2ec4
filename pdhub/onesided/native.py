"""What a plugin implements: the native library, as one instance of the transport uses it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

from pdhub.api import TransferFailed


class Piece(NamedTuple):
    """Copy ``nbytes`` from ``source`` (an address in this process) to ``target`` (one in the target's).

    Devices are ``cpu`` or ``cuda:N``, as each side numbers its own.
    """

    source: int
    source_device: str
    target: int
    target_device: str
    nbytes: int


class StillUnderWay(TransferFailed):
    """A library gave up on a write that it cannot stop: it may still read the source and write to the target."""


class Sending(ABC):
    """Pieces that were posted together. Used by one thread.

    ``unproven`` becomes True when bytes may still be on their way to the target although the library calls this ended,
    as after an attempt that broke and was repeated. The target then never uses that memory again.
    """

    unproven = False

    @abstractmethod
    def poll(self) -> bool:
        """True when every byte is visible to the target. Never blocks for long. After True or an exception the
        library reads nothing of the source any more, and poll is not called again.

        Raises:
            TransferFailed: it failed; this side has ended it. What had left already may still reach the target.
            StillUnderWay: it failed and may not have ended; the way to the target is of no more use.
        """

    def stop(self) -> None:
        """Nobody wants it any more: post and repeat nothing further. :meth:`poll` is asked until the rest ended."""


class Route(ABC):
    """The way to one target process. Used by one thread."""

    @abstractmethod
    def learn(self, memory: bytes) -> None:
        """Take in what :meth:`Native.describe_memory` said at the target, before the first write into that memory.
        Raises TransferFailed."""

    @abstractmethod
    def post(self, pieces: Sequence[Piece]) -> Sending:
        """Start to write. Source and target memory are registered. Raises TransferFailed."""

    @abstractmethod
    def close(self) -> None:
        """Drop the way. Idempotent. Whatever was posted and has not ended is given up, and its source is not read any
        more when this returns, as far as the library can be made to stop."""


class Native(ABC):
    """The library and its registrations. Thread-safe.

    ``devices``: kinds of memory it moves (``cpu``, ``cuda``). ``remote``: other hosts can be reached.
    """

    devices: frozenset[str] = frozenset({"cpu"})
    remote: bool = True

    @abstractmethod
    def open(self) -> None:
        """Load and start the library. Raises PluginError, with the command that installs it if it is missing."""

    @abstractmethod
    def describe(self) -> bytes:
        """How another process's library reaches this one; stable for its life."""

    @abstractmethod
    def connect(self, description: bytes) -> Route:
        """A way to what :meth:`describe` said. Raises TransferFailed."""

    @abstractmethod
    def register(self, address: int, nbytes: int, device: str) -> object:
        """Make memory usable as source and target; a handle for it. Raises ValueError if the library refuses it."""

    @abstractmethod
    def describe_memory(self, handle: object) -> bytes:
        """What a writer's library must know of registered memory; empty if nothing."""

    @abstractmethod
    def deregister(self, handle: object) -> None:
        """Undo :meth:`register`. The target's library refuses writes into it from now on, if it can."""

    @abstractmethod
    def close(self) -> None:
        """Stop the library. Idempotent. Whatever is still registered is forgotten."""
