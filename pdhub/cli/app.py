"""The verbs. Each imports what it needs when it runs, so that ``pdhub --help`` is quick."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from pdhub import __version__
from pdhub.cli.failure import report

_PLUGIN = "run-plugin"
"""Hidden verb that runs a plugin's command group; :func:`_words` puts it in front of the group's name."""

app = typer.Typer(
    name="pdhub",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Plugins may add commands of their own: `pdhub plugins` lists them as kind `command`.",
)
config_app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Look at configuration: show, schema, docs.")
app.add_typer(config_app, name="config")

ConfigFile = Annotated[Path, typer.Argument(help="The YAML file.", metavar="CONFIG", show_default=False)]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="PATH=VALUE", help="Replace one value, such as router.port=9000. May be repeated."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


class NewKind(StrEnum):
    ENGINE = "engine"
    TRANSPORT = "transport"
    POLICY = "policy"


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run one verb and exit. Exit status: 0, 2 for a wrong command, configuration or installation, else 1."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        app(args=_words(words), prog_name="pdhub")
    except Exception as error:  # noqa: BLE001 - the last frame: whatever happened becomes one message
        raise SystemExit(report(error, debug=_debug(words))) from None
    raise SystemExit(0)


def verbs() -> list[str]:
    """Names of the built-in verbs."""
    own = [c.name or c.callback.__name__ for c in app.registered_commands if not c.hidden and c.callback]
    return sorted([*own, *(str(g.name) for g in app.registered_groups)])


def _debug(words: Sequence[str]) -> bool:
    from pdhub.api.errors import ConfigError
    from pdhub.config.settings import settings

    try:
        return "--debug" in words or settings().debug
    except ConfigError:
        return False


def _words(words: list[str]) -> list[str]:
    """``NAME …`` of a plugin's command becomes ``run-plugin NAME …``."""
    place = 0
    while place < len(words) and words[place].startswith("-"):
        place += 2 if words[place] == "--log-level" else 1
    if place >= len(words) or words[place] in verbs():
        return words
    return [*words[:place], _PLUGIN, *words[place:]]


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"pdhub {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    log_level: Annotated[
        str | None, typer.Option(help="debug, info, warning or error.", show_default="info", metavar="LEVEL")
    ] = None,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    """One OpenAI endpoint in front of different LLM decode engines.

    \b
    Examples:
      pdhub quickstart
      pdhub check configs/quickstart.yaml
      pdhub up configs/quickstart.yaml
      pdhub plugins
    """
    from pdhub.config.settings import settings
    from pdhub.telemetry.logs import configure

    try:
        configure(log_level or settings().log_level)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


@app.command()
def plugins(json: AsJson = False) -> None:
    """List what is installed: kind, name, distribution, version, stability, status, and each broken one's error.

    \b
    Examples:
      pdhub plugins
      pdhub plugins --json
    """
    from pdhub.cli.tables import plugins_json, plugins_text
    from pdhub.config.settings import settings
    from pdhub.registry import load

    rows = load(strict=settings().strict_plugins, warn=False).rows()
    typer.echo(plugins_json(rows) if json else plugins_text(rows))


@app.command()
def check(config: ConfigFile, set_: Overrides = None) -> None:
    """Validate a configuration and start nothing.

    \b
    Examples:
      pdhub check configs/quickstart.yaml
      pdhub check my.yaml --set policy.config.tpot_ms=20
    """
    from pdhub.cli.tables import findings_text, plan_text
    from pdhub.config.build import load_plan, speaks_tokens
    from pdhub.config.checks import check_model
    from pdhub.config.parsing import refuse_parser

    plan = load_plan(config, overrides=set_ or ())
    check_model(plan.config, plan.origins, detokenises=any(map(speaks_tokens, plan.pools.values())))
    findings = refuse_parser(plan)
    typer.echo(plan_text(plan))
    if findings:
        typer.echo(findings_text(findings))


@app.command()
def doctor(config: ConfigFile, set_: Overrides = None, json: AsJson = False) -> None:
    """Ask every plugin what is wrong with a deployment, its live nodes included. Exit status 1 if anything is.

    \b
    Examples:
      pdhub doctor configs/vllm-pull.yaml
      pdhub doctor my.yaml --json
    """
    from pdhub.cli.tables import findings_json, findings_text
    from pdhub.config.build import load_plan
    from pdhub.operate.doctor import examine, failed

    findings = examine(load_plan(config, overrides=set_ or ()))
    typer.echo(findings_json(findings) if json else findings_text(findings))
    raise typer.Exit(1 if failed(findings) else 0)


@app.command()
def node(config: ConfigFile, name: Annotated[str, typer.Argument(metavar="NAME")], set_: Overrides = None) -> None:
    """Run one node or prefill instance of the configuration. Ctrl-C drains it.

    \b
    Examples:
      pdhub node configs/quickstart.yaml fast-0
      pdhub node my.yaml prefill-0 --set prefill.prefill-0.port=9100
    """
    from pdhub.node.main import run

    raise typer.Exit(run(str(config), name, set_ or ()))


@app.command()
def router(config: ConfigFile, set_: Overrides = None) -> None:
    """Run the OpenAI endpoint.

    \b
    Examples:
      pdhub router configs/quickstart.yaml
      pdhub router my.yaml --set router.host=0.0.0.0 --set router.port=80
    """
    from pdhub.router.main import run

    raise typer.Exit(run(str(config), set_ or ()))


@app.command()
def up(config: ConfigFile, set_: Overrides = None) -> None:
    """Start every node that the configuration launches, and the router. One Ctrl-C stops all.

    \b
    Examples:
      pdhub up configs/quickstart.yaml
      pdhub up my.yaml --set router.port=9000
    """
    from pdhub.operate.up import run

    raise typer.Exit(run(str(config), set_ or ()))


@app.command()
def explain(
    config: ConfigFile,
    request: Annotated[str, typer.Option(help="File with the request's JSON body; - reads standard input.")],
    header: Annotated[
        list[str] | None, typer.Option("--header", "-H", metavar="NAME: VALUE", help="May be repeated.")
    ] = None,
    node: Annotated[
        list[str] | None,
        typer.Option(metavar="NODE=STATE", help="A node is down, draining …, or runs so many requests. Repeatable."),
    ] = None,
    at: Annotated[str | None, typer.Option(metavar="TIME", help="When it arrives, such as 2026-01-31T22:15.")] = None,
    set_: Overrides = None,
    json: AsJson = False,
) -> None:
    """Say where a request would go, and why. Nothing is started and nothing is sent.

    \b
    Examples:
      pdhub explain configs/policy-slo.yaml --request request.json -H 'x-slo-tpot-ms: 10'
      pdhub explain my.yaml --request - --node fast-0=down --json < request.json
    """
    from pdhub.cli.explained import explained_json, explained_text, read_headers, read_moment, read_request
    from pdhub.config.build import load_plan
    from pdhub.router.offline import ID, explain_offline

    headers = read_headers(header or ())
    explanation = explain_offline(
        load_plan(config, overrides=set_ or ()),
        read_request(request),
        headers,
        wall_s=read_moment(at),
        states=node or (),
        id=headers.get("x-request-id") or ID,
    )
    typer.echo(explained_json(explanation) if json else explained_text(explanation))


@app.command()
def quickstart(
    once: Annotated[bool, typer.Option("--once", help="Exit after the table.")] = False,
    prompt: Annotated[str | None, typer.Option(help="Ask this instead of the three built-in prompts.")] = None,
    port: Annotated[int | None, typer.Option(min=0, max=65535, help="The router's port.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print only a JSON list on stdout.")] = False,
) -> None:
    """Serve a small real model through two decode pools and show where each request went and why.

    \b
    Examples:
      pdhub quickstart
      pdhub quickstart --once --prompt "Why is the sky blue?"
      pdhub quickstart --once --json
    """
    from pdhub.operate.quickstart import Options, run

    raise typer.Exit(run(Options(once=once, prompt=prompt, port=port, json=json)))


@app.command()
def simulate(
    config: ConfigFile,
    trace: Annotated[str, typer.Option(help="A trace file, or synthetic:requests=1000,rate=5,prompt=1000,output=200.")],
    trace_format: Annotated[str | None, typer.Option(help="mooncake or azure; default: by the file's name.")] = None,
    rate: Annotated[str, typer.Option(help="2x = twice as fast as recorded; 5/s = five requests a second.")] = "1x",
    policy: Annotated[
        list[Path] | None, typer.Option(help="Another policy for the same fleet, side by side. May be repeated.")
    ] = None,
    costs: Annotated[Path | None, typer.Option(help="What the engines cost; default: the latency seeds.")] = None,
    mix: Annotated[
        list[str] | None, typer.Option(metavar="CLASS=SHARE", help="Service classes of the requests. May be repeated.")
    ] = None,
    truth: Annotated[
        str, typer.Option(help="How the engines differ from what the policy was told: spread=0.5,drift=0.2,nodes=0.1.")
    ] = "",
    seeds: Annotated[int, typer.Option(min=1, max=1000, help="Runs with different luck.")] = 1,
    requests: Annotated[int | None, typer.Option(min=1, help="Rows of the trace to use; default: all.")] = None,
    oracle: Annotated[bool, typer.Option("--oracle", help="Add a policy that knows everything.")] = False,
    baselines: Annotated[bool, typer.Option("--baselines", help="Add four simple policies.")] = False,
    out: Annotated[Path | None, typer.Option(help="Write an HTML page with plots.")] = None,
    set_: Overrides = None,
    json: AsJson = False,
) -> None:
    """Try a policy on a trace, under a virtual clock and against engines that are cost models.

    \b
    Examples:
      pdhub simulate configs/quickstart.yaml --trace synthetic:requests=2000,rate=2
      pdhub simulate my.yaml --trace conversation_trace.jsonl --rate 2x --costs costs.yaml --baselines --out report.html
      pdhub simulate my.yaml --trace azure.csv --policy other.yaml --seeds 5 --json
    """
    from pdhub.simulate.command import Options, run

    options = Options(
        config=config,
        trace=trace,
        trace_format=trace_format,
        rate=rate,
        policies=policy or (),
        costs=costs,
        mix=mix or (),
        truth=truth,
        seeds=seeds,
        requests=requests,
        oracle=oracle,
        baselines=baselines,
        out=out,
        json=json,
        overrides=set_ or (),
    )
    raise typer.Exit(run(options))


@app.command()
def calibrate(
    config: ConfigFile,
    url: Annotated[
        str | None, typer.Option(help="The running router; default: where the configuration puts it.")
    ] = None,
    records: Annotated[Path | None, typer.Option(help="Requests of an earlier run, instead of a router.")] = None,
    seconds: Annotated[float, typer.Option(min=0, max=86400, help="Keep watching so long.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Write the costs file; default: print it.")] = None,
    set_: Overrides = None,
) -> None:
    """Fit what the engines cost, for `pdhub simulate --costs`, from requests that a router served.

    \b
    Examples:
      pdhub calibrate my.yaml --seconds 60 --out costs.yaml
      pdhub calibrate my.yaml --url http://10.0.0.1:8000 > costs.yaml
    """
    from pdhub.simulate.calibrate import Options, run

    raise typer.Exit(
        run(Options(config=config, url=url, records=records, seconds=seconds, out=out, overrides=set_ or ()))
    )


@app.command("handoff-bench")
def handoff_bench(
    transport: Annotated[
        list[str] | None, typer.Option("--transport", "-t", help="May be repeated.", show_default="shm")
    ] = None,
    option: Annotated[
        list[str] | None,
        typer.Option("--option", "-o", metavar="KEY=VALUE", help="An option of the transport, or NAME.KEY=VALUE."),
    ] = None,
    layout: Annotated[
        str, typer.Option(help="A model's KV, or custom:layers=32,block_tokens=16,block_bytes=65536.")
    ] = "llama-3.2-1b",
    layer_major: Annotated[bool, typer.Option("--layer-major", help="The landing is ordered by layer.")] = False,
    tokens: Annotated[int, typer.Option(min=1, help="Length of the prompt.")] = 4096,
    chunk: Annotated[int, typer.Option(min=1, help="Tokens that prefill computes at a time.")] = 1024,
    prefill: Annotated[float, typer.Option(min=1, help="Tokens that prefill is assumed to compute a second.")] = 10_000,
    source: Annotated[str, typer.Option(help="Memory of the sender: cpu or cuda:N.")] = "cpu",
    target: Annotated[str, typer.Option(help="Memory of the node: cpu or cuda:N.")] = "cpu",
    runs: Annotated[int, typer.Option(min=1, max=1000, help="Medians are over so many runs.")] = 7,
    json: AsJson = False,
) -> None:
    """Hand KV over between two processes and measure: GB/s, the time that a client waits for it, CPU seconds.

    \b
    Examples:
      pdhub handoff-bench
      pdhub handoff-bench -t shm -t tcp --layout llama-3.1-8b --tokens 8192 --chunk 2048
      pdhub handoff-bench -t nixl --layout deepseek-v3.2 --layer-major --json
      pdhub handoff-bench -t mooncake -o protocol=tcp -o mooncake.pieces_in_flight=8
    """
    from pdhub.measure.command import Options, run

    options = Options(
        transports=transport or ("shm",),
        options=option or (),
        layout=layout,
        layer_major=layer_major,
        tokens=tokens,
        chunk=chunk,
        prefill_per_s=prefill,
        source=source,
        target=target,
        runs=runs,
        json=json,
    )
    raise typer.Exit(run(options))


@app.command()
def new(
    kind: Annotated[NewKind, typer.Argument(help="What the plugin adds.")],
    name: Annotated[str, typer.Argument(metavar="NAME", help="Its name in YAML; lower case, digits and dashes.")],
    directory: Annotated[Path, typer.Option("--dir", help="Where to write pdhub-NAME.")] = Path(),
) -> None:
    """Write a working plugin package that passes its conformance kit.

    \b
    Examples:
      pdhub new engine echo
      pdhub new policy shortest --dir ~/plugins
    """
    from pdhub.scaffold.write import write

    made = write(kind.value, name, directory)
    typer.echo(f"wrote {made}\n\nnext:\n  cd {made}\n  pip install -e '.[test]'\n  pytest\n  pdhub plugins")


@config_app.command()
def show(config: ConfigFile, set_: Overrides = None, json: AsJson = False) -> None:
    """Print every value, plugin options included, and where it came from.

    \b
    Examples:
      pdhub config show configs/quickstart.yaml
      PDHUB_ROUTER__PORT=9000 pdhub config show configs/quickstart.yaml
    """
    from pdhub.cli.tables import values_json, values_text
    from pdhub.config.build import load_plan
    from pdhub.config.show import values

    found = values(load_plan(config, overrides=set_ or ()))
    typer.echo(values_json(found) if json else values_text(found))


@config_app.command()
def schema() -> None:
    """Print a JSON Schema of the file, with the options of every installed plugin, for editors.

    \b
    Examples:
      pdhub config schema > pdhub.schema.json
    """
    import json

    from pdhub.config.schema import json_schema
    from pdhub.registry import load

    typer.echo(json.dumps(json_schema(load()), indent=2))


@config_app.command()
def docs(
    check: Annotated[bool, typer.Option("--check", help="Write nothing; fail if a page is out of date.")] = False,
    directory: Annotated[Path, typer.Option("--dir", help="Where the pages are.")] = Path("docs"),
) -> None:
    """Write the generated pages: config.md (every key) and reference.md (verbs, hooks, error codes).

    \b
    Examples:
      pdhub config docs
      pdhub config docs --check
    """
    from pdhub.cli.pages import stale, write

    if not check:
        typer.echo("\n".join(f"wrote {path}" for path in write(directory)))
        return
    old = stale(directory)
    if old:
        typer.echo(f"error: out of date: {', '.join(map(str, old))}\n  hint: run `pdhub config docs`", err=True)
        raise typer.Exit(1)
    typer.echo("up to date")


@app.command(
    _PLUGIN,
    hidden=True,
    add_help_option=False,
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True, "allow_interspersed_args": False},
)
def run_plugin(context: typer.Context, name: str) -> None:
    """A plugin's command group."""
    from pdhub.api.errors import ConfigError
    from pdhub.operate.command import command_host
    from pdhub.registry import load
    from pdhub.registry.providers import KNOWN_PROVIDERS

    registry = load(warn=False)
    near = difflib.get_close_matches(name, [*verbs(), *registry.names("command")], n=1)
    if name not in registry.names("command") and name not in KNOWN_PROVIDERS:
        hint = f"did you mean '{near[0]}'?" if near else "`pdhub --help` lists the verbs, `pdhub plugins` the plugins"
        raise ConfigError(f"there is no command '{name}'", hint=hint)
    command = registry.command(name).factory()
    if context.args in (["--help"], ["-h"]):
        typer.echo(command.help)
        return
    raise typer.Exit(command.run_with(context.args, command_host()))
