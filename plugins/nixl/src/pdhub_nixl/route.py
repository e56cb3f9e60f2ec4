"""The way from one NIXL agent to another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pdhub.api import TransferFailed
from pdhub.onesided import Piece, Route, Sending, StillUnderWay
from pdhub_nixl.devices import segment

Descriptor = tuple[int, int, int]
"""Address, bytes, number of the device."""


class NixlSending(Sending):
    """Requests that were posted together: one for each pair of memory kinds, so nearly always one."""

    def __init__(self, route: NixlRoute) -> None:
        self._route = route
        self.requests: list[int] = []
        self.failed: str = ""

    def poll(self) -> bool:
        self.requests = [request for request in self.requests if not self._route.ended(request, self)]
        if self.requests:
            return False
        self._route.flying.discard(self)
        if self.failed:
            raise StillUnderWay(f"NIXL: {self.failed}")  # the connection is broken: others must make a new one
        return True


class NixlRoute(Route):
    """See :class:`pdhub.onesided.Route`.

    Args:
        nixl: the bindings.
        agent: this side's.
        errors: what the bindings raise.
        backends: handles of those to use.
        remote: the target's name.
    """

    def __init__(
        self, nixl: Any, agent: Any, errors: tuple[type[Exception], ...], backends: list[int], remote: str
    ) -> None:
        self._nixl = nixl
        self._agent = agent
        self._errors = errors
        self._backends = backends
        self._remote = remote
        self._closed = False
        self.flying: set[NixlSending] = set()

    def learn(self, memory: bytes) -> None:
        try:
            self._agent.loadRemoteMD(memory)
        except self._errors as error:
            raise TransferFailed(f"NIXL does not understand the target's memory: {error}") from error

    def post(self, pieces: Sequence[Piece]) -> Sending:
        sending = NixlSending(self)
        self.flying.add(sending)
        nixl = self._nixl
        try:
            for (source_kind, target_kind), group in _by_kinds(nixl, pieces).items():
                request = self._agent.createXferReq(
                    nixl.NIXL_WRITE,
                    nixl.nixlXferDList(source_kind, [source for source, _ in group]),
                    nixl.nixlXferDList(target_kind, [target for _, target in group]),
                    self._remote,
                    "",
                    self._backends,
                )
                sending.requests.append(request)
                self._agent.postXferReq(request, "")
        except self._errors as error:
            sending.failed = str(error)
        return sending

    def ended(self, request: int, sending: NixlSending) -> bool:
        """The request has ended, well or not, and is released."""
        try:
            if self._agent.getXferStatus(request) == self._nixl.NIXL_IN_PROG:
                return False
        except self._errors as error:
            sending.failed = str(error)
        try:
            self._agent.releaseXferReq(request)
        except self._errors as error:
            sending.failed = sending.failed or str(error)
        return True

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        try:
            self._agent.invalidateRemoteMD(self._remote)  # disconnects: what is under way ends with an error
        except self._errors:
            self.flying.clear()  # the target's agent was never reached
            return
        for sending in list(self.flying):
            for request in sending.requests:
                self.ended(request, sending)
        self.flying.clear()


def _by_kinds(nixl: Any, pieces: Sequence[Piece]) -> dict[tuple[Any, Any], list[tuple[Descriptor, Descriptor]]]:
    """Source and target descriptors, by their kinds of memory: a request has one kind on each side."""
    groups: dict[tuple[Any, Any], list[tuple[Descriptor, Descriptor]]] = {}
    for piece in pieces:
        source_kind, source_number = segment(nixl, piece.source_device)
        target_kind, target_number = segment(nixl, piece.target_device)
        source, target = (piece.source, piece.nbytes, source_number), (piece.target, piece.nbytes, target_number)
        groups.setdefault((source_kind, target_kind), []).append((source, target))
    return groups
