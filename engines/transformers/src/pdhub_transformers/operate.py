"""Checks for ``pdhub doctor``: what can be known without loading the model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pdhub.api import Finding, Operate, Severity, Topology
from pdhub_transformers.config import TransformersConfig


class TransformersOperate(Operate):
    """Starts nothing itself: ``pdhub node`` hosts this engine."""

    def __init__(self, config: TransformersConfig) -> None:
        self._config = config

    def checks(self, topology: Topology) -> Sequence[Finding]:
        """The model is a directory with a ``config.json`` or a GGUF file."""
        where = "model.path"
        if topology.model_path is None:
            return (Finding(Severity.ERROR, where, "the transformers engine needs a model", "set model.path"),)
        path = Path(topology.model_path).expanduser()
        if path.suffix == ".gguf" and path.is_file():
            return ()
        if not (path / "config.json").is_file():
            fix = "give a Hugging Face directory or a .gguf file"
            return (Finding(Severity.ERROR, where, f"no model at {path}", fix),)
        if not any(path.glob("*.safetensors")):
            fix = "convert the weights to safetensors"
            return (Finding(Severity.WARNING, where, f"no .safetensors file in {path}", fix),)
        return ()
