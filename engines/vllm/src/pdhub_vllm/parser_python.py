"""On this machine: the Python whose vLLM runs the parsers, what it has, and where the model's tokenizer is."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from pdhub.api import ConfigError, ParserContext, Topology
from pdhub_vllm.operate_ports import ours
from pdhub_vllm.parser_config import VLLMParserConfig

SCRIPT: Final = Path(__file__).with_name("parser_names.py")
WITHIN_S: Final = 30.0


def python_of(config: VLLMParserConfig, topology: Topology) -> str:
    """The interpreter that has vllm, as the options say, or as the servers are started, or this one."""
    if config.python is not None:
        return config.python
    for _, options in ours(topology):
        command = shutil.which(options.serve.command[0]) or options.serve.command[0]
        beside = Path(command).parent / "python"
        if os.sep in command and beside.exists():
            return str(beside)
    return sys.executable


def tokenizer_of(context: ParserContext) -> str:
    """The directory. Raises ConfigError if there is none here."""
    place = Path(context.tokenizer or "").expanduser()
    directory = place if place.is_dir() else place.parent
    if context.tokenizer is None or not (directory / "tokenizer_config.json").is_file():
        hint = (
            "set model.tokenizer to the model's directory, with tokenizer.json, tokenizer_config.json and config.json"
        )
        raise ConfigError("vLLM's parsers need the directory of the model's tokenizer", where="model", hint=hint)
    return str(directory)


def known_names(python: str) -> Mapping[str, Any]:
    """What ``parser_names.py`` tells.

    Raises:
        ConfigError: that Python cannot be run.
    """
    try:
        done = subprocess.run([python, str(SCRIPT)], capture_output=True, text=True, timeout=WITHIN_S, check=True)
        found = json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        told = getattr(error, "stderr", None) or str(error)
        hint = "set `python` of model.parser to the Python of an environment that has vllm"
        raise ConfigError(f"{python} cannot be run: {told.strip()[-300:]}", where="model.parser", hint=hint) from error
    return dict(found)
