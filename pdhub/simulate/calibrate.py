"""``pdhub calibrate``: a costs file from requests that a live router served."""

from __future__ import annotations

import json
import math
import statistics
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from pdhub.api.errors import ConfigError
from pdhub.config.build import Plan, load_plan, needs_prefill
from pdhub.simulate.output import check_out

Record = Mapping[str, Any]

LEAST_TOKENS = 5
"""An answer that is shorter says little about the time of a token."""

ENOUGH = 5
"""Requests of about the same concurrency that make a point of the curve; with fewer the curve goes on without it."""

PAIRS = 4000
"""Pairs of requests that the slope over the prompt's length is the median of."""

POLL_S = 1.0


@dataclass(frozen=True)
class Options:
    """The words. See ``pdhub calibrate --help``."""

    config: Path
    url: str | None = None
    records: Path | None = None
    seconds: float = 0.0
    out: Path | None = None
    overrides: Sequence[str] = ()


def run(options: Options) -> int:
    """Fit, and write or print. Raises ConfigError."""
    check_out(options.out)
    plan = load_plan(options.config, overrides=options.overrides)
    router = plan.config.router
    if options.records is not None:
        records = read_records(options.records)
        source = options.records.name
    else:
        source = options.url or f"http://{router.host}:{router.port}"
        records = watch(source, options.seconds)
    text = document(plan, records, source)
    if options.out is None:
        print(text, end="")
    else:
        options.out.write_text(text, encoding="utf-8")
        print(f"wrote {options.out}", file=sys.stderr)
    return 0


def document(plan: Plan, records: Sequence[Record], source: str) -> str:
    """The YAML. Raises ConfigError if nothing was measured."""
    found: dict[str, Any] = {"pools": {}}
    notes = [f"Fitted by pdhub calibrate from {len(records)} requests of {source}."]
    for pool in plan.config.pools:
        mine = [r for r in records if r.get("pool") == pool.name and r.get("outcome") == "ok"]
        model = fit_decode(mine, getattr(plan.pools[pool.name].config, "slots", None))
        if model is None:
            notes.append(f"Pool {pool.name}: too few answers of {LEAST_TOKENS} tokens or more; left out.")
            continue
        if not needs_prefill(plan.pools[pool.name]):
            model["prefill"] = fit_prefill(mine)
            model["start_ms"] = 0.0
        found["pools"][pool.name] = model
        notes.append(f"Pool {pool.name}: {len(mine)} answers.")
    if not found["pools"]:
        hint = "send requests to every pool first, at several levels of load; the router keeps the last 256"
        raise ConfigError("nothing to fit: no pool has enough answers", where=source, hint=hint)
    shared = [r for r in records if r.get("prefill") and r.get("outcome") == "ok"]
    if shared:
        found["prefill"] = fit_prefill(shared)
    return "".join(f"# {note}\n" for note in notes) + yaml.safe_dump(found, sort_keys=False)


def fit_decode(records: Iterable[Record], slots: int | None = None) -> dict[str, Any] | None:
    """A decode model from ended requests; None if there are too few.

    Args:
        records: as ``/debug/requests`` lists them. slots: None = as many as were seen at once.
    """
    useful = [r for r in records if r.get("tpot_ms") and (r.get("completion_tokens") or 0) >= LEAST_TOKENS]
    if len(useful) < ENOUGH:
        return None
    most = slots or max(r.get("concurrency") or 1 for r in useful)
    groups: dict[int, list[tuple[int, float]]] = {}
    for r in useful:
        running = min(most, max(1, r.get("concurrency") or 1))
        groups.setdefault(running.bit_length(), []).append((running, r["tpot_ms"]))
    points: dict[int, float] = {}
    slowest = 0.0
    for _, group in sorted(groups.items()):
        if len(group) >= ENOUGH or len(groups) == 1:
            at = round(statistics.median(running for running, _ in group))
            # More company never makes a token quicker: what looks like it is noise.
            slowest = max(slowest, statistics.median(tpot for _, tpot in group))
            points[at] = round(slowest, 3)
    if not points:
        everything = [tpot for group in groups.values() for _, tpot in group]
        points = {1: round(statistics.median(everything), 3)}
    starts = [r["handoff_ms"] for r in useful if r.get("handoff_ms") is not None]
    return {
        "kind": "decode",
        "slots": most,
        "tpot_ms": points,
        "spread": round(_spread(groups), 3),
        "start_ms": round(statistics.median(starts), 2) if starts else 0.0,
    }


def fit_prefill(records: Sequence[Record]) -> dict[str, Any]:
    """A prefill model: constant and slope of the time to the first token, waits taken off.

    The slope is the median over pairs, the constant leaves a quarter of all requests below the line: the others met a
    backlog or a busy node.
    """
    points = []
    for r in records:
        extra = r.get("extra") or {}
        waits = (r.get("queued_ms") or 0.0) + (extra.get("slot_wait_ms") or 0.0) + (r.get("handoff_ms") or 0.0)
        tokens = (r.get("prompt_tokens") or 0) - (extra.get("cached_tokens") or 0)
        if r.get("ttft_ms") and tokens > 0 and r["ttft_ms"] > waits:
            points.append((tokens, r["ttft_ms"] - waits))
    if not points:
        return {"kind": "prefill", "ms": 0.0, "ms_per_token": 0.0}
    points.sort()
    half = len(points) // 2
    step = max(1, half * half // PAIRS)
    pairs = [(a, b) for a in points[:half] for b in points[half:]][::step]
    slopes = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in pairs if b[0] > a[0]]
    slope = max(0.0, statistics.median(slopes)) if slopes else 0.0
    rests = sorted(time_ms - slope * tokens for tokens, time_ms in points)
    return {"kind": "prefill", "ms": round(max(0.0, rests[len(rests) // 4]), 3), "ms_per_token": round(slope, 6)}


def read_records(path: Path) -> list[Record]:
    """JSON lines, or what ``/debug/requests`` answered. Raises ConfigError."""
    try:
        text = path.read_text(encoding="utf-8")
        if text.lstrip().startswith('{"requests"'):
            return _listed(json.loads(text), str(path))
        return [row for line in text.splitlines() if line.strip() and isinstance(row := json.loads(line), dict)]
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read requests: {error}", where=str(path)) from None


def watch(url: str, seconds: float) -> list[Record]:
    """What the router remembers, and what ends in the next ``seconds``. Raises ConfigError."""
    end = time.monotonic() + seconds
    found: dict[str, Record] = {}
    while True:
        for record in _fetch(url):
            found[str(record.get("id"))] = record
        if time.monotonic() >= end:
            return list(found.values())
        time.sleep(min(POLL_S, max(0.0, end - time.monotonic())))


def _fetch(url: str) -> list[Record]:
    try:
        with urllib.request.urlopen(f"{url.rstrip('/')}/debug/requests", timeout=5) as answer:
            return _listed(json.load(answer), url)
    except urllib.error.HTTPError as error:
        error.close()
        hint = "set router.debug_headers: true" if error.code == 404 else None
        raise ConfigError(f"the router answered {error.code}", where=url, hint=hint) from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot ask the router: {error}", where=url, hint="is it running?") from None


def _listed(data: Any, where: str) -> list[Record]:
    rows = data.get("requests") if isinstance(data, dict) else None
    if not isinstance(rows, list):
        raise ConfigError("not a list of requests", where=where)
    return [row for row in rows if isinstance(row, dict)]


def _spread(groups: Mapping[int, Sequence[tuple[int, float]]]) -> float:
    """Of a request's speed around others in the same company."""
    logs = []
    for group in groups.values():
        if len(group) >= ENOUGH:
            middle = math.log(statistics.median(tpot for _, tpot in group))
            logs += [math.log(tpot) - middle for _, tpot in group]
    return min(1.0, statistics.pstdev(logs)) if len(logs) > 1 else 0.0
