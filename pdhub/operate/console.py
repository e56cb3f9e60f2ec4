"""What a tree prints: a coloured name, then the line. Plain text when the output is no terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import IO

from rich.console import Console
from rich.text import Text

from pdhub.operate.member import Event, State

_COLOURS = ("cyan", "green", "magenta", "yellow", "blue", "bright_cyan", "bright_green", "bright_magenta")
_STYLE = {State.GIVEN_UP: "bold red", State.WAITING: "yellow", State.READY: "bold green"}


class TreeConsole:
    """Thread-safe: rich writes each line under its lock.

    Args:
        names: of the members, in order; each gets a colour.
        file: where to write.
    """

    def __init__(self, names: Sequence[str], file: IO[str]) -> None:
        self.console = Console(file=file, highlight=False)
        self._width = max((len(name) for name in (*names, "pdhub")), default=0)
        self._colours = {name: _COLOURS[i % len(_COLOURS)] for i, name in enumerate(names)}

    def _print(self, name: str, text: Text) -> None:
        prefix = Text(f"{name:<{self._width}} │ ", style=self._colours.get(name, "bold"))
        self.console.print(prefix + text, soft_wrap=True, markup=False)

    def line(self, name: str, line: str) -> None:
        """One line of a member's output; its own colours stay, other control sequences do not."""
        self._print(name, Text.from_ansi(line))

    def event(self, event: Event) -> None:
        self._print(event.name, Text(f"• {event.text}", style=_STYLE.get(event.state, "dim")))

    def say(self, text: str, style: str = "bold") -> None:
        """A line of pdhub itself."""
        for line in text.splitlines():
            self._print("pdhub", Text(line, style=style))
