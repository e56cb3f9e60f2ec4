"""One side of a transport in a process of its own, driven by JSON lines: what kits stop and kill.

::

    python -m pdhub.testing.transport_writer --type shm --config '{}' [--plugin MODULE …]

Reads one command a line from stdin and answers each with one line on stdout: ``{"ok": …}`` or ``{"error": …}``.

* ``connect {transport, data}``: reach a target; ``data`` is base64.
* ``write {grant, nbytes, fill, ops, offset}``: post ``ops`` operations, each of a whole source of ``nbytes`` bytes that
  are all ``fill``; answers with a number.
* ``wait {number, timeout_s}``: the transfer's state and error.
* ``target {nbytes}``: allocate and grant a region; answers with metadata and grant.
* ``free {region_id}``: unregister a region.
* ``close``: close the transport and end.
"""

from __future__ import annotations

import argparse
import base64
import importlib
import json
import logging
import os
import sys
from collections.abc import Sequence
from typing import Any

from pdhub.api import Grant, Peer, PeerMetadata, Transfer, TransportSpec, WriteOp
from pdhub.registry import load

log = logging.getLogger("pdhub.testing.transport_writer")


def pack_grant(grant: Grant) -> dict[str, Any]:
    return {"region_id": grant.region_id, "nbytes": grant.nbytes, "data": base64.b64encode(grant.data).decode()}


def unpack_grant(fields: dict[str, Any]) -> Grant:
    return Grant(fields["region_id"], fields["nbytes"], base64.b64decode(fields["data"]))


def pack_metadata(peer: PeerMetadata) -> dict[str, Any]:
    return {"transport": peer.transport, "data": base64.b64encode(peer.data).decode()}


def unpack_metadata(fields: dict[str, Any]) -> PeerMetadata:
    return PeerMetadata(fields["transport"], base64.b64decode(fields["data"]))


class Writer:
    """The commands. Each returns what ``ok`` says."""

    def __init__(self, spec: TransportSpec, options: dict[str, Any]) -> None:
        self._transport = spec.factory(spec.config.model_validate(options))
        self._transport.open()
        self._peer: Peer | None = None
        self._transfers: list[Transfer] = []

    def connect(self, **metadata: Any) -> None:
        self._peer = self._transport.connect(unpack_metadata(metadata))

    def write(self, grant: dict[str, Any], nbytes: int, fill: int, ops: int = 1, offset: int = 0) -> int:
        if self._peer is None:
            raise ValueError("connect first")
        source = self._transport.allocate(nbytes)
        if source.view is None:
            raise ValueError("this program needs host memory")
        source.view[:] = bytes([fill]) * nbytes
        op = WriteOp(source, 0, offset, nbytes)
        self._transfers.append(self._transport.write(self._peer, unpack_grant(grant), [op] * ops))
        return len(self._transfers) - 1

    def wait(self, number: int, timeout_s: float) -> dict[str, Any]:
        transfer = self._transfers[number]
        state = transfer.wait(timeout_s)
        return {"state": state.value, "error": None if transfer.error is None else str(transfer.error)}

    def target(self, nbytes: int) -> dict[str, Any]:
        region = self._transport.allocate(nbytes)
        grant = self._transport.grant(region.id, "writer")
        return {"metadata": pack_metadata(self._transport.export_metadata()), "grant": pack_grant(grant)}

    def free(self, region_id: str) -> None:
        self._transport.unregister(region_id)

    def close(self) -> None:
        self._transport.close()


COMMANDS = ("connect", "write", "wait", "target", "free", "close")


def main(argv: Sequence[str] | None = None) -> int:
    """Serve commands until stdin ends."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--type", required=True)
    parser.add_argument("--config", default="{}")
    parser.add_argument("--plugin", action="append", default=[], help="module with hooks that is not installed")
    args = parser.parse_args(argv)
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever a native library prints must not mix with the answers
    registry = load(extra=[importlib.import_module(name) for name in args.plugin], warn=False)
    writer = Writer(registry.transport(args.type), json.loads(args.config))
    for line in sys.stdin:
        command = json.loads(line)
        name = command.pop("do")
        try:
            if name not in COMMANDS:
                raise ValueError(f"no command {name!r}")
            answer = {"ok": getattr(writer, name)(**command)}
        except Exception as error:
            log.exception("command %s failed", name)
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers)
        if name == "close":
            break
    return 0


if __name__ == "__main__":
    sys.exit(main())
