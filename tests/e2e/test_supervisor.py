"""Real processes: a tree comes up in order, keeps its members alive, and leaves nothing behind, however it ends."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from pdhub.operate.ports import free_port

pytestmark = pytest.mark.e2e
MAIN = Path(__file__).with_name("tree_main.py")


class Tree:
    """A tree in its own process. ``out`` grows while it runs."""

    def __init__(self, stages: list, log: Path) -> None:
        self.log = log
        with log.open("wb") as file:
            self.process = subprocess.Popen(
                [sys.executable, str(MAIN), json.dumps(stages)], stdout=file, stderr=subprocess.STDOUT
            )
        self.seen: set[int] = set()

    @property
    def out(self) -> str:
        return self.log.read_text()

    def until(self, condition: Callable[[], object], within_s: float = 20.0) -> None:
        deadline = time.monotonic() + within_s
        while not condition():
            assert time.monotonic() < deadline, self.out
            time.sleep(0.02)

    def until_said(self, text: str) -> None:
        self.until(lambda: text in self.out)

    def remember(self) -> set[int]:
        """Every process below the tree right now."""
        self.seen |= {child.pid for child in psutil.Process(self.process.pid).children(recursive=True)}
        return self.seen


def gone(pids: set[int]) -> bool:
    return not any(psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE for pid in pids)


@pytest.fixture
def tree(tmp_path: Path) -> Iterator[Callable[[list], Tree]]:
    trees: list[Tree] = []

    def make(stages: list) -> Tree:
        trees.append(Tree(stages, tmp_path / f"tree{len(trees)}.log"))
        return trees[-1]

    yield make
    for one in trees:
        with contextlib.suppress(psutil.NoSuchProcess):
            one.remember()
        one.process.kill()
        one.process.wait()
        for pid in one.seen:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@pytest.fixture
def port() -> Callable[[], int]:
    taken: set[int] = set()
    rng = random.Random()
    return lambda: free_port("127.0.0.1", taken, rng)


def test_one_ctrl_c_stops_all_and_the_router_first(tree, port) -> None:
    running = tree([[["prefill", port()], ["fast", port()]], [["router", port()]]])
    running.until_said("all ready")
    out = running.out
    assert out.index("fast    │ • ready") < out.index("router  │ • starting")
    assert out.index("prefill │ • ready") < out.index("router  │ • starting")
    below = running.remember()
    running.process.send_signal(signal.SIGINT)
    assert running.process.wait(10) == 0
    assert gone(below)
    out = running.out
    assert out.index("router  │ • stopped") < out.index("fast    │ • stopped")
    assert out.count("draining") == 3


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_sigterm_and_sighup_stop_too(tree, port, number: int) -> None:
    running = tree([[["node", port()]]])
    running.until_said("all ready")
    below = running.remember()
    running.process.send_signal(number)
    assert running.process.wait(10) == 0
    assert gone(below)


def test_a_second_ctrl_c_kills_without_waiting(tree, port) -> None:
    running = tree([[["stubborn", port(), "--ignore-term"]]])
    running.until_said("all ready")
    below = running.remember()
    running.process.send_signal(signal.SIGINT)
    running.until_said("SIGINT: stopping")
    running.process.send_signal(signal.SIGINT)
    assert running.process.wait(10) == 0
    assert "killing everything" in running.out
    assert gone(below)


def test_a_child_that_ignores_sigterm_is_killed_in_the_end(tree, port) -> None:
    running = tree([[["stubborn", port(), "--ignore-term"]]])
    running.until_said("all ready")
    below = running.remember()
    running.process.send_signal(signal.SIGTERM)
    assert running.process.wait(15) == 0
    assert "did not stop within 1 s: killed" in running.out
    assert gone(below)


def test_a_dead_child_is_restarted_and_then_given_up_while_the_others_go_on(tree, port, tmp_path: Path) -> None:
    count = tmp_path / "starts"
    running = tree([[["flaky", port(), "--die-after", "0.6", "--count", str(count)], ["steady", port()]]])
    running.until_said("given up after 4 failures in a row")
    assert len(count.read_text().splitlines()) == 4
    out = running.out
    assert out.count("ended: exit status 7; starting again in") == 3
    assert "flaky  │ about to die" in out
    assert running.process.poll() is None
    assert "steady │ • starting" in out
    assert out.count("steady │ • starting") == 1
    running.process.send_signal(signal.SIGINT)
    assert running.process.wait(10) == 0


def test_kill_9_of_a_child_is_noticed_and_repaired(tree, port, tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    running = tree([[["node", port(), "--grandchildren", str(pids)]]])
    running.until_said("all ready")
    running.until(pids.exists)
    child, plain, daemon = map(int, pids.read_text().split())
    pids.unlink()
    os.kill(child, signal.SIGKILL)
    running.until(lambda: running.out.count("• ready") == 2)
    assert "ended: killed by SIGKILL; starting again" in running.out
    assert gone({child, plain, daemon})  # what it left behind ended before its successor started


def test_losing_the_router_ends_the_tree(tree, port) -> None:
    running = tree([[["node", port()]], [["router", port(), "--die-after", "0.5"]]])
    running.until_said("all ready")
    assert running.process.wait(30) == 1
    assert "router was given up and nothing works without it" in running.out


def test_start_failure_shows_the_last_lines_and_stops_the_rest(tree, port) -> None:
    running = tree([[["node", port()]], [["router", port(), "--never-ready", "--die-after", "0.3"]]])
    assert running.process.wait(20) == 1
    out = running.out
    assert "router did not start: ended: exit status 7. Its last lines:" in out
    assert "pdhub  │     about to die" in out
    assert "to see it alone, run:" in out
    assert "node   │ • stopped" in out


def test_a_child_that_never_gets_ready_fails_the_start(tree, port) -> None:
    running = tree([[["mute", port(), "--never-ready"]]])
    assert running.process.wait(20) == 1
    assert "mute did not start: not ready after 5 s" in running.out


@pytest.mark.parametrize("stopped", [False, True])
def test_kill_9_of_the_parent_leaves_no_orphan(tree, port, tmp_path: Path, stopped: bool) -> None:
    pids = tmp_path / "pids"
    running = tree([[["node", port(), "--ignore-term", "--grandchildren", str(pids)], ["other", port()]]])
    running.until_said("all ready")
    running.until(pids.exists)
    family = {int(pid) for pid in pids.read_text().split()}
    below = running.remember() | family
    if stopped:
        for pid in family:
            os.kill(pid, signal.SIGSTOP)  # a stopped process cannot react, and must not stay either
    running.process.kill()
    running.process.wait()
    running.until(lambda: gone(below), within_s=10)


def test_kill_9_of_the_guards_leaves_no_orphan(tree, port, tmp_path: Path) -> None:
    running = tree([[["node", port(), "--ignore-term"]]])
    running.until_said("all ready")
    below = running.remember()
    guards = {child.pid for child in psutil.Process(running.process.pid).children()}
    for pid in guards:
        os.kill(pid, signal.SIGKILL)
    running.until(lambda: gone(below), within_s=10)
    running.until(lambda: running.out.count("• ready") == 2)
    running.process.send_signal(signal.SIGINT)
    assert running.process.wait(10) == 0
