"""The one-token answer of a prefill leg, in the shape of vLLM's server."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

from pdhub.api.engine import TokenLogprob
from pdhub.api.prefill import FirstToken
from pdhub.node.prefill_request import LegRequest

Text = Callable[[Sequence[int]], str]


def document(
    request: LegRequest, request_id: str, prompt: Sequence[int], first: FirstToken, text: Text, eos: Collection[int]
) -> dict[str, Any]:
    """The JSON answer.

    Args:
        request_id: without a prefix.
        prompt: token ids. text: ids to text, special tokens skipped. eos: ids that end a sequence.
    """
    token = first.token_id
    stops = token in request.stop_token_ids or (token in eos and not request.ignore_eos)
    content = text([token])
    choice: dict[str, Any] = {"index": 0}
    if request.chat:
        choice["message"] = {"role": "assistant", "content": content, "tool_calls": []}
        choice["logprobs"] = _chat_logprobs(request, first.logprob, text)
    else:
        choice["text"] = content
        choice["logprobs"] = _completion_logprobs(request, first.logprob, text)
    choice["finish_reason"] = "stop" if stops else "length"
    choice["stop_reason"] = token if token in request.stop_token_ids else None
    out: dict[str, Any] = {
        "id": f"{'chatcmpl' if request.chat else 'cmpl'}-{request_id}",
        "object": "chat.completion" if request.chat else "text_completion",
        "created": int(time.time()),
        "model": request.model,
        "choices": [choice],
        "usage": {
            "prompt_tokens": len(prompt),
            "total_tokens": len(prompt) + 1,
            "completion_tokens": 1,
            "prompt_tokens_details": None,
        },
        "kv_transfer_params": None,
    }
    if request.return_token_ids:
        # vLLM has the prompt's ids at the top for chat, in the choice for completions; ours are in both places
        ids = list(prompt)
        choice["token_ids"] = [token]
        choice["prompt_token_ids"] = ids
        out["prompt_token_ids"] = ids
    if first.logprob is not None and request.handoff is not None:
        # OpenAI's format has texts; decode must be seeded with ids
        choice["pdhub_logprob"] = [token, first.logprob.logprob, [list(pair) for pair in first.logprob.top]]
    return out


def _name(request: LegRequest, token: int, text: Text) -> str:
    return f"token_id:{token}" if request.tokens_as_ids else text([token])


def _chat_logprobs(request: LegRequest, logprob: TokenLogprob | None, text: Text) -> dict[str, Any] | None:
    if logprob is None:
        return None

    def entry(token: int, value: float) -> dict[str, Any]:
        return {"token": _name(request, token, text), "logprob": value, "bytes": list(text([token]).encode())}

    top = [entry(token, value) for token, value in logprob.top]
    return {"content": [{**entry(logprob.token_id, logprob.logprob), "top_logprobs": top}]}


def _completion_logprobs(request: LegRequest, logprob: TokenLogprob | None, text: Text) -> dict[str, Any] | None:
    if logprob is None:
        return None
    own = (logprob.token_id, logprob.logprob)
    return {
        "text_offset": [0],
        "token_logprobs": [logprob.logprob],
        "tokens": [_name(request, logprob.token_id, text)],
        "top_logprobs": [{_name(request, token, text): value for token, value in (*logprob.top, own)}],
    }
