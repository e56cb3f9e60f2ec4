"""Stop strings: cut exactly, hold back no more than may still become one, whatever the cutting of the text."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Looks for several strings at once, in time linear in the text.

    The match that is complete first wins; of two that end together the one that was named first, as in vLLM. So the
    result depends on the text alone. For each stop string it remembers how many of its characters the text ends with
    (the state of a Knuth-Morris-Pratt automaton); the largest of these is what must be held back.

    Args:
        stops: the strings, none empty.
        include: show the stop string itself; nothing needs to be held back then.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self._stops = [(stop, _borders(stop)) for stop in dict.fromkeys(stops)]
        self._states = [0] * len(self._stops)
        self._include = include
        self._firsts = {stop[0] for stop in stops}
        self._held = ""
        self.matched: str | None = None

    def feed(self, text: str, armed: bool = True) -> str:
        """Text that may be shown now. After a match (see ``matched``) it is the last; feed no more.

        Args:
            armed: False ignores matches that end in this piece (before ``min_tokens`` were reached).
        """
        if not self._held and not any(self._states) and self._firsts.isdisjoint(text):
            return text
        for at, character in enumerate(text):
            complete = self._advance(character)
            if complete and armed:
                self.matched = complete
                return self._cut(text[: at + 1], complete)
        if self._include:
            return text
        whole = self._held + text
        keep = len(whole) - max(self._states)
        self._held = whole[keep:]
        return whole[:keep]

    def flush(self) -> str:
        """What was held back; the text ended without a match."""
        held, self._held = self._held, ""
        return held

    def _advance(self, character: str) -> str | None:
        """One step of every automaton; the first stop string that is complete now."""
        complete = None
        for i, (stop, borders) in enumerate(self._stops):
            state = self._states[i]
            while state and stop[state] != character:
                state = borders[state - 1]
            if stop[state] == character:
                state += 1
            if state == len(stop):
                complete = complete or stop
                state = borders[state - 1]
            self._states[i] = state
        return complete

    def _cut(self, text: str, stop: str) -> str:
        if self._include:
            return text
        whole, self._held = self._held + text, ""
        return whole[: len(whole) - len(stop)]


def _borders(stop: str) -> list[int]:
    """For each prefix the length of its longest proper prefix that is also its suffix."""
    out = [0] * len(stop)
    length = 0
    for i in range(1, len(stop)):
        while length and stop[i] != stop[length]:
            length = out[length - 1]
        if stop[i] == stop[length]:
            length += 1
        out[i] = length
    return out
