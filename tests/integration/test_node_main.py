"""``run``: a node by its name, until a signal."""

import asyncio
import os
import signal
import socket
import threading
import time
import urllib.error
import urllib.request

import pytest
from node_world import plan_for

from pdhub.api import ConfigError
from pdhub.node import main
from pdhub.wire.server import HttpServer

pytestmark = pytest.mark.integration


def test_run_serves_until_a_signal(monkeypatch):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    monkeypatch.setattr(main, "load_plan", lambda path, overrides: plan_for(node={"port": port}))
    seen = []

    def visit():
        for _ in range(500):
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as reply:
                    seen.append(reply.read())
                break
            except urllib.error.URLError:
                time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGTERM)

    visitor = threading.Thread(target=visit)
    visitor.start()
    assert main.run("any.yaml", "fast-0") == 0
    visitor.join()
    assert seen == [b'{"status":"ok"}']


def test_a_signal_while_it_starts_closes_what_listens(monkeypatch):
    ports = []
    start = HttpServer.start

    async def cut_off(self):
        await start(self)
        ports.append(self.port)
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(60)

    monkeypatch.setattr(main, "load_plan", lambda path, overrides: plan_for())
    monkeypatch.setattr(main, "_run_loop", asyncio.run)  # uvloop would wait for ever at its end if something listened
    monkeypatch.setattr(HttpServer, "start", cut_off)
    assert main.run("any.yaml", "fast-0") == 0
    with socket.socket() as client, pytest.raises(ConnectionRefusedError):
        client.connect(("127.0.0.1", ports[0]))


def test_an_unknown_name_lists_the_known_ones(monkeypatch):
    monkeypatch.setattr(main, "load_plan", lambda path, overrides: plan_for())
    with pytest.raises(ConfigError, match="no node 'nobody'") as caught:
        main.run("any.yaml", "nobody")
    assert "fast-0" in caught.value.hint
