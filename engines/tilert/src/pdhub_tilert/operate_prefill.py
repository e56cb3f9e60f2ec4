"""What the arguments of a vLLM prefill instance must say for TileRT nodes, whichever connector fills them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pdhub.api import Finding, NodeSpec, Severity
from pdhub_tilert.config import ModelConfig
from pdhub_tilert.profiles import PAGE, Profile


def wanted(config: ModelConfig) -> dict[str, str]:
    """Arguments that `vllm serve` must have as a prefill instance for these nodes."""
    words = {"--kv-cache-dtype": "fp8_ds_mla" if config.kv_cache_dtype.value == "fp8_ds_mla" else "auto"}
    if config.mtp and config.profile is not Profile.DSV32:
        words["--speculative-config"] = '{"method":"mtp","num_speculative_tokens":1}'
    return words


def arguments(prefill: NodeSpec, config: ModelConfig) -> Iterator[Finding]:
    """Where the configuration's arguments of an instance differ from that."""
    severity, where = severity_of(prefill), f"prefill '{prefill.name}'"
    args = [str(word) for word in _serve(prefill).get("args") or ()]
    for flag, value in wanted(config).items():
        found = _value(args, flag)
        if not _same(flag, found, value):
            message = f"{flag} is {found!r} at vLLM, its TileRT nodes need {value!r}"
            yield Finding(severity, where, message, f"put `{flag} '{value}'` into serve.args")
    if config.profile is Profile.DSV32 and _value(args, "--speculative-config") is not None:
        message = "the profile dsv32 wants 61 layers of KV, and a draft layer is one more"
        yield Finding(severity, where, message, "leave out --speculative-config")
    block = _value(args, "--block-size")
    if block is not None and block != str(PAGE):
        yield Finding(severity, where, f"--block-size is {block}", f"TileRT's pages have {PAGE} tokens")


def severity_of(prefill: NodeSpec) -> Severity:
    """Of an instance that somebody else starts, arguments are only what is written down."""
    return Severity.ERROR if prefill.launch else Severity.WARNING


def environment_of(prefill: NodeSpec) -> Mapping[str, Any]:
    """What the configuration adds to its environment."""
    return _serve(prefill).get("env") or {}


def _serve(prefill: NodeSpec) -> Mapping[str, Any]:
    serve = prefill.config.get("serve")
    return serve if isinstance(serve, Mapping) else {}


def _value(args: Sequence[str], flag: str) -> str | None:
    for at, word in enumerate(args):
        if word == flag:
            return args[at + 1] if at + 1 < len(args) else ""
        if word.startswith(flag + "="):
            return word[len(flag) + 1 :]
    return None


def _same(flag: str, found: str | None, wanted: str) -> bool:
    if flag == "--kv-cache-dtype" and wanted == "auto":
        return found in (None, "auto", "bfloat16", "bf16")
    if flag == "--speculative-config":
        return bool(_method(found) == _method(wanted))
    return found == wanted


def _method(text: str | None) -> Any:
    try:
        document = json.loads(text or "null")
    except ValueError:
        return None
    return document.get("method") if isinstance(document, dict) else None
