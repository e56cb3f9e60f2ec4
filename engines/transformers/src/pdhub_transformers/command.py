"""``pdhub transformers convert GGUF OUT [--dtype …]``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from rich.console import Console
from rich.progress import Progress

from pdhub.api import Command, PDHubError

_EXAMPLES = """examples:
  pdhub transformers convert model.Q4_K_M.gguf ./model
  pdhub transformers convert model.Q8_0.gguf ./model --dtype bfloat16
"""


class TransformersCommand(Command):
    """One verb: ``convert``."""

    help = "Convert GGUF files to Hugging Face directories.\n\n" + _EXAMPLES

    def run(self, args: Sequence[str]) -> int:
        parser = argparse.ArgumentParser(
            prog="pdhub transformers", epilog=_EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        verbs = parser.add_subparsers(dest="verb", required=True)
        convert = verbs.add_parser(
            "convert",
            help="GGUF file → Hugging Face directory",
            epilog=_EXAMPLES,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        convert.add_argument("gguf", metavar="GGUF", help="the .gguf file (architectures llama, qwen2, qwen3)")
        convert.add_argument("out", metavar="OUT", help="the directory to make")
        convert.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of the weights")
        try:
            options = parser.parse_args(list(args))
        except SystemExit as stop:  # argparse wrote its message; the host turns statuses into exits
            return int(stop.code or 0)
        return _convert(options)


def _convert(options: argparse.Namespace) -> int:
    from pdhub_transformers.convert import convert_gguf

    console = Console(stderr=True)
    try:
        with Progress(console=console, transient=True) as bar:
            task = bar.add_task("converting", total=None)
            out = convert_gguf(
                options.gguf,
                options.out,
                lambda done, total: bar.update(task, completed=done, total=total),
                dtype=options.dtype,
            )
    except PDHubError as error:
        console.print(f"error: {error}", style="red", markup=False, highlight=False)
        return 1
    console.print(f"wrote {out}", markup=False, highlight=False)
    return 0
