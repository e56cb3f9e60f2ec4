"""Where the model's files are: a directory as it is, a GGUF file through its converted directory."""

from __future__ import annotations

import hashlib
from pathlib import Path

from pdhub.api import ConfigError


def model_directory(path: str | None, cache_dir: str | None = None) -> Path:
    """The Hugging Face directory of ``model.path``; a GGUF is converted once and then found again.

    Raises ConfigError if there is no model.
    """
    if path is None:
        raise ConfigError("the transformers engine needs a model", where="model.path", hint="set model.path")
    source = Path(path).expanduser()
    if source.suffix == ".gguf":
        from pdhub_transformers.convert import convert_gguf

        return convert_gguf(source, converted_path(source, cache_dir))
    if not (source / "config.json").is_file():
        hint = "give a Hugging Face directory or a .gguf file"
        raise ConfigError(f"no model at {source}", where="model.path", hint=hint)
    return source


def converted_path(source: Path, cache_dir: str | None = None) -> Path:
    """Where a GGUF file's conversion lives; another file, or the same one changed, has another place."""
    root = Path(cache_dir).expanduser() if cache_dir else Path.home() / ".cache" / "pdhub" / "transformers"
    if not source.is_file():
        raise ConfigError(f"GGUF file not found: {source}", where="model.path")
    state = source.stat()
    key = f"{source.resolve()}:{state.st_size}:{state.st_mtime_ns}"
    return root / f"{source.stem}-{hashlib.sha256(key.encode()).hexdigest()[:12]}"
