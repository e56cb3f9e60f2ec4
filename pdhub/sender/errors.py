"""Refusals of a node, as exceptions."""

from __future__ import annotations

from pdhub.api.errors import (
    AdmissionRejected,
    InvalidRequest,
    LayoutMismatch,
    RequestError,
    TransferFailed,
)
from pdhub.wire.control import Refused, RefusedCode


class LandingTooSmall(RequestError):
    """The prompt needs a larger landing than was claimed; the router claims again.

    Args:
        need: tokens that the landing must hold.
    """

    code = "landing_too_small"

    def __init__(self, message: str, *, need: int) -> None:
        super().__init__(message)
        self.need = need


def refusal(message: Refused, tokens: int) -> RequestError:
    """The exception for a refusal. ``tokens``: what the join asked for, if the node did not repeat it."""
    match message.code:
        case RefusedCode.TOO_SMALL:
            return LandingTooSmall(message.message, need=message.need or tokens)
        case RefusedCode.CONTEXT:
            return InvalidRequest(message.message, code=RefusedCode.CONTEXT)
        case RefusedCode.LAYOUT:
            return LayoutMismatch(message.message)
        case RefusedCode.DRAINING:
            return AdmissionRejected(message.message, contended=False)
        case _:
            return TransferFailed(f"the node refused the hand-over: {message.message}")
