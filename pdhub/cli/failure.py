"""What a person sees when a verb fails: one red message and what to do, no traceback."""

from __future__ import annotations

import sys
import traceback

USAGE = 2
"""Exit status when the configuration, the installation or the command is wrong."""
FAILURE = 1
"""Exit status of every other failure."""


def report(error: Exception, *, debug: bool) -> int:
    """Print ``error`` on stderr and return the exit status. ``debug`` adds the traceback."""
    from pdhub.api.errors import ConfigError, PDHubError, PluginError  # not before: `pdhub --help` does without

    if debug:
        traceback.print_exception(error, file=sys.stderr)
    if isinstance(error, PDHubError):
        message, hint = error.message, error.hint
    else:
        message = f"internal error: {type(error).__name__}: {error}"
        hint = "this is a fault of pdhub or of a plugin; run `pdhub --debug …` for the traceback"
    red, dim, plain = ("\033[31m", "\033[2m", "\033[0m") if sys.stderr.isatty() else ("", "", "")
    print(f"{red}error: {message}{plain}", file=sys.stderr)
    if hint:
        print(f"{dim}  hint: {hint}{plain}", file=sys.stderr)
    return USAGE if isinstance(error, ConfigError | PluginError) else FAILURE
