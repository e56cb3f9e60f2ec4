"""Any transport, made to go wrong and to be held from outside."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from pydantic import Field
from safety_board import LOOK_S, Board, Gate

from pdhub.api import Grant, OnDone, Peer, PluginConfig, Transfer, Transport, WriteOp
from pdhub.registry import load
from pdhub.testing.faults import Faults, FaultyTransport


class BoardTransport(FaultyTransport):
    """Any transport, with the faults that the board says; most writes wait where it says so."""

    def __init__(self, inner: Transport, board: Board) -> None:
        super().__init__(inner, Faults())
        self.name = "board"
        self._board = board

    @property
    def count(self) -> int:
        """Regions that are known here."""
        return len(self._regions)

    def fence(self, region_id: str, within_s: float) -> bool:
        return self.inner.fence(region_id, within_s)  # only the writing side is bad

    def write(
        self,
        peer: Peer,
        grant: Grant,
        ops: Sequence[WriteOp],
        notify: bytes | None = None,
        on_done: OnDone | None = None,
    ) -> Transfer:
        self.faults = self._board.faults()
        return super().write(peer, grant, ops, notify, on_done)

    def _start(self, *posted: Any) -> None:
        if self._board.is_shut(Gate.WRITE) and self._rng.random() < 0.6:
            self._hold(*posted)
        else:
            super()._start(*posted)

    def _hold(self, *posted: Any) -> None:
        if self._board.is_shut(Gate.WRITE) and not self._closed:
            self.later(LOOK_S, partial(self._hold, *posted))
        else:
            super()._start(*posted)


class BoardTransportConfig(PluginConfig):
    """Options of the transport."""

    board: str = Field(description="File of the tree's board.")
    inner: str = Field(description="Name of the transport that moves the bytes.")
    options: dict[str, Any] = Field(default_factory=dict, description="Its options.")

    def make(self) -> Transport:
        spec = load(warn=False).transport(self.inner)
        return BoardTransport(spec.factory(spec.config.model_validate(self.options)), Board(self.board))
