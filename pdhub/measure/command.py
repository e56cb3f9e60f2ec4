"""``pdhub handoff-bench``: from words on the command line to a table or JSON."""

from __future__ import annotations

import json
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import yaml
from pydantic import ValidationError
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from pdhub import __version__
from pdhub.api import TransportSpec
from pdhub.api.errors import ConfigError
from pdhub.api.layout import Order
from pdhub.measure.handoff import Bench, Result, Work
from pdhub.measure.layouts import layout
from pdhub.registry import load


@dataclass(frozen=True)
class Options:
    """The words, not yet read. See ``pdhub handoff-bench --help``."""

    transports: Sequence[str] = ("shm",)
    options: Sequence[str] = ()
    layout: str = "llama-3.2-1b"
    layer_major: bool = False
    tokens: int = 4096
    chunk: int = 1024
    prefill_per_s: float = 10_000.0
    source: str = "cpu"
    target: str = "cpu"
    runs: int = 7
    json: bool = False


def run(options: Options) -> int:
    """Measure and print. Raises ConfigError or PluginError."""
    found = layout(options.layout, Order.LAYER_MAJOR if options.layer_major else Order.BLOCK_MAJOR)
    for group in found.groups:
        if options.chunk % group.block_tokens:
            hint = f"take a multiple of {group.block_tokens}, the tokens of its blocks"
            raise ConfigError(f"{options.chunk} cuts a block of {options.layout}", where="--chunk", hint=hint)
    work = Work(found, options.tokens, options.chunk, options.prefill_per_s, options.source, options.target)
    registry = load(warn=False)
    chosen = [(registry.transport(name), _options(name, options.options)) for name in options.transports]
    for spec, given in chosen:
        _check(spec, given)
    results = _measure(chosen, work, options.runs)
    if options.json:
        machine = {"python": platform.python_version(), "system": platform.platform(), "pdhub": __version__}
        print(json.dumps({**machine, "results": [result.row() for result in results]}, indent=2))
    else:
        show(results)
    return 0


def _measure(chosen: Sequence[tuple[TransportSpec, dict[str, Any]]], work: Work, runs: int) -> list[Result]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    results = []
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        for spec, given in chosen:
            task = progress.add_task(spec.name, total=runs + 1)
            bench = Bench(spec, given, work)
            try:
                results.append(bench.run(runs, lambda task=task: progress.advance(task)))  # type: ignore[misc]
            finally:
                bench.close()
    return results


def _options(name: str, words: Sequence[str]) -> dict[str, Any]:
    """``KEY=VALUE`` for every transport, ``NAME.KEY=VALUE`` for one."""
    given: dict[str, Any] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals:
            raise ConfigError(f"'{word}' is not KEY=VALUE", where="--option")
        owner, dot, rest = key.rpartition(".")
        if not dot or owner == name:
            given[rest] = yaml.safe_load(value)
    return given


def _check(spec: TransportSpec, given: dict[str, Any]) -> None:
    try:
        spec.config.model_validate(given)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        hint = f"{spec.name} has the options {', '.join(spec.config.model_fields)}"
        raise ConfigError(f"{spec.name}: {where}: {first['msg']}", where="--option", hint=hint) from error


def show(results: Sequence[Result]) -> None:
    """One column a transport."""
    work = results[0].work
    table = Table(
        title=f"{work.layout.model}, {work.tokens} tokens: {work.nbytes / 1e6:,.1f} MB in {work.chunk}-token chunks"
    )
    table.add_column("")
    for result in results:
        table.add_column(result.transport, justify="right")
    rows = [result.row() for result in results]

    def line(label: str, *cells: str) -> None:
        table.add_row(label, *cells)

    line("GB/s", *(f"{row['gb_s']:.2f}" for row in rows))
    line("  slowest to fastest run", *(f"{row['gb_s_slowest']:.2f} to {row['gb_s_fastest']:.2f}" for row in rows))
    line("exposed, sent while prefill computes", *(f"{1e3 * row['exposed_s']:.1f} ms" for row in rows))
    line("exposed, sent after prefill", *(f"{1e3 * row['exposed_if_sent_at_the_end_s']:.1f} ms" for row in rows))
    line("prefill (assumed)", *(f"{1e3 * row['prefill_s']:.1f} ms" for row in rows))
    line("CPU of the sender", *(f"{1e3 * row['sender_cpu_s']:.1f} ms" for row in rows))
    line("CPU of the target", *(f"{1e3 * row['target_cpu_s']:.1f} ms" for row in rows))
    line("writes", *(str(row["writes"]) for row in rows))
    line("bytes compared", *("yes" if row["verified"] else "no" for row in rows))
    Console().print(table)
