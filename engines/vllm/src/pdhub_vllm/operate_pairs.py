"""A prefill instance and a decode node that share KV: what must be equal on both sides."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from pdhub.api import Finding, Severity
from pdhub_vllm.config import Handoff
from pdhub_vllm.operate_facts import Facts, ask
from pdhub_vllm.operate_ports import config_of

TEXT: Final = "The quick brown fox — 1234567890, naïve café, 你好 🙂\n\tdef f(x): return x"
"""Splits differently under nearly every two tokenizers."""

MESSAGES: Final = [{"role": "user", "content": TEXT}]

DRAFTS: Final = "vllm:spec_decode_num_drafts"

HASHED: Final[Mapping[str, tuple[str, ...]]] = {
    "model": ("model_config", "model"),
    "dtype": ("model_config", "dtype"),
    "cache dtype": ("cache_config", "cache_dtype"),
    "speculative config": ("speculative_config",),
    "attention backend": ("attention_config", "backend"),
    "hybrid KV cache manager off": ("scheduler_config", "disable_hybrid_kv_cache_manager"),
}
"""What goes into the compatibility hash of vLLM's NIXL connectors, where `/server_info` tells it."""


def compare(prefill: Facts, decode: Facts, model: str) -> Iterator[Finding]:
    """Findings about one pair; both answer.

    Args:
        model: the name under which both serve it.
    """
    where = f"{prefill.node.name} → {decode.node.name}"
    yield from _versions(where, prefill, decode)
    yield from _cache(where, prefill, decode)
    yield from _tokens(where, prefill, decode, model)
    yield from _drafts(where, prefill, decode)
    yield from _hashed(where, prefill, decode)


def _versions(where: str, prefill: Facts, decode: Facts) -> Iterator[Finding]:
    if not prefill.version or not decode.version:
        return
    if prefill.version != decode.version:
        message = f"vLLM {prefill.version} and {decode.version}: their connectors refuse each other's handshake"
        yield _error(where, message, "run the same version of vLLM on both sides")


def _cache(where: str, prefill: Facts, decode: Facts) -> Iterator[Finding]:
    ours, theirs = prefill.cache, decode.cache
    if not ours or not theirs:
        name = (prefill if not ours else decode).node.name
        message = f"'{name}' does not tell its cache configuration (vllm:cache_config_info), so it was not compared"
        yield Finding(Severity.INFO, where, message)
        return
    dtypes = ours.get("cache_dtype"), theirs.get("cache_dtype")
    if dtypes[0] != dtypes[1]:
        message = f"cache dtype is {dtypes[0]} at prefill and {dtypes[1]} at decode"
        yield _error(where, message, "give both the same `--kv-cache-dtype`")
    blocks = ours.get("block_size"), theirs.get("block_size")
    if blocks[0] != blocks[1]:
        message = f"block size is {blocks[0]} at prefill and {blocks[1]} at decode"
        yield Finding(
            Severity.WARNING, where, message, "give both the same `--block-size`; not every connector converts"
        )


def _tokens(where: str, prefill: Facts, decode: Facts, model: str) -> Iterator[Finding]:
    """Both turn the same text, and the same messages, into the same tokens."""
    left, right = (_model_name(facts, model) for facts in (prefill, decode))
    roots = prefill.models.get(left, {}).get("root"), decode.models.get(right, {}).get("root")
    if roots[0] != roots[1]:
        message = f"prefill serves {roots[0]!r}, decode {roots[1]!r}"
        nixl = config_of(decode.node).handoff in (Handoff.NIXL, Handoff.NIXL_PUSH)
        fix = "serve it from the same path or name on both sides: NIXL's handshake compares that text"
        yield Finding(Severity.ERROR if nixl else Severity.WARNING, where, message, fix)
    for what, body in (("tokenizer", {"prompt": TEXT}), ("chat template", {"messages": MESSAGES})):
        a = ask(prefill.node, "/tokenize", {"model": left, **body}).json()
        b = ask(decode.node, "/tokenize", {"model": right, **body}).json()
        a, b = (x.get("tokens") if isinstance(x, dict) else None for x in (a, b))
        if (a is None) != (b is None):
            yield _error(where, f"only one side has a {what}", "serve the same model files on both sides")
        elif a != b:
            yield _error(where, f"the {what} differs", "serve the same model files on both sides")


def _drafts(where: str, prefill: Facts, decode: Facts) -> Iterator[Finding]:
    """A model's own draft layers have KV too, and the layers of both sides must agree."""
    has = [DRAFTS in facts.metrics for facts in (prefill, decode)]
    if has[0] != has[1]:
        side = "prefill" if has[0] else "decode"
        message = f"speculative decoding is on only at {side}: with MTP or EAGLE the sides' KV layers differ"
        yield Finding(Severity.ERROR, where, message, "give both sides the same `--speculative-config`")


def _hashed(where: str, prefill: Facts, decode: Facts) -> Iterator[Finding]:
    if not prefill.server or not decode.server:
        return
    left, right = (facts.server.get("vllm_config", facts.server) for facts in (prefill, decode))
    for name, path in HASHED.items():
        a, b = _at(left, path), _at(right, path)
        if a != b:
            message = f"{name} is {a!r} at prefill and {b!r} at decode: part of the connectors' compatibility hash"
            yield _error(where, message, "make both equal")


def _at(document: Any, path: tuple[str, ...]) -> Any:
    for key in path:
        document = document.get(key) if isinstance(document, Mapping) else None
    return document


def _model_name(facts: Facts, model: str) -> str:
    return config_of(facts.node).model or model


def _error(where: str, message: str, fix: str) -> Finding:
    return Finding(Severity.ERROR, where, message, fix)
