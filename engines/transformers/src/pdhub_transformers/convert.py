"""GGUF file → Hugging Face directory, without a network."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from pdhub.api import ConfigError, PluginError

Progress = Callable[[int, int], None]
"""``progress(done, total)`` in tensors; the last call has done == total."""

MARK = "config.json"
"""A directory that holds it is complete: it appears only by the rename of the whole directory."""


def convert_gguf(
    path: str | Path,
    out_dir: str | Path,
    progress: Progress | None = None,
    *,
    dtype: Literal["float32", "bfloat16"] = "float32",
) -> Path:
    """Write config, generation config, tokenizer and weights (``model.safetensors``) of a GGUF file.

    The directory appears all at once or not at all. One that is already complete is left as it is, so that two
    processes may convert the same file.

    Args:
        path: the ``.gguf`` file.
        out_dir: the directory to make; parents are made too.
        progress: called after each tensor.
        dtype: of the written weights.

    Returns ``out_dir``. Raises ConfigError if the file is missing, damaged, or of a kind that is not supported.
    """
    source, out = Path(path), Path(out_dir)
    if (out / MARK).is_file():
        return out
    if out.exists():
        raise ConfigError(f"{out} exists and is no converted model", hint="give another directory or remove this one")
    if not source.is_file():
        raise ConfigError(f"GGUF file not found: {source}")
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    try:
        _write(source, temporary, progress or (lambda done, total: None), dtype)
        temporary.chmod(0o755)
        try:
            temporary.rename(out)
        except OSError:
            if not (out / MARK).is_file():  # else another process was faster, with the same content
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return out


def _write(source: Path, out: Path, progress: Progress, dtype: str) -> None:
    try:
        import gguf
        import torch
        from safetensors.torch import save_file
    except ImportError as error:
        raise PluginError(f"reading a GGUF needs {error.name}", hint="pip install pdhub-transformers") from error

    from pdhub_transformers.gguf_tokenizer import build_tokenizer, tokenizer_config
    from pdhub_transformers.gguf_weights import hf_config, weights

    try:
        reader = gguf.GGUFReader(source)
    except (ValueError, IndexError) as error:
        raise ConfigError(f"not a readable GGUF file: {source} ({error})") from error
    meta: dict[str, Any] = {key: field.contents() for key, field in reader.fields.items()}
    tensors = list(reader.tensors)
    config = hf_config(meta, "output.weight" not in {t.name for t in tensors}, dtype)
    build_tokenizer(meta).save(str(out / "tokenizer.json"))
    target = getattr(torch, dtype)
    state = {}
    for name, value in weights(tensors, config, gguf.quants.dequantize):
        state[name] = torch.from_numpy(value).to(target)
        progress(len(state), len(tensors) + 1)
    save_file(state, out / "model.safetensors", metadata={"format": "pt"})
    (out / "model.safetensors").chmod(0o644)
    ids = {k: config[k] for k in ("bos_token_id", "eos_token_id", "pad_token_id") if k in config}
    documents = {
        "tokenizer_config.json": tokenizer_config(meta, config["max_position_embeddings"]),
        "generation_config.json": ids,
        MARK: config,
    }
    for name, document in documents.items():
        (out / name).write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    progress(len(tensors) + 1, len(tensors) + 1)
