"""TileRT's weight converter as a child process, with its progress."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

EVERY_S: Final = 5.0
_GIB: Final = 1 << 30


def convert(
    python: str, model_type: str, model_dir: Path, save_dir: Path, say: Callable[[str], None], every_s: float = EVERY_S
) -> int:
    """Run it to its end; the exit status is its own, or 2 where it cannot start, and then nothing is made.

    Args:
        python: the interpreter that has TileRT.
        model_type: as TileRT calls it, such as ``glm-5``.
        model_dir: Hugging Face directory. save_dir: made if it is not there.
        say: takes a line about progress, every ``every_s`` seconds.
    """
    if refused := refusal(python, model_dir):
        say(f"error: {refused}")
        return 2
    save_dir.mkdir(parents=True, exist_ok=True)
    words = ["--model_type", model_type, "--model_dir", str(model_dir), "--save_dir", str(save_dir)]
    source, started = size_of(model_dir), time.monotonic()
    child = subprocess.Popen([python, "-m", "tilert.models.preprocess.weight_converter", *words])
    try:
        while True:
            try:
                return child.wait(every_s)
            except subprocess.TimeoutExpired:
                say(progress(size_of(save_dir), source, time.monotonic() - started))
    finally:
        if child.poll() is None:
            child.terminate()
            child.wait()


def refusal(python: str, model_dir: Path) -> str:
    """Why the converter cannot start; empty if it can. TileRT is looked for, not imported: that would need its GPU."""
    if not model_dir.is_dir():
        return f"--model-dir {model_dir} is not a directory"
    look = "import importlib.util, sys; sys.exit(importlib.util.find_spec('tilert') is None)"
    try:
        found = subprocess.run([python, "-c", look], check=False).returncode == 0
    except OSError as error:
        return f"cannot run --python {python}: {error.strerror}"
    return (
        "" if found else f"{python} has no TileRT; install it there, or name the interpreter that has it with --python"
    )


def progress(written: int, source: int, elapsed_s: float) -> str:
    """One line. The converted weights are about as large as their source."""
    share = f", {100 * min(1.0, written / source):.0f} %" if source else ""
    return f"{written / _GIB:.1f} GiB written of about {source / _GIB:.1f} GiB{share}, {elapsed_s:.0f} s"


def size_of(directory: Path) -> int:
    """Bytes of its weight files."""
    return sum(path.stat().st_size for path in directory.glob("*.safetensors") if path.is_file())


def tell(line: str) -> None:
    """To standard error, beside the converter's own output."""
    print(line, file=sys.stderr, flush=True)
