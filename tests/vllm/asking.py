"""One request in a thread of its own, of which a test can see how far it is, and which it can leave."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit


class Asking(threading.Thread):
    """POST JSON, from construction on.

    Attributes:
        status: 0 until the answer begins, and if none came. pieces: of the body, so far. data: the body so far.
        ended_at: monotonic seconds; 0 while it lasts. broken: how the connection ended, if not well.
    """

    def __init__(self, url: str, body: Any, headers: Mapping[str, str]) -> None:
        super().__init__(daemon=True)
        self._at = urlsplit(url)
        self._body = json.dumps(body).encode()
        self._headers = {"content-type": "application/json", **headers}
        self._socket: socket.socket | None = None
        self._left = False
        self.prompt = body.get("prompt")
        self.stream = bool(body.get("stream"))
        self.status = 0
        self.pieces = 0
        self.data = b""
        self.ended_at = 0.0
        self.broken = ""
        self.start()

    @property
    def ended(self) -> bool:
        return self.ended_at > 0

    def run(self) -> None:
        assert self._at.hostname is not None
        connection = http.client.HTTPConnection(self._at.hostname, self._at.port, timeout=300)
        try:
            connection.connect()
            self._socket = connection.sock
            connection.request("POST", self._at.path, self._body, self._headers)
            reply = connection.getresponse()
            self.status = reply.status
            while data := reply.read1(1 << 16):
                self.data += data
                self.pieces += 1
        except (OSError, http.client.HTTPException) as error:
            self.broken = repr(error)
        finally:
            self.ended_at = time.monotonic()
            connection.close()

    def leave(self) -> float:
        """Close the connection, as a client that is not interested any more. Returns the moment."""
        self._left = True
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
        return time.monotonic()

    def ids(self) -> list[int]:
        """Token ids, so far."""
        documents = self._events() if self.stream else [json.loads(self.data)]
        return [i for d in documents for c in d.get("choices", ()) for i in c.get("token_ids") or ()]

    def seen(self) -> str:
        """What the client saw, in a few words."""
        if self._left:
            return "(left)"
        if self.status != 200:
            return f"{self.status} {self._code(self.data)}" if self.status else f"no answer: {self.broken}"
        if not self.stream:
            return f"200, broken off: {self.broken}" if self.broken else "200"
        errors = [event["error"] for event in self._events() if "error" in event]
        if errors:
            return f"200, then event: {errors[0].get('code')}"
        return "200" if self.data.rstrip().endswith(b"data: [DONE]") else "200, without an end"

    def _events(self) -> list[dict[str, Any]]:
        found = []
        for line in self.data.decode(errors="replace").splitlines():
            with contextlib.suppress(ValueError):
                if line.startswith("data: {"):
                    found.append(json.loads(line[6:]))
        return found

    @staticmethod
    def _code(data: bytes) -> str:
        try:
            return str(json.loads(data)["error"]["code"])
        except (ValueError, KeyError, TypeError):
            return repr(data[:80])

    def __str__(self) -> str:
        return f"{self.status}, {self.pieces} pieces, {'ended' if self.ended else 'under way'} {self.data[-300:]!r}"
