"""The ``local`` launcher: child processes of this one, each behind a guard (:mod:`pdhub.operate.guard`)."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from pdhub.api import ConfigError, Launcher, Process, Running
from pdhub.config.settings import child_environment, secret
from pdhub.operate.options import LocalConfig

_GUARD = Path(__file__).with_name("guard.py")
_CLOSE_WITHIN_S = 5.0
log = logging.getLogger("pdhub.operate")


class LocalProcess(Running):
    """A guard and the child that it watches. The guard ends as the child ended."""

    def __init__(self, name: str, process: Process, grace_s: float, on_line: Callable[[str, str], None]) -> None:
        self._name = name
        secrets = {variable: secret(source) or "" for variable, source in process.secrets.items()}
        read_end, self._pipe = os.pipe()
        argv = [sys.executable, "-I", "-S", str(_GUARD), str(read_end), str(grace_s), "--", *process.argv]
        try:
            self._guard = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=child_environment({"PYTHONUNBUFFERED": "1", **process.env, **secrets}),
                pass_fds=(read_end,),
                start_new_session=True,
                text=True,
                encoding="utf-8",
                errors="replace",
                bufsize=1,
            )
        except OSError as error:
            os.close(self._pipe)
            raise ConfigError(f"{name}: cannot start {argv[0]}: {error.strerror}") from error
        finally:
            os.close(read_end)
        self._on_line = on_line
        self._pump = threading.Thread(target=self._read, name=f"output of {name}", daemon=True)
        self._pump.start()

    @property
    def name(self) -> str:
        return self._name

    @property
    def pid(self) -> int:
        """The guard's process id, which is also the id of the session that the child runs in."""
        return self._guard.pid

    def _read(self) -> None:
        stream = self._guard.stdout
        assert stream is not None
        failed = False
        with stream:
            for line in stream:
                try:
                    self._on_line(self._name, line.rstrip("\n"))
                except Exception:  # a full pipe would block the child: reading must go on
                    if not failed:
                        log.exception("the reader of %s's output failed; not told again", self._name)
                    failed = True

    def poll(self) -> int | None:
        status = self._guard.poll()
        if status is not None:
            self._ended(status)
        return status

    def _ended(self, status: int) -> None:
        if self._pipe >= 0:
            os.close(self._pipe)
            self._pipe = -1
            if status == -signal.SIGKILL:
                _kill_session(self._guard.pid)  # the guard itself may have been killed
        self._pump.join(timeout=1.0)

    def terminate(self) -> None:
        self._guard.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        if self._pipe >= 0:
            with contextlib.suppress(BrokenPipeError):
                os.write(self._pipe, b"k")
            self._guard.send_signal(signal.SIGCONT)  # a stopped guard would not read

    def end(self, within_s: float) -> None:
        """Kill, and return when nothing is left. Idempotent."""
        self.kill()
        try:
            status = self._guard.wait(within_s)
        except subprocess.TimeoutExpired:
            self._guard.kill()
            status = self._guard.wait()
        self._ended(status)


def _kill_session(session: int) -> None:
    if sys.platform != "linux":
        return
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if os.getsid(int(entry.name)) == session:
                    os.kill(int(entry.name), signal.SIGKILL)


class LocalLauncher(Launcher):
    """Starts processes on this machine. They end with this process, however it ends."""

    def __init__(self, config: LocalConfig | None = None) -> None:
        self._config = config or LocalConfig()
        self._running: list[LocalProcess] = []
        self._closed = False

    def start(self, name: str, process: Process, on_line: Callable[[str, str], None]) -> Running:
        if self._closed:
            raise RuntimeError("the launcher is closed")
        if shutil.which(process.argv[0]) is None:
            raise ConfigError(
                f"{name}: command {process.argv[0]!r} was not found",
                hint="install it, or give its full path in the engine's options",
            )
        self._running = [running for running in self._running if running.poll() is None]
        running = LocalProcess(name, process, self._config.grace_s, on_line)
        self._running.append(running)
        return running

    def close(self) -> None:
        self._closed = True
        for running in self._running:
            running.kill()
        deadline = time.monotonic() + _CLOSE_WITHIN_S
        for running in self._running:
            running.end(max(0.1, deadline - time.monotonic()))
        self._running.clear()
