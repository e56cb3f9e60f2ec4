"""Prefixed lines: plain without a terminal, never wrapped, never interpreted."""

from __future__ import annotations

import io

from pdhub.operate.console import TreeConsole
from pdhub.operate.member import Event, State


def test_plain_lines_have_a_prefix_and_are_not_wrapped_or_interpreted() -> None:
    out = io.StringIO()
    console = TreeConsole(["router", "p"], out)
    console.line("p", "[bold]" + "x" * 300)
    console.line("router", "\x1b[31mred\x1b[0m \x1b[2Jcleared")
    console.event(Event("p", State.READY, "ready after 1.0 s"))
    console.say("two\nlines")
    assert out.getvalue().splitlines() == [
        "p      │ [bold]" + "x" * 300,
        "router │ red cleared",
        "p      │ • ready after 1.0 s",
        "pdhub  │ two",
        "pdhub  │ lines",
    ]
