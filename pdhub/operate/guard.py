"""A tiny process between a supervisor and one child, so that nothing outlives the supervisor.

Run as ``python -I -S guard.py FD GRACE -- argv…``. FD is the read end of a pipe whose write end only the
supervisor has. The kernel closes that end when the supervisor goes away, however it goes (``kill -9`` too); the
guard then ends everything that the child started:

* the child and its group get SIGTERM, GRACE seconds later SIGKILL;
* the guard is a *child subreaper*, so double-forked and ``setsid`` descendants become its own children and are
  found by walking the process table from here;
* the child itself gets SIGKILL from the kernel should the guard be killed (parent-death signal).

A byte ``k`` on the pipe means "kill all now". SIGTERM, SIGINT and SIGHUP are passed on to the child, which may
take its time. When the child ends, what it left behind is ended too, and the guard ends the same way (exit
status or signal). Only the standard library, and little of it: this starts once for every process.
"""

import ctypes
import os
import resource
import select
import signal
import sys
import time
from contextlib import suppress

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_LEFTOVER_GRACE_S = 0.5
_PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_LINUX = sys.platform == "linux"


def _prctl(option: int, value: int) -> None:
    if _LINUX:
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def _parents() -> dict[int, int]:
    """pid → parent pid of every process that we may see."""
    out: dict[int, int] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                with open(f"/proc/{entry}/stat", "rb") as file:
                    # the command's name may hold spaces and brackets: fields count from the last one
                    fields = file.read().rpartition(b")")[2].split()
            except OSError:
                continue  # it ended while we looked
            if fields[0] != b"Z":
                out[int(entry)] = int(fields[1])
    return out


def descendants(root: int) -> list[int]:
    """Every living process below ``root``, from the process table; empty where there is no /proc."""
    if not _LINUX:
        return []
    children: dict[int, list[int]] = {}
    for pid, parent in _parents().items():
        children.setdefault(parent, []).append(pid)
    found: list[int] = []
    stack = [root]
    while stack:
        for pid in children.get(stack.pop(), ()):
            found.append(pid)
            stack.append(pid)
    return found


def signal_all(root: int, group: int, number: int) -> None:
    """Send a signal to the child's group and to every descendant, wherever it moved."""
    with suppress(OSError):  # the group may be empty; the walk finds what is left
        os.killpg(group, number)
    for pid in descendants(root):
        with suppress(OSError):
            os.kill(pid, number)


def _spawn(argv: list[str], guard: int) -> int:
    # Signals wait until both sides are ready for them: none is lost, none runs our handlers in the child.
    signal.pthread_sigmask(signal.SIG_BLOCK, _PASSED_ON)
    pid = os.fork()
    if pid:
        return pid
    try:
        os.setpgid(0, 0)
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != guard:
            os._exit(1)  # the guard died before the kernel knew whom to watch
        for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGCHLD, *_PASSED_ON):
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _PASSED_ON)
        os.execvp(argv[0], argv)
    except OSError as error:
        os.write(2, f"cannot run {argv[0]}: {error.strerror}\n".encode())
    finally:
        os._exit(127)


class Guard:
    """The loop: wait for the child's end, the supervisor's end, or a signal to pass on."""

    def __init__(self, pipe: int, grace_s: float, argv: list[str]) -> None:
        self.pipe = pipe
        self.grace_s = grace_s
        self.status: int | None = None
        os.set_inheritable(pipe, False)
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
        self.wake, wake_w = os.pipe()
        os.set_blocking(wake_w, False)
        os.set_blocking(self.wake, False)
        signal.set_wakeup_fd(wake_w, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # only to wake up
        self.child = _spawn(argv, os.getpid())
        for number in _PASSED_ON:
            signal.signal(number, self._forward)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _PASSED_ON)

    def _forward(self, number: int, _frame: object) -> None:
        if self.status is None:
            with suppress(OSError):
                os.kill(self.child, number)

    def reap(self) -> bool:
        """Collect what ended; False when nothing is left below us."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if pid == 0:
                return True
            if pid == self.child:
                self.status = status

    def end_all(self, grace_s: float) -> None:
        """SIGTERM, wait, then SIGKILL until nothing is left. A stopped process dies of SIGKILL too."""
        if grace_s > 0:
            signal_all(os.getpid(), self.child, signal.SIGTERM)
            deadline = time.monotonic() + grace_s
            while self.reap() and time.monotonic() < deadline:
                self._sleep(min(0.1, max(0.0, deadline - time.monotonic())))
        while self.reap():
            signal_all(os.getpid(), self.child, signal.SIGKILL)
            self._sleep(0.02)

    def _sleep(self, seconds: float) -> None:
        """Until a signal or the time is up."""
        select.select([self.wake], [], [], seconds)
        self._drain_wakeups()

    def _drain_wakeups(self) -> None:
        try:
            while os.read(self.wake, 512):
                continue
        except BlockingIOError:
            return

    def run(self) -> int:
        """Returns the child's wait status."""
        while self.status is None:
            ready, _, _ = select.select([self.wake, self.pipe], [], [])
            self._drain_wakeups()
            self.reap()
            if self.pipe in ready and self.status is None:
                order = os.read(self.pipe, 1)
                self.end_all(0.0 if order == b"k" else self.grace_s)
        self.end_all(_LEFTOVER_GRACE_S if self.reap() else 0.0)
        return self.status


def end_like(status: int) -> None:
    """End this process as the child ended, without a second core file."""
    if os.WIFSIGNALED(status):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        number = os.WTERMSIG(status)
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
        time.sleep(1)  # the signal is on its way
    os._exit(os.WEXITSTATUS(status) if os.WIFEXITED(status) else 1)


def main(args: list[str]) -> None:
    if len(args) < 4 or args[2] != "--":
        sys.exit("usage: guard.py FD GRACE_S -- COMMAND…")
    end_like(Guard(int(args[0]), float(args[1]), args[3:]).run())


if __name__ == "__main__":
    main(sys.argv[1:])
