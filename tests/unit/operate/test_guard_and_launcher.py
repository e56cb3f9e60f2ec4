"""One guarded process: output, environment, signals and exit status are those of the child itself."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from pdhub.api import ConfigError, Process, Running
from pdhub.operate.guard import descendants
from pdhub.operate.launcher import LocalLauncher
from pdhub.operate.member import how_it_ended


class Output:
    def __init__(self) -> None:
        self.lines: list[str] = []
        self.seen = threading.Event()

    def __call__(self, _name: str, line: str) -> None:
        self.lines.append(line)
        self.seen.set()


@pytest.fixture
def launcher() -> Iterator[LocalLauncher]:
    one = LocalLauncher()
    yield one
    one.close()


def process(code: str, **env: str) -> Process:
    return Process(argv=(sys.executable, "-I", "-S", "-c", code), ready_url="", env=env)


def wait(running: Running) -> int:
    deadline = time.monotonic() + 10
    while (status := running.poll()) is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return status


def test_output_environment_and_status(launcher: LocalLauncher) -> None:
    out = Output()
    code = "import os, sys; print('out', os.environ['X']); print('err', file=sys.stderr); sys.exit(3)"
    running = launcher.start("a", process(code, X="7"), out)
    assert wait(running) == 3
    assert sorted(out.lines) == ["err", "out 7"]  # all of it is there once poll() tells the status
    assert running.name == "a"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGABRT, signal.SIGTERM])
def test_a_signal_is_told_as_that_signal(launcher: LocalLauncher, number: int) -> None:
    running = launcher.start("a", process(f"import os; os.kill(os.getpid(), {int(number)})"), Output())
    assert wait(running) == -number


def test_terminate_reaches_the_child_which_may_answer_as_it_likes(launcher: LocalLauncher) -> None:
    out = Output()
    code = (
        "import signal, sys, time; signal.signal(15, lambda *_: sys.exit(5)); print('up', flush=True); time.sleep(60)"
    )
    running = launcher.start("a", process(code), out)
    assert out.seen.wait(10)
    running.terminate()
    assert wait(running) == 5
    running.terminate()
    running.kill()
    assert running.poll() == 5


def test_the_child_has_a_session_of_its_own_and_no_input(launcher: LocalLauncher) -> None:
    out = Output()
    code = "import os, sys; print(os.getsid(0), os.getpgid(0) == os.getpid(), repr(sys.stdin.read()))"
    assert wait(launcher.start("a", process(code), out)) == 0
    session, own_group, text = out.lines[0].split()
    assert int(session) != os.getsid(0)
    assert (own_group, text) == ("True", "''")


def test_the_child_does_not_inherit_the_guards_pipe(launcher: LocalLauncher) -> None:
    out = Output()
    assert (
        wait(launcher.start("a", process("import os; print(sorted(os.listdir('/proc/self/fd'), key=int))"), out)) == 0
    )
    assert out.lines == ["['0', '1', '2', '3']"]  # 3 is the directory being listed


def test_a_reader_that_fails_does_not_block_the_child(launcher: LocalLauncher, caplog) -> None:
    def broken(_name: str, line: str) -> None:
        raise ValueError(line)

    assert wait(launcher.start("a", process("print('x' * 1000 + '\\n' * 100_000)"), broken)) == 0
    assert caplog.text.count("the reader of a's output failed") == 1


def test_bytes_that_are_no_text_and_progress_bars_are_lines_too(launcher: LocalLauncher) -> None:
    out = Output()
    code = "import sys; sys.stdout.buffer.write(b'\\xff\\r50%\\r100%\\nlast')"
    assert wait(launcher.start("a", process(code), out)) == 0
    assert out.lines == ["\ufffd", "50%", "100%", "last"]


def test_a_command_that_is_not_there_is_an_error(launcher: LocalLauncher) -> None:
    with pytest.raises(ConfigError, match="command 'no-such-program' was not found"):
        launcher.start("a", Process(argv=("no-such-program",), ready_url=""), Output())


def test_close_kills_what_runs_and_is_idempotent() -> None:
    before = set(descendants(os.getpid()))  # other tests' helpers (multiprocessing keeps two for a whole run)
    launcher = LocalLauncher()
    out = Output()
    code = "import signal, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"
    running = [launcher.start(f"n{i}", process(code), out) for i in range(3)]
    assert out.seen.wait(10)
    assert len(set(descendants(os.getpid())) - before) >= 3
    launcher.close()
    launcher.close()
    assert all(one.poll() is not None for one in running)
    assert set(descendants(os.getpid())) <= before
    with pytest.raises(RuntimeError, match="closed"):
        launcher.start("late", process(""), out)


def test_a_stopped_guard_can_be_killed() -> None:
    before = set(descendants(os.getpid()))
    launcher = LocalLauncher()
    out = Output()
    running = launcher.start("a", process("import time; print('up', flush=True); time.sleep(60)"), out)
    assert out.seen.wait(10)
    os.kill(running.pid, signal.SIGSTOP)  # type: ignore[attr-defined]
    assert set(descendants(os.getpid())) - before
    launcher.close()
    assert running.poll() is not None
    assert set(descendants(os.getpid())) <= before


def test_how_it_ended() -> None:
    assert how_it_ended(2) == "exit status 2"
    assert how_it_ended(-9) == "killed by SIGKILL"
    assert how_it_ended(-99) == "killed by signal 99"
