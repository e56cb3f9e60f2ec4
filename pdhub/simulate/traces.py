"""When requests come and how long they are: readers of public trace formats, and a generator.

* ``mooncake``: JSON lines with ``timestamp`` (ms), ``input_length``, ``output_length`` and ``hash_ids`` (ids of
  512-token blocks; equal ids = shared beginning). https://github.com/kvcache-ai/Mooncake, FAST25-release/traces
* ``azure``: CSV with ``TIMESTAMP``, ``ContextTokens``, ``GeneratedTokens``. https://github.com/Azure/AzurePublicDataset
* ``synthetic:requests=1000,rate=5,…``: drawn; see :class:`Synthetic`.
"""

from __future__ import annotations

import csv
import json
import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from datetime import datetime
from itertools import groupby, islice
from pathlib import Path

from pdhub.api.errors import ConfigError

BLOCK_TOKENS = 512
"""Tokens of a block that a Mooncake trace has an id for."""


TICK_S = 3.0
"""Resolution of a Mooncake trace's time stamps."""


@dataclass(frozen=True, slots=True)
class Item:
    """One request of a trace.

    Args:
        at_s: since the trace began.
        output_tokens: at least 1; what the model would write, which only the simulated engine and an oracle know.
        prefix: ids of the prompt's blocks of :data:`BLOCK_TOKENS` tokens.
    """

    at_s: float
    prompt_tokens: int
    output_tokens: int
    prefix: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Synthetic:
    """Lengths are log-normal, arrivals come in bursts.

    Args:
        rate: requests a second. burst: 1 = Poisson; larger = gaps more uneven (their squared variation).
        prompt, output: medians. spread: standard deviation of the logarithms.
        shared: part of the requests that begin like one of the 16 common prefixes.
    """

    requests: int = 1000
    rate: float = 5.0
    burst: float = 1.0
    prompt: float = 1000.0
    output: float = 200.0
    spread: float = 0.8
    shared: float = 0.0
    seed: int = 0

    def items(self) -> list[Item]:
        rng = random.Random(self.seed)
        at, made = 0.0, []
        for _ in range(self.requests):
            # Gamma gaps: mean 1/rate, squared variation `burst`.
            at += rng.gammavariate(1 / self.burst, self.burst / self.rate)
            prompt = max(1, round(self.prompt * math.exp(rng.gauss(0, self.spread))))
            output = max(1, round(self.output * math.exp(rng.gauss(0, self.spread))))
            blocks = max(1, prompt // BLOCK_TOKENS)
            common = rng.randrange(16) if rng.random() < self.shared else None
            unique = rng.getrandbits(40)
            same = 0 if common is None else (blocks + 1) // 2
            prefix = tuple(
                (common or 0) * 1_000_003 + i if i < same else (unique << 12) + i + 1_000_000_000 for i in range(blocks)
            )
            made.append(Item(at, prompt, output, prefix))
        return made


def read_trace(source: str, kind: str | None = None, *, skip: int = 0, limit: int | None = None) -> list[Item]:
    """A trace, in order of time, starting at 0.

    Args:
        source: a file, or ``synthetic:key=value,…``.
        kind: ``mooncake`` or ``azure``; None = by the file's name (``.jsonl`` or ``.csv``).
        skip, limit: rows left out at the beginning, and rows read after them.

    Raises:
        ConfigError: unreadable, with the row.
    """
    if source.startswith("synthetic"):
        items: Iterable[Item] = _synthetic(source)
    else:
        path = Path(source)
        kind = kind or {".jsonl": "mooncake", ".csv": "azure"}.get(path.suffix)
        if kind not in ("mooncake", "azure"):
            hint = "say --trace-format mooncake or azure"
            raise ConfigError(f"cannot tell the format of '{source}'", where="trace", hint=hint)
        rows = _mooncake(path) if kind == "mooncake" else _azure(path)
        items = rows
    chosen = sorted(islice(items, skip, None if limit is None else skip + limit), key=lambda item: item.at_s)
    if kind == "mooncake":
        chosen = _spread(chosen)
    if not chosen:
        raise ConfigError("the trace has no rows", where=source)
    first = chosen[0].at_s
    return [replace(item, at_s=item.at_s - first) for item in chosen]


def rate(items: Sequence[Item]) -> float:
    """Requests a second, on average; one alone counts as 1."""
    span = items[-1].at_s - items[0].at_s
    return (len(items) - 1) / span if span > 0 else 1.0


def _mooncake(path: Path) -> Iterable[Item]:
    for number, line in enumerate(_lines(path), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            prefix = tuple(int(i) for i in row.get("hash_ids", ()))
            yield _item(float(row["timestamp"]) / 1000, row["input_length"], row["output_length"], prefix)
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"not a row of a Mooncake trace: {error}", where=f"{path}, line {number}") from None


def _spread(items: Sequence[Item]) -> list[Item]:
    """The clock of these traces ticks every three seconds: requests of one tick evenly over the time to the next."""
    made: list[Item] = []
    for at, group in groupby(items, key=lambda item: item.at_s):
        tick = list(group)
        made += [replace(item, at_s=at + TICK_S * i / len(tick)) for i, item in enumerate(tick)]
    return sorted(made, key=lambda item: item.at_s)


def _azure(path: Path) -> Iterable[Item]:
    for number, row in enumerate(csv.DictReader(_lines(path)), 2):
        try:
            # Seven digits of a second are more than Python reads.
            at = datetime.fromisoformat(row["TIMESTAMP"].strip()[:26]).timestamp()
            yield _item(at, row["ContextTokens"], row["GeneratedTokens"], ())
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ConfigError(f"not a row of an Azure trace: {error}", where=f"{path}, line {number}") from None


def _lines(path: Path) -> Iterable[str]:
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            yield from file
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the trace: {error}", where=str(path)) from None


def _item(at: float, prompt: object, output: object, prefix: tuple[int, ...]) -> Item:
    if not math.isfinite(at):
        raise ValueError(f"time {at}")
    return Item(at, max(1, int(str(prompt))), max(1, int(str(output))), prefix)


def _synthetic(source: str) -> list[Item]:
    known = {f.name: f.type for f in fields(Synthetic)}
    values: dict[str, float | int] = {}
    for part in filter(None, source.partition(":")[2].split(",")):
        name, _, text = part.partition("=")
        if name not in known:
            hint = f"there are: {', '.join(known)}"
            raise ConfigError(f"a synthetic trace has no '{name}'", where=source, hint=hint)
        try:
            values[name] = int(text) if known[name] == "int" else float(text)
        except ValueError:
            raise ConfigError(f"'{text}' is no number", where=f"{source}: {name}") from None
    made = Synthetic(**values)  # type: ignore[arg-type]
    if not (
        0 < made.requests <= 10_000_000 and made.rate > 0 and made.burst > 0 and made.prompt > 0 and made.output > 0
    ):
        raise ConfigError("requests, rate, burst, prompt and output must be positive", where=source)
    return made.items()
