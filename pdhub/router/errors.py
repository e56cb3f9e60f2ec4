"""Errors that only the router has, and how any error becomes an answer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec

from pdhub.api.errors import AdmissionRejected, EngineFailed, InvalidRequest, RequestError
from pdhub.core.admission import DroppedReason
from pdhub.wire import errors as wire


class Refused(InvalidRequest):
    """An engine's own 4xx, passed through verbatim: clients match on the wording.

    Args:
        status: the engine's. body: its bytes. content_type: of ``body``.
    """

    def __init__(self, status: int, body: bytes, content_type: str, *, code: str, message: str) -> None:
        super().__init__(message, code=code)
        self.status = status
        self.body = body
        self.content_type = content_type


class UnknownPath(InvalidRequest):
    code = "not_found"


class MethodNotAllowed(InvalidRequest):
    code = "method_not_allowed"


class Unreachable(EngineFailed):
    """Nobody listens there, or the connection broke before an answer."""


class UpstreamTimeout(EngineFailed):
    """An engine or instance was silent for longer than its limit."""

    code = "upstream_timeout"


class Overdue(EngineFailed):
    """The whole request took longer than its limit."""

    code = "request_timeout"


class LandingTooSmall(RequestError):
    """The prompt has more tokens than were claimed; ``need`` is the exact number. Never reaches a client."""

    code = "landing_too_small"

    def __init__(self, need: int) -> None:
        super().__init__(f"the prompt needs a landing of {need} tokens")
        self.need = need


def no_endpoints(message: str) -> AdmissionRejected:
    """503: nobody is there to serve."""
    reason = DroppedReason.NO_ENDPOINTS.value
    return AdmissionRejected(message, contended=False, retry_after_s=1.0, reason=reason, code="no_endpoints")


_STATUS: dict[type[RequestError], int] = {
    UnknownPath: 404,
    MethodNotAllowed: 405,
    UpstreamTimeout: 504,
    Overdue: 504,
}


@dataclass(frozen=True, slots=True)
class ErrorReply:
    """A whole error answer."""

    status: int
    body: bytes
    headers: dict[str, str] = field(default_factory=dict)


def status_of(error: BaseException) -> int:
    """HTTP status, as the client sees it."""
    if isinstance(error, Refused):
        return error.status
    return _STATUS.get(type(error)) or wire.status_of(error)  # type: ignore[arg-type]


def reply_of(error: BaseException) -> ErrorReply:
    """The answer for an error that came before the first byte."""
    if isinstance(error, Refused):
        return ErrorReply(error.status, error.body, {"content-type": error.content_type})
    headers = {"content-type": "application/json", **wire.headers_of(error)}
    return ErrorReply(status_of(error), msgspec.json.encode(wire.body_of(error)), headers)


def event_of(error: BaseException) -> bytes:
    """The server-sent event for an error that came after the first byte; it ends the stream."""
    return b"data: " + msgspec.json.encode(_event_body(error)) + b"\n\n"


def _event_body(error: BaseException) -> dict[str, Any]:
    body = wire.body_of(error)
    # Clients without the status line still need to tell a bad request from a bad gateway.
    body["error"]["status"] = status_of(error)
    return body


def code_of(error: BaseException) -> str:
    """Stable code, for records."""
    return error.code if isinstance(error, RequestError) else "internal_error"
