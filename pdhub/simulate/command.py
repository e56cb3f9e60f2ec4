"""``pdhub simulate``: from words on the command line to runs and their report."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from pdhub.api.errors import ConfigError
from pdhub.config.build import Plan, build_plan, load_plan, parse_config
from pdhub.config.models import Config
from pdhub.config.policy_models import SLOClass
from pdhub.core.slo_classes import PRESETS
from pdhub.simulate.compare import compare, data
from pdhub.simulate.cost import Costs, load_costs
from pdhub.simulate.lab import DEFAULT_TPOT_MS, Contender, World, of_plan, oracle
from pdhub.simulate.output import check_out
from pdhub.simulate.table import show
from pdhub.simulate.traces import Item, rate, read_trace
from pdhub.simulate.truth import Truth
from pdhub.simulate.workload import Class, Mix

DEFAULT_MIX = ("mlperf/llama2-70b-interactive", "mlperf/llama2-70b-server")
"""Of a configuration without service classes."""


@dataclass(frozen=True)
class Options:
    """The words, not yet read. See ``pdhub simulate --help``."""

    config: Path
    trace: str
    trace_format: str | None = None
    rate: str = "1x"
    policies: Sequence[Path] = ()
    costs: Path | None = None
    mix: Sequence[str] = ()
    truth: str = ""
    seeds: int = 1
    requests: int | None = None
    oracle: bool = False
    baselines: bool = False
    out: Path | None = None
    json: bool = False
    overrides: Sequence[str] = ()


def run(options: Options) -> int:
    """Simulate, print, write. Raises ConfigError."""
    plan = load_plan(options.config, overrides=options.overrides)
    check_out(options.out)
    costs = load_costs(options.costs) if options.costs else Costs()
    items = read_trace(options.trace, options.trace_format, limit=options.requests)
    speed = _speed(options.rate, items)
    contenders = _contenders(plan, options)
    world = World(plan, costs, _truth(options.truth))
    mix = mix_of(plan.config, options.mix)
    console = Console(stderr=True)
    for pool in plan.config.pools:
        if costs.pool(pool.name) is None and pool.latency.tpot_ms is None:
            text = (
                f"pool {pool.name}: neither costs nor latency.tpot_ms are given; {DEFAULT_TPOT_MS:g} ms a token assumed"
            )
            console.print(text, style="yellow")
    found = compare(
        world,
        contenders,
        items,
        mix,
        speed=speed,
        seeds=range(options.seeds),
        told=lambda r: console.print(f"{r.policy}, seed {r.seed}: {r.goodput:.3f} good/s", style="dim"),
    )
    title = f"{_short(options.trace)}: {len(items)} requests, {rate(items) * speed:.2f}/s, {options.seeds} seed(s)"
    if options.out is not None:
        from pdhub.simulate.report import page

        options.out.write_text(page(found, title), encoding="utf-8")
        console.print(f"wrote {options.out}", style="dim")
    if options.json:
        print(json.dumps({"title": title, **data(found)}, indent=2))
    else:
        show(found, title, Console())
    return 0


def mix_of(config: Config, words: Sequence[str]) -> Mix:
    """``NAME=SHARE`` words, or every class of the configuration, or a pair of presets.

    Raises:
        ConfigError: a name that is neither a class of the policy, nor a preset, nor ``none``.
    """
    classes = config.policy.slo_classes
    chosen = list(words) or [f"{name}=1" for name in classes] or [f"{name}=1" for name in DEFAULT_MIX]
    made = []
    for word in chosen:
        name, _, share = word.rpartition("=") if "=" in word else (word, "", "1")
        if name in classes:
            found = _own(classes[name])
        elif name in PRESETS:
            found = Class(name, 1.0, *PRESETS[name])
        elif name == "none":
            found = Class(name)
        else:
            hint = f"there are: none, {', '.join([*classes, *PRESETS])}"
            raise ConfigError(f"there is no service class '{name}'", where="--mix", hint=hint)
        made.append(replace(found, name=name, share=_number(share, "--mix")))
    return Mix(tuple(made))


def _own(given: SLOClass) -> Class:
    ttft, tpot = PRESETS[given.preset] if given.preset else (None, None)
    return Class(
        name="",
        ttft_ms=ttft if given.ttft_ms is None else given.ttft_ms,
        tpot_ms=tpot if given.tpot_ms is None else given.tpot_ms,
        priority=given.priority or 0,
    )


def with_policy(plan: Plan, path: Path) -> Plan:
    """The same fleet under another policy.

    Args:
        path: a whole configuration, or only its ``policy`` section, with or without that key.
    """
    try:
        found: Any = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"cannot read the policy: {error}", where=str(path)) from None
    if not isinstance(found, dict):
        raise ConfigError("not a policy", where=str(path))
    section = found.get("policy", found)
    raw = plan.config.model_dump(mode="json")
    raw["policy"] = section
    if "admission" in found:
        raw["admission"] = found["admission"]
    return build_plan(parse_config(raw), plan.registry, path)


def _contenders(plan: Plan, options: Options) -> list[Contender]:
    made = [of_plan(plan, _unique(options.config.stem, []))]
    for path in options.policies:
        made.append(of_plan(with_policy(plan, path), _unique(path.stem, [c.name for c in made])))
    if options.baselines:
        from pdhub.simulate.baselines import baselines

        made += baselines(plan.config)
    if options.oracle:
        made.append(oracle())
    return made


def _unique(name: str, taken: Sequence[str]) -> str:
    number, found = 2, name
    while found in taken:
        found, number = f"{name}-{number}", number + 1
    return found


def _speed(text: str, items: Sequence[Item]) -> float:
    """``2x`` = twice as fast as recorded; ``5`` or ``5/s`` = so many requests a second."""
    if text.endswith("x"):
        return _number(text[:-1], "--rate")
    return _number(text.removesuffix("/s"), "--rate") / rate(items)


def _truth(text: str) -> Truth:
    """``spread=0.5,drift=0.2``."""
    known = {f.name for f in fields(Truth) if f.type == "float"}
    truth = Truth()
    for part in filter(None, text.split(",")):
        name, _, value = part.partition("=")
        if name not in known:
            raise ConfigError(f"there is no '{name}'", where="--truth", hint=f"there are: {', '.join(sorted(known))}")
        changed: dict[str, Any] = {name: 0.0 if value == "0" else _number(value, "--truth")}
        truth = replace(truth, **changed)
    return truth


def _short(trace: str) -> str:
    return trace if trace.startswith("synthetic") else Path(trace).name


def _number(text: str, where: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < 1e9:
        raise ConfigError(f"'{text}' is not a positive number", where=where)
    return value
