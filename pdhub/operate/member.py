"""One process of a supervised tree: what it is, and what happened to it."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from enum import StrEnum

from pdhub.api import ConfigError, Process


@dataclass(frozen=True, slots=True)
class Member:
    """A process that the tree keeps alive.

    Args:
        name: unique in the tree; the log prefix.
        process: how to start it.
        vital: the tree ends if this one is given up.
        stop_within_s: time to drain between SIGTERM and SIGKILL.
    """

    name: str
    process: Process
    vital: bool = False
    stop_within_s: float = 30.0


class State(StrEnum):
    """Of a member. ``GIVEN_UP`` is final, ``STOPPED`` was asked for."""

    STARTING = "starting"
    READY = "ready"
    WAITING = "waiting"
    GIVEN_UP = "given up"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class Event:
    """A change of state, with a sentence for a person."""

    name: str
    state: State
    text: str


class StartFailed(ConfigError):
    """A member ended, or stayed silent too long, before the tree was up for the first time."""


def how_it_ended(status: int) -> str:
    """``exit status 3``, or the name of the signal."""
    if status >= 0:
        return f"exit status {status}"
    try:
        return f"killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"killed by signal {-status}"
