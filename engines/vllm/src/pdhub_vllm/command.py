"""``pdhub vllm command CONFIG NODE``."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from pdhub.api import Command, CommandHost, Process

_EXAMPLES = """examples:
  pdhub vllm command configs/vllm-pull.yaml prefill-0
  pdhub vllm command my.yaml decode-0 --json
"""


class VLLMCommand(Command):
    """One verb: ``command``."""

    help = "Print how a vLLM server of a configuration is started.\n\n" + _EXAMPLES

    def run(self, args: Sequence[str]) -> int:
        raise NotImplementedError("needs the host: run_with")

    def run_with(self, args: Sequence[str], host: CommandHost) -> int:
        try:
            options = _parser().parse_args(list(args))
        except SystemExit as stop:  # argparse wrote its message; the host turns statuses into exits
            return int(stop.code or 0)
        process = host.process(options.config, options.node, options.set)
        print(_as_json(process) if options.json else _as_shell(process))
        if not options.json:
            print(f"# ready when {process.ready_url} answers 200", file=sys.stderr)
        return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="pdhub vllm", epilog=_EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    command = verbs.add_parser(
        "command",
        help="the exact command, with its environment, as `pdhub up` would run it",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument("config", metavar="CONFIG", help="the YAML file")
    command.add_argument("node", metavar="NODE", help="name of a node or of a prefill instance")
    command.add_argument("--set", metavar="PATH=VALUE", action="append", default=[], help="replace one value")
    command.add_argument("--json", action="store_true", help="print argv, env, secrets and ready_url as JSON")
    return parser


def _as_shell(process: Process) -> str:
    from pdhub_vllm.operate_serve import shell

    return shell(process)


def _as_json(process: Process) -> str:
    document = {
        "argv": list(process.argv),
        "env": dict(process.env),
        "secrets": dict(process.secrets),
        "ready_url": process.ready_url,
    }
    return json.dumps(document, indent=2)
