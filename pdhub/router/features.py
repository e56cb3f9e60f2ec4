"""What a body asks of an engine, beyond its sampling values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pdhub.api.request import Feature

_GRAMMAR = (
    "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar",
    "guided_decoding_backend", "structural_tag",
)  # fmt: skip
_EXTENSIONS = (
    "bad_words", "allowed_token_ids", "logits_processors", "length_penalty", "early_stopping",
    "truncate_prompt_tokens", "suffix", "chat_template", "documents", "thinking_token_budget", "prediction",
    "logprob_token_ids", "cache_salt", "mm_processor_kwargs", "vllm_xargs",
)  # fmt: skip
_MULTIMODAL = ("prompt_embeds", "audio")


def features_of(body: Mapping[str, Any], chat: bool) -> frozenset[Feature]:
    """Features that an engine must have for this body; sampling values are judged after their defaults are known.

    Args:
        body: validated. chat: it came to ``/v1/chat/completions``.
    """
    asked = {
        Feature.N: (body.get("n") or 1) > 1 or (not chat and choices_of(body) > 1),
        Feature.BEST_OF: (body.get("best_of") or 1) > 1 or bool(body.get("use_beam_search")),
        Feature.ECHO: bool(body.get("echo")),
        Feature.PROMPT_LOGPROBS: body.get("prompt_logprobs") is not None,
        Feature.LOGPROBS: logprobs_of(body, chat) is not None,
        Feature.TOOLS: _tools(body),
        Feature.GRAMMAR: _constrained(body) or (chat and _calls_constrained(body)),
        Feature.MIN_TOKENS: bool(body.get("min_tokens")),
        Feature.IGNORE_EOS: bool(body.get("ignore_eos")),
        Feature.STOP_TOKEN_IDS: bool(body.get("stop_token_ids")),
        Feature.REASONING: bool(body.get("reasoning_effort") or body.get("reasoning")),
        Feature.MULTIMODAL: _multimodal(body, chat),
        Feature.EXTENSIONS: any(body.get(name) not in (None, "", False) for name in _EXTENSIONS),
    }
    return frozenset(feature for feature, wanted in asked.items() if wanted)


def logprobs_of(body: Mapping[str, Any], chat: bool) -> int | None:
    """Alternatives a token that the client wants; None = no log probabilities."""
    if chat:
        return (body.get("top_logprobs") or 0) if body.get("logprobs") else None
    return body.get("logprobs")


def choices_of(body: Mapping[str, Any]) -> int:
    """Prompts in one body: each is a choice of its own."""
    prompt = body.get("prompt")
    return len(prompt) if isinstance(prompt, list) and isinstance(prompt[0], (str, list)) else 1


def _tools(body: Mapping[str, Any]) -> bool:
    offered = body.get("tools") or body.get("functions")
    return bool(offered) and body.get("tool_choice") != "none" and body.get("function_call") != "none"


def _calls_constrained(body: Mapping[str, Any]) -> bool:
    """A call that is forced, or whose arguments must be what a schema says, is decoded under a grammar."""
    if not _tools(body):
        return False
    strict = any(
        isinstance(function := tool.get("function"), dict) and function.get("strict") is True
        for tool in body.get("tools") or ()
    )
    return strict or body.get("tool_choice") not in (None, "auto")


def _constrained(body: Mapping[str, Any]) -> bool:
    shape = body.get("response_format")
    return (isinstance(shape, dict) and shape.get("type") not in (None, "text")) or any(
        body.get(name) is not None for name in _GRAMMAR
    )


def _multimodal(body: Mapping[str, Any], chat: bool) -> bool:
    if any(body.get(name) is not None for name in _MULTIMODAL):
        return True
    return any(
        isinstance(part, dict) and part.get("type", "text") not in ("text", "refusal", "thinking")
        for message in (body["messages"] if chat else ())
        for part in (message.get("content") if isinstance(message.get("content"), list) else ())
    )
