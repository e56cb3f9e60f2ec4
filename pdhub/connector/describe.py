"""A few lines of HTTP by which routers ask a worker what it writes, before they spend a prefill on it.

It runs in the process of vLLM's first worker, so it is the standard library's server in one daemon thread.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from pdhub.api.errors import ConfigError

log = logging.getLogger("pdhub.connector")

READ_WITHIN_S = 5.0


class Describer:
    """Answers GETs.

    Args:
        pages: path → content type and what gives the body.

    Raises:
        ConfigError: the port is taken.
    """

    def __init__(self, host: str, port: int, pages: dict[str, tuple[str, Callable[[], bytes]]]) -> None:
        class Handler(BaseHTTPRequestHandler):
            timeout = READ_WITHIN_S

            def do_GET(self) -> None:
                page = pages.get(self.path)
                body = page[1]() if page is not None else b"{}"
                self.send_response(200 if page is not None else 404)
                self.send_header("content-type", page[0] if page is not None else "application/json")
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                log.debug(format, *args)

        try:
            self._server = ThreadingHTTPServer((host, port), Handler)
        except OSError as error:
            where = "kv_connector_extra_config.port"
            raise ConfigError(f"{host}:{port} cannot be listened on: {error.strerror}", where=where) from error
        self._server.daemon_threads = True
        self.port = int(self._server.server_address[1])
        self._thread = threading.Thread(target=self._server.serve_forever, name="pdhub-describe", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Idempotent."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
