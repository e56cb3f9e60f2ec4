"""Reading the prefill leg's answer: vLLM's shape, chat or completion."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from pdhub.api.client import PrefillResult
from pdhub.api.engine import TokenLogprob
from pdhub.api.errors import EngineFailed

_PREFIX = "token_id:"


def read_result(body: Mapping[str, Any]) -> PrefillResult:
    """Normalise one answer. Members that it lacks are unknown.

    Raises:
        EngineFailed: it has an error, no choice, or members of wrong types.
    """
    if body.get("error"):
        raise EngineFailed("the prefill instance answered with an error")
    try:
        choice = body["choices"][0]
        ids = choice.get("token_ids") or ()
        prompt = body.get("prompt_token_ids") or choice.get("prompt_token_ids") or ()
        details = (body.get("usage") or {}).get("prompt_tokens_details") or {}
        cached = details.get("cached_tokens")
        return PrefillResult(
            body=body,
            prompt_token_ids=_ids(prompt),
            first_token=_ids(ids)[0] if ids else None,
            first_logprob=_exact(choice.get("pdhub_logprob")) or _logprob(choice.get("logprobs")),
            cached_tokens=cached if isinstance(cached, int) else None,
        )
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise EngineFailed(f"the prefill instance's answer is not in the expected shape: {error!r}") from error


def _ids(values: Any) -> tuple[int, ...]:
    """Checked in one call: a prompt has thousands, and decode waits for them."""
    return msgspec.convert(values, tuple[int, ...])


def _exact(entry: Any) -> TokenLogprob | None:
    """An embedded instance gives ids and numbers beside OpenAI's texts."""
    if not entry:
        return None
    token, logprob, top = entry
    return TokenLogprob(int(token), float(logprob), tuple((int(t), float(value)) for t, value in top))


def _logprob(logprobs: Any) -> TokenLogprob | None:
    """The first token's, where tokens are named ``token_id:N``."""
    if not logprobs:
        return None
    if content := logprobs.get("content"):
        entry = content[0]
        top = tuple((_id(t["token"]), float(t["logprob"])) for t in entry.get("top_logprobs") or ())
        return TokenLogprob(_id(entry["token"]), float(entry["logprob"]), top)
    if tokens := logprobs.get("tokens"):
        every = logprobs.get("top_logprobs") or [None]
        ranked = sorted((every[0] or {}).items(), key=lambda item: -item[1])
        top = tuple((_id(token), float(value)) for token, value in ranked)
        return TokenLogprob(_id(tokens[0]), float(logprobs["token_logprobs"][0]), top)
    return None


def _id(text: str) -> int:
    if not text.startswith(_PREFIX):
        raise ValueError(f"log probabilities name tokens by text, not id: {text!r}")
    return int(text[len(_PREFIX) :])
