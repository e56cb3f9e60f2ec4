"""The OpenAI body: parsed once, its bytes kept."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from pdhub.api.errors import InvalidRequest, ModelNotFound
from pdhub.api.request import Feature
from pdhub.router.features import features_of, logprobs_of
from pdhub.router.prefix import prefix_of
from pdhub.router.validate import CHAT, COMPLETIONS, check_members, check_together, refuse_internal

CHAT_PATH = "/v1/chat/completions"
COMPLETIONS_PATH = "/v1/completions"

TEMPLATE_TOKENS = 64
"""Room for what a chat template adds: role markers and a default system prompt."""

_decoder = msgspec.json.Decoder()


@dataclass(frozen=True, slots=True)
class ClientRequest:
    """A validated request.

    Args:
        raw: the body as it came; ``body``: the same, parsed, read-only.
        model: as the client named it. served: the name behind an alias.
        max_tokens: the client's cap under either name; None = the rest of the context.
        features: beyond sampling values.
        prompt_low, prompt_high: lower and upper estimate of the prompt's tokens; equal if the client sent ids.
        prefix: digests of the prompt's beginnings, shortest first.
    """

    endpoint: str
    raw: bytes
    body: Mapping[str, Any]
    model: str
    served: str
    stream: bool
    max_tokens: int | None
    logprobs: int | None
    features: frozenset[Feature]
    prompt_low: int
    prompt_high: int
    prefix: tuple[int, ...] = ()

    @property
    def chat(self) -> bool:
        return self.endpoint == CHAT_PATH


def parse_request(
    endpoint: str, raw: bytes, model: str, aliases: Collection[str], *, reasons: bool = False
) -> ClientRequest:
    """Read one body.

    Args:
        endpoint: :data:`CHAT_PATH` or :data:`COMPLETIONS_PATH`.
        model: the served model's name.
        reasons: every chat answer has reasoning that must be split off.

    Raises:
        InvalidRequest: naming the member at fault. ModelNotFound: another model.
    """
    body = _decode(raw)
    chat = endpoint == CHAT_PATH
    refuse_internal(body)
    check_members(body, CHAT if chat else COMPLETIONS)
    for required in ("model", "messages" if chat else "prompt"):
        if body.get(required) is None:
            raise InvalidRequest(f"{required} is required", param=required)
    check_together(body, chat)
    named = body["model"]
    if named != model and named not in aliases:
        raise ModelNotFound(f"the model `{named[:200]}` does not exist", param="model")
    low, high = _estimate(body, raw, chat)
    return ClientRequest(
        endpoint=endpoint,
        raw=raw,
        body=body,
        model=named,
        served=model,
        stream=bool(body.get("stream")),
        max_tokens=body.get("max_completion_tokens") or body.get("max_tokens"),
        logprobs=logprobs_of(body, chat),
        features=features_of(body, chat) | ({Feature.REASONING} if chat and reasons else set()),
        prompt_low=low,
        prompt_high=high,
        prefix=prefix_of(body, chat),
    )


def _decode(raw: bytes) -> dict[str, Any]:
    try:
        body = _decoder.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from error
    except RecursionError as error:
        raise InvalidRequest("the body is nested too deeply") from error
    if not isinstance(body, dict):
        raise InvalidRequest("the body must be a JSON object")
    return body


def _estimate(body: Mapping[str, Any], raw: bytes, chat: bool) -> tuple[int, int]:
    prompt = None if chat else body["prompt"]
    if isinstance(prompt, list):
        first = prompt[0]
        if isinstance(first, int):
            return len(prompt), len(prompt)
        if isinstance(first, list):
            return len(first), len(first)
    # English has four to five bytes a token, other scripts about two; the exact number comes from prefill.
    return max(1, _letters(body, chat) // 8), len(raw) // 2 + TEMPLATE_TOKENS


def _letters(body: Mapping[str, Any], chat: bool) -> int:
    if not chat:
        prompt = body["prompt"]
        return len(prompt) if isinstance(prompt, str) else max(len(p) for p in prompt)
    total = 0
    for message in body["messages"]:
        content = message.get("content")
        if isinstance(content, str):
            total += len(content)
        elif isinstance(content, list):
            total += sum(len(p["text"]) for p in content if isinstance(p, dict) and isinstance(p.get("text"), str))
    return total
