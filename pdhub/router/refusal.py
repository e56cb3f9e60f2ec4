"""Any upstream status that is not 200, as an exception."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from pdhub.api.errors import AdmissionRejected, EngineFailed, RequestError, TransferFailed, Unsupported
from pdhub.core.admission import DroppedReason
from pdhub.router.endpoint import Endpoint
from pdhub.router.errors import LandingTooSmall, Refused
from pdhub.router.relay import UpstreamReply
from pdhub.wire import errors as wire
from pdhub.wire.control import RefusedCode

log = logging.getLogger("pdhub.router.refusal")

LIMIT = 1 << 20
_HANDOFF_CODES = frozenset(
    {RefusedCode.UNKNOWN, RefusedCode.STALE, RefusedCode.PROTOCOL, RefusedCode.TRANSPORT, TransferFailed.code}
)


Reading = Callable[[int, Mapping[str, Any]], RequestError | None]
"""An engine client's own reading of a refusal: :meth:`pdhub.api.EngineClient.refused`."""


async def refusal(
    reply: UpstreamReply, endpoint: Endpoint, reading: Reading | None = None, level: int = logging.WARNING
) -> RequestError:
    """Read the answer and say what it means for the request. Raises what reading raises.

    Args:
        level: of the log line about an answer whose text the client does not see.
    """
    raw = await reply.read(LIMIT)
    document = None if reading is None else _object(raw)
    if reading is not None and document is not None and (meant := reading(reply.status, document)) is not None:
        log.info("'%s' answered %d: %r", endpoint.name, reply.status, raw[:500])
        return meant
    return classify(reply.status, raw, reply.headers, endpoint, level)


def classify(
    status: int, raw: bytes, headers: Mapping[str, str], endpoint: Endpoint, level: int = logging.WARNING
) -> RequestError:
    """The error behind a status and a body.

    A client's own mistake passes verbatim. Refused credentials are the router's, not the client's. Text of a foreign
    engine's 5xx goes to the log; a hosted node's text is ours.
    """
    document = _object(raw)
    inner = document.get("error") if document is not None else None
    inner = inner if isinstance(inner, Mapping) else {}
    code = str(inner.get("code") or "")
    if endpoint.hosted:
        if code == RefusedCode.TOO_SMALL:
            need = inner.get("need")
            return LandingTooSmall(need) if isinstance(need, int) and need > 0 else EngineFailed("no landing size told")
        if code == Unsupported.code:
            param = inner.get("param")
            message = str(inner.get("message") or f"'{endpoint.name}' cannot serve this request")
            return Unsupported(message, param=param if isinstance(param, str) else None)
        if code in _HANDOFF_CODES:
            return TransferFailed(str(inner.get("message") or "the hand-over failed"))
    if status == 429:
        return _busy(endpoint, headers)
    if 400 <= status < 500 and status not in (401, 403, 407, 499) and document is not None:
        content_type = headers.get("content-type", "application/json")
        message = str(inner.get("message") or f"'{endpoint.name}' answered {status}")
        return Refused(status, raw, content_type, code=code or "invalid_request", message=message)
    log.log(level, "'%s' answered %d: %r", endpoint.name, status, raw[:500])
    if endpoint.hosted and document is not None and status >= 500:
        return wire.from_body(status, document, headers.get("retry-after"))
    return EngineFailed(f"'{endpoint.name}' answered {status}")


def from_event(error: Mapping[str, Any], endpoint: Endpoint) -> RequestError:
    """An error that came inside a stream or under status 200."""
    status = error.get("status") or error.get("code")
    if not isinstance(status, int) or not 400 <= status < 600:
        status = 400 if error.get("type") in ("invalid_request_error", "BadRequestError") else 502
    return classify(status, msgspec.json.encode({"error": error}), {}, endpoint)


def _busy(endpoint: Endpoint, headers: Mapping[str, str]) -> AdmissionRejected:
    told = headers.get("retry-after", "")
    seconds = float(told) if told.isdigit() and len(told) < 6 else None
    reason = DroppedReason.SATURATED.value
    return AdmissionRejected(f"'{endpoint.name}' is busy", retry_after_s=seconds, reason=reason, code="busy")


def _object(raw: bytes) -> dict[str, Any] | None:
    try:
        document = msgspec.json.decode(raw)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return None
    return document if isinstance(document, dict) else None
