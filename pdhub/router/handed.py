"""What a prefill instance tells of pdhub's own hand-over: before it, which layout it writes; after it, how it went."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pdhub.api.errors import InvalidRequest, LayoutMismatch, RequestError, TransferFailed
from pdhub.router.errors import LandingTooSmall
from pdhub.wire.control import RefusedCode
from pdhub.wire.http import HANDOFF_KEY


def told_by(info: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a probe's answer that has the members of ``PrefillInfoReply``. An embedded instance answers with
    nothing else; of a vLLM server its client asks the connector too."""
    nested = info.get(HANDOFF_KEY)
    return nested if isinstance(nested, Mapping) else info


def check_handed(body: Mapping[str, Any], chat: bool) -> None:
    """Raise why the KV is not handed over, where the instance's connector says so in an answer of status 200.

    Args:
        chat: the client wrote the prompt as ``messages``, not as ``prompt``.
    """
    params = body.get("kv_transfer_params")
    told = params.get(HANDOFF_KEY) if isinstance(params, Mapping) else None
    error = told.get("error") if isinstance(told, Mapping) else None
    if isinstance(error, Mapping):
        raise _meaning(str(error.get("code")), str(error.get("message")), error.get("need"), chat)


def _meaning(code: str, message: str, need: Any, chat: bool) -> RequestError:
    if code == RefusedCode.TOO_SMALL and isinstance(need, int) and need > 0:
        return LandingTooSmall(need)
    if code == RefusedCode.CONTEXT:
        return InvalidRequest(message, param="messages" if chat else "prompt", code=RefusedCode.CONTEXT)
    if code == RefusedCode.LAYOUT:
        return LayoutMismatch(message)
    return TransferFailed(message)
