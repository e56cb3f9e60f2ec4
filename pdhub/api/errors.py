"""The errors of pdhub, one tree.

::

    PDHubError
    ├── ConfigError              start-up: the configuration is wrong
    ├── PluginError              start-up: a plugin is missing, broken or breaks its contract
    └── RequestError             one request failed; carries an OpenAI-shaped body
        ├── InvalidRequest       400  the client must change the request
        │   ├── ModelNotFound    404  no pool serves this model
    │   └── Unsupported      400  this engine cannot serve it; the host tries another pool first
        ├── AdmissionRejected    429 contended, 503 nobody there; may carry Retry-After
        ├── RequestCancelled     499  the client left, or somebody cancelled
        ├── LayoutMismatch       502  prefill and node disagree on the KV layout
        ├── TransferFailed       502  KV did not arrive, or arrived damaged
        ├── EngineFailed         502  an engine or an instance failed or went away
        │   └── ParserFailed     502  the parser of reasoning and tool calls failed or went away
        └── LeaseExpired         504  the hand-over took longer than its lease

Plugins raise these; they never return error values and never yield them in a stream. The HTTP status
of each lives in one place (:mod:`pdhub.wire.errors`), because the router and the node share it.
"""

from __future__ import annotations


class PDHubError(Exception):
    """Root of every error that pdhub raises on purpose.

    Args:
        message: one sentence for a person. For a start-up error it says where, what and what to do.
        hint: what to do about it, shown on a line of its own.
    """

    code = "internal_error"

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\n  hint: {self.hint}" if self.hint else self.message


class ConfigError(PDHubError):
    """The configuration is wrong. Raised before anything is provisioned.

    Args:
        where: the path of the value, such as ``pools[0].engine.config.slots``.
    """

    code = "config_error"

    def __init__(self, message: str, *, where: str | None = None, hint: str | None = None) -> None:
        super().__init__(f"{where}: {message}" if where else message, hint=hint)
        self.where = where


class PluginError(PDHubError):
    """A plugin is missing, broken, incompatible, or broke its contract."""

    code = "plugin_error"


class RequestError(PDHubError):
    """One request failed.

    Args:
        message: shown to the client. Never an engine's traceback or an internal address.
        param: the request member at fault, if one is.
        code: overrides the class's stable code.
    """

    code = "request_failed"

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        hint: str | None = None,
    ) -> None:
        super().__init__(message, hint=hint)
        self.param = param
        if code is not None:
            self.code = code


class InvalidRequest(RequestError):
    """The request itself is wrong; retrying it anywhere gives the same answer."""

    code = "invalid_request"


class ModelNotFound(InvalidRequest):
    """No pool serves the model that the request names."""

    code = "model_not_found"


class Unsupported(InvalidRequest):
    """The engine cannot honour something that the request asks for, and no capability has a name for it. The host goes
    on to another pool; the client hears of it only if no pool can."""

    code = "unsupported"


class AdmissionRejected(RequestError):
    """The request may not enter now.

    Args:
        contended: True if capacity exists but is taken (429), False if nobody is there (503).
        retry_after_s: predicted seconds until a retry may succeed; None if unknown.
        reason: value of ``x-llm-d-request-dropped-reason``.
    """

    code = "admission_rejected"

    def __init__(
        self,
        message: str,
        *,
        contended: bool = True,
        retry_after_s: float | None = None,
        reason: str | None = None,
        code: str | None = None,
    ) -> None:
        super().__init__(message, code=code)
        self.contended = contended
        self.retry_after_s = retry_after_s
        self.reason = reason


class RequestCancelled(RequestError):
    """The client went away or the request was cancelled; nobody reads the answer."""

    code = "request_cancelled"


class LayoutMismatch(RequestError):
    """Prefill and node disagree on the KV layout. Raised before any prefill is spent."""

    code = "layout_mismatch"


class TransferFailed(RequestError):
    """KV could not be moved, or what arrived is not what was sent."""

    code = "transfer_failed"


class EngineFailed(RequestError):
    """An engine, node or instance failed, died or stopped answering."""

    code = "engine_failed"


class ParserFailed(EngineFailed):
    """The answer could not be parsed into reasoning, content and tool calls; what was computed of it is lost."""

    code = "parser_failed"


class LeaseExpired(RequestError):
    """The hand-over did not finish within its lease."""

    code = "lease_expired"
