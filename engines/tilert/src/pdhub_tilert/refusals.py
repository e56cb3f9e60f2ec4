"""What a decode server means by an answer other than 200, or by an error line of its stream."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pdhub.api import (
    AdmissionRejected,
    EngineFailed,
    InvalidRequest,
    RequestCancelled,
    RequestError,
    TransferFailed,
    Unsupported,
)

_CANNOT = frozenset({"capability_unavailable", "grammar_unsupported", "logprobs_unavailable"})
_WRONG = frozenset({"invalid_parameter", "invalid_grammar", "grammar_violation"})


def error_of(body: Mapping[str, Any], status: int = 500) -> RequestError | None:
    """The error behind a document such as ``{"error": "…", "error_type": "…"}``; None if it is not of this kind."""
    text, kind = body.get("error"), body.get("error_type")
    if not isinstance(text, str):
        return None
    if kind in _CANNOT or status == 501:
        return Unsupported(f"TileRT cannot serve this request: {text}")
    if kind in _WRONG:
        return InvalidRequest(text)
    if kind == "request_cancelled":
        return RequestCancelled("the request was cancelled during its hand-over")
    if text == "kv_transfer_timeout":
        return TransferFailed("the prompt's KV did not arrive in time")
    if text == "busy":
        return AdmissionRejected("the node is busy", code="busy")
    if text == "decode stalled":
        return EngineFailed("the node produced no token for too long")
    return EngineFailed("the node failed") if status >= 500 else None
