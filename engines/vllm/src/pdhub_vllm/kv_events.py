"""vLLM's KV cache events, without I/O: messages of its ZMQ publisher in, cache events out.

Written for ``vllm/distributed/kv_events.py`` of 0.26 to 0.33. A batch is msgpack: ``[ts, events, rank]``, in some
versions a map with those names; an event is a map tagged ``type``, in older versions a list that begins with the tag.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from typing import Any, Final

import msgspec

from pdhub.api import BlocksRemoved, BlocksStored, CacheEvent, CacheReset

_FIELDS: Final[Mapping[str, tuple[str, ...]]] = {
    "BlockStored": ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name"),
    "BlockRemoved": ("block_hashes", "medium"),
    "AllBlocksCleared": (),
}
"""Order of an event's members where it is a list."""

_decode = msgspec.msgpack.Decoder().decode


class EventStream:
    """The publisher's numbered batches, in order: what is missing, what is told twice, whether the server is a new one.

    Args:
        replays: batches that were missed can be had again: whoever reads then looks at :attr:`missing`.
    """

    def __init__(self, *, replays: bool) -> None:
        self._replays = replays
        self._next = 0
        self._live: int | None = None
        #: number from which on batches must be asked for again; None = nothing is missing
        self.missing: int | None = 0 if replays else None

    def live(self, number: int, payload: bytes) -> list[CacheEvent]:
        """A batch that was published. One that shows that others were missed is left to the replay, if there is one."""
        out: list[CacheEvent] = []
        if self._live is not None and number <= self._live:  # numbers only grow: another process, with an empty cache
            self._next, self.missing = 0, None
            out.append(CacheReset(empty=True))
        elif self._live is None and self._next == 0 and number == 0:
            self.missing = None
            out.append(CacheReset(empty=True))
        self._live = number
        if number < self._next:
            return out  # the replay has told it
        if number > self._next and self._replays:
            self.missing = self._next
            return out
        if number > self._next:
            out.append(CacheReset(empty=False))
        return out + self._take(number, payload)

    def replayed(self, number: int, payload: bytes) -> list[CacheEvent]:
        """A batch of a replay, in order."""
        if number < self._next:
            return []
        out: list[CacheEvent] = []
        if number > self._next:  # the publisher remembers a limited number of batches
            out.append(CacheReset(empty=False))
        elif number == 0:
            out.append(CacheReset(empty=True))
        return out + self._take(number, payload)

    def replay_ended(self) -> list[CacheEvent]:
        """It brought all that there is. A batch that is still missing is lost."""
        self.missing = None
        if self._live is None or self._live < self._next:
            return []
        self._next = self._live + 1
        return [CacheReset(empty=False)]

    def no_replay(self) -> list[CacheEvent]:
        """It was not answered: go on with what comes."""
        self._replays = False
        return self.replay_ended()

    def _take(self, number: int, payload: bytes) -> list[CacheEvent]:
        self._next = number + 1
        try:
            return list(_events(_decode(payload)))
        except (msgspec.DecodeError, TypeError, ValueError, LookupError):
            return [CacheReset(empty=False)]  # whatever it said is missed


def _events(batch: Any) -> Iterator[CacheEvent]:
    """Raises TypeError, ValueError or LookupError for what is no batch. Unknown kinds of events say nothing."""
    events = batch["events"] if isinstance(batch, dict) and "events" in batch else batch[1]
    if not isinstance(events, list):
        raise TypeError("no list of events")
    for event in events:
        kind, members = _read(event)
        if kind == "AllBlocksCleared":
            yield CacheReset(empty=True)
        elif kind in _FIELDS and _here(members):
            names = _names(members["block_hashes"])
            if kind == "BlockRemoved":
                yield BlocksRemoved(names)
            elif not _private(members):
                parent, size = members.get("parent_block_hash"), members["block_size"]
                tokens = members["token_ids"]
                if not isinstance(size, int) or not _is_tokens(tokens) or not (parent is None or _is_name(parent)):
                    raise TypeError("no stored block")
                yield BlocksStored(names, parent, tuple(tokens), size)


def _read(event: Any) -> tuple[str, Mapping[str, Any]]:
    if isinstance(event, dict):
        return str(event.get("type")), _Members(event)
    if isinstance(event, list) and event and isinstance(event[0], str):
        return event[0], _Members(zip(_FIELDS.get(event[0], ()), event[1:], strict=False))
    raise TypeError("no event")


class _Members(dict[str, Any]):
    def __missing__(self, name: str) -> Any:
        raise ValueError(f"an event without {name}")


def _here(members: Mapping[str, Any]) -> bool:
    """Of the cache on the device, and of full attention: its group is the first. The others are evicted otherwise."""
    return (
        members.get("medium") in (None, "GPU")
        and members.get("group_idx") in (None, 0)
        and members.get("locality") in (None, "LOCAL")
        and members.get("ownership") is None
    )


def _private(members: Mapping[str, Any]) -> bool:
    """Its tokens alone do not say what is in it: an adapter, an image, or a cache salt belongs to it."""
    keys = members.get("extra_keys")
    return (
        members.get("lora_id") is not None
        or members.get("lora_name") is not None
        or (isinstance(keys, list) and any(keys))
    )


def _names(told: Any) -> tuple[Hashable, ...]:
    if not isinstance(told, list) or not all(map(_is_name, told)):
        raise TypeError("no names of blocks")
    return tuple(told)


def _is_name(told: Any) -> bool:
    """64 bits of its hash, or all of it."""
    return isinstance(told, int | bytes)


def _is_tokens(told: Any) -> bool:
    return isinstance(told, list) and all(isinstance(t, int) and 0 <= t < 1 << 62 for t in told)
