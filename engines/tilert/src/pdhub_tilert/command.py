"""``pdhub tilert command CONFIG``, ``pdhub tilert serve CONFIG NODE``, ``pdhub tilert convert …``."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from pdhub.api import Command, CommandHost, Process, Severity, Topology

_EXAMPLES = """examples:
  pdhub tilert command configs/tilert.yaml
  pdhub tilert command configs/tilert.yaml tilert-0 --json
  pdhub tilert serve my.yaml tilert-0
  pdhub tilert convert --model-type glm-5 --model-dir /models/GLM-5 --save-dir /models/GLM-5-tilert
"""


class TileRTCommand(Command):
    """Verbs ``command``, ``serve`` and ``convert``."""

    help = "How the servers of a TileRT topology are started; start one; convert a model's weights.\n\n" + _EXAMPLES

    def run(self, args: Sequence[str]) -> int:
        return self._run(args, None)

    def run_with(self, args: Sequence[str], host: CommandHost) -> int:
        return self._run(args, host)

    def _run(self, args: Sequence[str], host: CommandHost | None) -> int:
        try:
            options = _parser().parse_args(list(args))
        except SystemExit as stop:  # argparse wrote its message; the host turns statuses into exits
            return int(stop.code or 0)
        if options.verb == "convert":
            from pdhub_tilert.convert import convert, tell

            return convert(options.python, options.model_type, options.model_dir, options.save_dir, tell)
        if host is None:
            print("error: this verb reads a configuration, which only `pdhub tilert` can", file=sys.stderr)
            return 2
        if options.verb == "serve":
            return _serve(host.process(options.config, options.node, options.set))
        return _command(options, host)


def shell(process: Process) -> str:
    """As a line that a shell runs; keys stay names of variables."""
    words = [f"{name}={shlex.quote(value)}" for name, value in process.env.items()]
    words += [f'{name}="${source}"' for name, source in process.secrets.items()]
    lines, word = [*words], list[str]()
    for part in process.argv:
        if part.startswith("--") and word:
            lines.append(" ".join(word))
            word = []
        word.append(shlex.quote(part))
    return " \\\n  ".join([*lines, " ".join(word)])


def _command(options: argparse.Namespace, host: CommandHost) -> int:
    topology = host.topology(options.config, options.set)
    names = [options.node] if options.node else [node.name for node in topology.nodes]
    made = {name: host.process(options.config, name, options.set) for name in names}
    if options.json:
        print(json.dumps({name: _document(process) for name, process in made.items()}, indent=2))
    else:
        print("\n\n".join(_sections(options.config, topology, made)))
    return _warn(topology)


def _sections(path: str, topology: Topology, made: dict[str, Process]) -> Iterator[str]:
    for name, process in made.items():
        node = topology.node(name)
        assert node is not None
        what = f"pool {node.pool}" if node.pool else "prefill instance"
        yield f"# {name} ({what}), on {node.host}; ready when {process.ready_url} answers 200\n{shell(process)}"
    if len(made) == len(topology.nodes):
        yield f"# the endpoint\npdhub router {shlex.quote(path)}"


def _document(process: Process) -> dict[str, object]:
    return {
        "argv": list(process.argv),
        "env": dict(process.env),
        "secrets": dict(process.secrets),
        "ready_url": process.ready_url,
    }


def _warn(topology: Topology) -> int:
    """What the two sides of these commands disagree on. 1 if it cannot work."""
    from pdhub_tilert import operate_node, operate_refusals

    found = [*operate_refusals.refusals(topology), *operate_node.refusals(topology)]
    for finding in found:
        print(f"{finding.severity}: {finding.where}: {finding.message}. {finding.fix}", file=sys.stderr)
    return int(any(finding.severity is Severity.ERROR for finding in found))


def _serve(process: Process) -> int:
    """Become the server: signals and output are its own."""
    from pdhub_tilert.environment import with_process

    try:
        os.execvpe(process.argv[0], list(process.argv), with_process(process))
    except OSError as error:
        print(f"error: cannot run {process.argv[0]!r}: {error.strerror}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="pdhub tilert", epilog=_EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    command = verbs.add_parser("command", help="the commands of all servers of a configuration, or of one")
    command.add_argument("config", metavar="CONFIG", help="the YAML file")
    command.add_argument("node", metavar="NODE", nargs="?", help="one node or prefill instance; default is all")
    command.add_argument("--set", metavar="PATH=VALUE", action="append", default=[], help="replace one value")
    command.add_argument("--json", action="store_true", help="argv, env, secrets and ready_url as JSON, by name")
    serve = verbs.add_parser("serve", help="run one decode server or node in the foreground, as `pdhub up` would")
    serve.add_argument("config", metavar="CONFIG", help="the YAML file")
    serve.add_argument("node", metavar="NODE", help="name of a node")
    serve.add_argument("--set", metavar="PATH=VALUE", action="append", default=[], help="replace one value")
    convert = verbs.add_parser("convert", help="convert a Hugging Face model's weights for TileRT, once")
    convert.add_argument("--model-type", required=True, help="as TileRT calls it, such as glm-5")
    convert.add_argument("--model-dir", required=True, type=Path, help="the model's directory")
    convert.add_argument("--save-dir", required=True, type=Path, help="where the converted weights go")
    convert.add_argument("--python", default=sys.executable, help="interpreter that has TileRT; default is this one")
    return parser
