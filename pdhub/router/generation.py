"""What the model's own files say about generation: sampling defaults and the ids that end an answer.

A hosted prefill instance tells both. A foreign one does not, and where its tokens are presented by the router, both
legs need the same values; vLLM takes them from the same file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from pdhub.api.errors import ConfigError

_MEMBERS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclass(frozen=True, slots=True)
class Generation:
    """Args:
    sampling: defaults of members that a client omits. eos_token_ids: empty = unknown.
    """

    sampling: Mapping[str, float] = field(default_factory=dict)
    eos_token_ids: frozenset[int] = frozenset()


def load_generation(path: str) -> Generation:
    """From ``generation_config.json`` in a model's directory, or beside a file of it; nothing if there is none.

    Raises:
        ConfigError: it is there and cannot be read.
    """
    place = Path(path).expanduser()
    file = (place if place.is_dir() else place.parent) / "generation_config.json"
    if not file.is_file():
        return Generation()
    try:
        document = msgspec.json.decode(file.read_bytes(), type=dict[str, Any])
        sampling = {n: float(document[n]) for n in _MEMBERS if isinstance(document.get(n), (int, float))}
        eos = document.get("eos_token_id")
        ids = frozenset(int(i) for i in (eos if isinstance(eos, list) else [] if eos is None else [eos]))
    except (OSError, TypeError, ValueError, msgspec.DecodeError) as error:
        raise ConfigError(f"cannot read {file}: {error}", where="model.tokenizer") from error
    if document.get("do_sample") is False:
        sampling["temperature"] = 0.0
    return Generation(sampling, ids)
