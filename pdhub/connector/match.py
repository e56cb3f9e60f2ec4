"""Is a request ours? It is if the router has put pdhub's own key into its ``kv_transfer_params``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from pdhub.connector.steps import Failure
from pdhub.wire.control import RefusedCode
from pdhub.wire.errors import context_length_message
from pdhub.wire.http import HANDOFF_KEY, HandoffParams


def match(kv_transfer_params: Any, tokens: int) -> HandoffParams | Failure | None:
    """None: not ours, leave it alone. A Failure: ours, but its KV cannot be handed over, and no join is needed to know.

    Args:
        tokens: exact length of the prompt.
    """
    raw = kv_transfer_params.get(HANDOFF_KEY) if isinstance(kv_transfer_params, Mapping) else None
    if raw is None:
        return None
    try:
        params = msgspec.convert(raw, HandoffParams)
    except msgspec.ValidationError as error:
        return Failure("invalid_request", f"the hand-over's parameters cannot be read: {error}")
    if params.prompt_limit and tokens > params.prompt_limit:
        output = params.context - params.prompt_limit
        return Failure(RefusedCode.CONTEXT, context_length_message(params.context, tokens, output))
    if params.capacity_tokens and tokens > params.capacity_tokens:
        message = f"the landing holds {params.capacity_tokens} tokens, the prompt has {tokens}"
        return Failure(RefusedCode.TOO_SMALL, message, tokens)
    return params
