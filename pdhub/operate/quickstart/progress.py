"""Bars while the model converts and the processes load; plain lines when stderr is no terminal."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from pdhub.operate.member import Event, State


class Bars:
    """A context manager; thread-safe.

    Args:
        console: stderr.
    """

    def __init__(self, console: Console) -> None:
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description:<12}"),
            BarColumn(),
            TextColumn("{task.fields[note]}"),
            TimeElapsedColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> Bars:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """Leave the finished bars on the screen. Idempotent."""
        self._progress.stop()

    def step(self, name: str, done: int, total: int, note: str = "") -> None:
        """Work whose size is known."""
        self._update(name, done, total, note)

    def event(self, event: Event) -> None:
        """A process moves when it is ready: nobody can tell how far a loading model is."""
        ready = event.state is State.READY
        self._update(event.name, int(ready), 1 if ready else None, event.text)

    def say(self, text: str) -> None:
        """A line above the bars."""
        self._progress.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _update(self, name: str, done: int, total: int | None, note: str) -> None:
        first = name not in self._tasks
        if first:
            self._tasks[name] = self._progress.add_task(name, total=total, note=note)
        self._progress.update(self._tasks[name], completed=done, total=total, note=note)
        if self._progress.disable and (first or done == total):
            self.say(f"{name}: {note or f'{done}/{total}'}")
