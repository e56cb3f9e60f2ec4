"""Members of an OpenAI body that the embedded prefill instance takes. Whatever no table names is a 400: a member
that cannot be honoured is never ignored."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

READ: Final = frozenset(
    {
        "model", "max_tokens", "max_completion_tokens", "kv_transfer_params", "logprobs", "top_logprobs",
        "stop_token_ids", "min_tokens", "ignore_eos", "return_token_ids", "return_tokens_as_token_ids",
        "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
        "seed", "logit_bias", "tool_choice", "function_call",
    }
)  # fmt: skip
"""Read by the host."""

CHAT: Final = frozenset(
    {
        "messages", "tools", "functions", "chat_template_kwargs", "add_generation_prompt", "continue_final_message",
        "documents", "chat_template",
    }
)  # fmt: skip
"""Rendered by the engine's ``tokenize``, or refused there."""

COMPLETIONS: Final = frozenset({"prompt"})
"""Tokenised by the engine."""

INERT: Final = frozenset(
    {
        "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "request_id", "priority",
        "cache_salt", "extra_args", "parallel_tool_calls", "skip_special_tokens", "spaces_between_special_tokens",
        "include_reasoning",
    }
)  # fmt: skip
"""Change neither the prompt nor the first token: taken with any value."""

NEUTRAL: Final[Mapping[str, tuple[Any, ...]]] = MappingProxyType(
    {
        "stream": (False,),
        "n": (1,),
        "best_of": (1,),
        "echo": (False,),
        "use_beam_search": (False,),
        "suffix": ("",),
        "stop": ([], ""),
        "include_stop_str_in_output": (False,),
        "detokenize": (True,),
        "bad_words": ([],),
        "length_penalty": (1, 1.0),
        "early_stopping": (False,),
        "response_format": ({"type": "text"},),
    }
)
"""Taken only with a value that changes nothing (or null)."""
