"""The one place that knows which HTTP status an error has, and how its body looks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from pdhub.api import errors as e


class BodyTooLarge(e.InvalidRequest):
    """A request body over the server's limit."""

    code = "request_too_large"


_STATUS: dict[type[e.PDHubError], tuple[int, str]] = {
    e.ModelNotFound: (404, "invalid_request_error"),
    BodyTooLarge: (413, "invalid_request_error"),
    e.InvalidRequest: (400, "invalid_request_error"),
    e.RequestCancelled: (499, "request_cancelled"),
    e.LayoutMismatch: (502, "server_error"),
    e.TransferFailed: (502, "server_error"),
    e.EngineFailed: (502, "server_error"),
    e.LeaseExpired: (504, "server_error"),
}

_BY_CODE: dict[str, type[e.RequestError]] = {
    cls.code: cls
    for cls in (
        e.InvalidRequest,
        e.ModelNotFound,
        e.RequestCancelled,
        e.LayoutMismatch,
        e.TransferFailed,
        e.EngineFailed,
        e.LeaseExpired,
    )
}


def status_of(error: BaseException) -> int:
    """HTTP status of an error; 500 for anything that is not ours."""
    if isinstance(error, e.AdmissionRejected):
        return 429 if error.contended else 503
    for cls in type(error).__mro__:
        if cls in _STATUS:
            return _STATUS[cls][0]
    return 500


def type_of(error: BaseException) -> str:
    """The ``type`` member of the body."""
    if isinstance(error, e.AdmissionRejected):
        return "rate_limit_error" if error.contended else "server_error"
    for cls in type(error).__mro__:
        if cls in _STATUS:
            return _STATUS[cls][1]
    return "server_error"


def body_of(error: BaseException) -> dict[str, Any]:
    """OpenAI's error document. Text of foreign exceptions stays in the log."""
    if not isinstance(error, e.RequestError):
        return {"error": {"message": "internal error", "type": "server_error", "param": None, "code": "internal_error"}}
    return {"error": {"message": error.message, "type": type_of(error), "param": error.param, "code": error.code}}


def headers_of(error: BaseException) -> dict[str, str]:
    """``Retry-After`` (whole seconds, at least 1) and the dropped reason, where known."""
    out: dict[str, str] = {}
    if isinstance(error, e.AdmissionRejected):
        if error.retry_after_s is not None:
            out["retry-after"] = str(max(1, math.ceil(error.retry_after_s)))
        if error.reason:
            out["x-llm-d-request-dropped-reason"] = error.reason
    return out


def context_length_message(limit: int, prompt: int, completion: int) -> str:
    """vLLM's wording, which clients match on. All in tokens; ``limit`` is the model's context."""
    return (
        f"This model's maximum context length is {limit} tokens. However, you requested {prompt + completion} tokens "
        f"({prompt} in the messages, {completion} in the completion). "
        "Please reduce the length of the messages or completion."
    )


def from_body(status: int, body: Mapping[str, Any], retry_after: str | None = None) -> e.RequestError:
    """The error that a node sent, as an exception of the same class. Unknown ones become EngineFailed."""
    inner = body.get("error")
    inner = inner if isinstance(inner, Mapping) else {}
    message = str(inner.get("message") or f"upstream answered {status}")
    code = str(inner.get("code") or "")
    param = inner.get("param")
    if status in (429, 503):
        seconds = float(retry_after) if retry_after and retry_after.isdigit() else None
        return e.AdmissionRejected(message, contended=status == 429, retry_after_s=seconds, code=code or None)
    if code in _BY_CODE:
        return _BY_CODE[code](message, param=param if isinstance(param, str) else None)
    if status in (400, 404, 413, 422):
        return e.InvalidRequest(message, param=param if isinstance(param, str) else None, code=code or None)
    return e.EngineFailed(message)
