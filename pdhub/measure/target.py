"""The node's side of a measurement, in a process of its own: JSON lines on stdin, answers on stdout.

::

    python -m pdhub.measure.target TRANSPORT OPTIONS
"""

from __future__ import annotations

import base64
import json
import os
import sys
import time
import zlib
from typing import Any

from pdhub.api import Region, Transport, TransportSpec
from pdhub.api.errors import PDHubError
from pdhub.registry import load


class Target:
    """The commands. Each returns what ``ok`` says."""

    def __init__(self, spec: TransportSpec, options: dict[str, Any]) -> None:
        self._transport: Transport = spec.factory(spec.config.model_validate(options))
        self.caps = self._transport.open()
        self._regions: dict[str, Region] = {}

    def landing(self, nbytes: int, device: str) -> dict[str, Any]:
        region = self._transport.allocate(nbytes, device)
        self._regions[region.id] = region
        grant = self._transport.grant(region.id, "bench")
        metadata = self._transport.export_metadata()
        return {
            "region": region.id,
            "grant": base64.b64encode(grant.data).decode(),
            "metadata": base64.b64encode(metadata.data).decode(),
        }

    def checksum(self, region: str) -> int | None:
        """None for memory that cannot be read from here."""
        view = self._transport.read(self._regions[region])
        return None if view is None else zlib.crc32(view)

    def free(self, region: str) -> None:
        del self._regions[region]  # its view too, so that the memory can be used again
        self._transport.unregister(region)

    def cpu_s(self) -> float:
        return time.process_time()

    def close(self) -> None:
        self._regions.clear()
        self._transport.close()


COMMANDS = ("landing", "checksum", "free", "cpu_s", "close")


def main(name: str, options: str) -> int:
    """Serve commands until ``close`` or the end of stdin."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever a native library prints must not mix with the answers
    try:
        target = Target(load(warn=False).transport(name), json.loads(options))
    except PDHubError as error:
        print(json.dumps({"error": str(error)}), file=answers)
        return 1
    print(json.dumps({"ok": None}), file=answers)
    for line in sys.stdin:
        command = json.loads(line)
        do = command.pop("do")
        if do not in COMMANDS:
            raise ValueError(f"no command {do!r}")
        try:
            answer = {"ok": getattr(target, do)(**command)}
        except (PDHubError, ValueError, MemoryError) as error:
            answer = {"error": str(error)}
        print(json.dumps(answer), file=answers)
        if do == "close":
            break
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
