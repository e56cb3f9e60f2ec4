"""``pdhub vllm command CONFIG NODE`` and ``pdhub vllm contract PATH …``."""

from __future__ import annotations

import argparse
import json
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

from pdhub.api import Command, CommandHost, Process

_EXAMPLES = """examples:
  pdhub vllm command configs/vllm-pull.yaml prefill-0
  pdhub vllm command my.yaml decode-0 --json
  pdhub vllm contract vllm-0.34.0-cp38-abi3-manylinux_2_28_x86_64.whl
  pdhub vllm contract /opt/vllm/lib/python3.12/site-packages
"""


class VLLMCommand(Command):
    """Verbs ``command`` and ``contract``."""

    help = (
        "Print how a vLLM server of a configuration is started; check that a version of vLLM has what pdhub uses.\n\n"
        + _EXAMPLES
    )

    def run(self, args: Sequence[str]) -> int:
        return self._run(args, None)

    def run_with(self, args: Sequence[str], host: CommandHost) -> int:
        return self._run(args, host)

    def _run(self, args: Sequence[str], host: CommandHost | None) -> int:
        try:
            options = _parser().parse_args(list(args))
        except SystemExit as stop:  # argparse wrote its message; the host turns statuses into exits
            return int(stop.code or 0)
        if options.verb == "contract":
            return _contract(options.paths)
        if host is None:
            print("error: only `pdhub vllm command` can read a configuration", file=sys.stderr)
            return 2
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
    contract = verbs.add_parser("contract", help="read a wheel or an installed vLLM: does it have what pdhub uses?")
    contract.add_argument("paths", metavar="PATH", nargs="+", type=Path, help="a wheel, or a site-packages directory")
    return parser


def _contract(paths: Sequence[Path]) -> int:
    from pdhub_vllm.contract import check, table, version_of

    found = {}
    for path in paths:
        try:
            found[f"{version_of(path)} ({path.name})"] = check(path)
        except (OSError, zipfile.BadZipFile) as error:
            print(f"error: {path}: {error}", file=sys.stderr)
            return 2
    print("\n".join(table(found)))
    return 0 if all(result.ok for results in found.values() for result in results) else 1


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
