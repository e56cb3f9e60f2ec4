"""What happens to each member of an OpenAI body on the prefill leg. The decode leg changes none.

The prefill leg must render the same prompt, sample the first token by the same rule and stop there. So: whatever
asks for more than one token, for a stream or for a validated answer goes; whatever shapes the prompt or the first
token's distribution stays. Members that no table names, known or not, stay untouched.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

PREFILL_SET: Final[Mapping[str, Any]] = MappingProxyType({"max_tokens": 1, "stream": False})
"""Set whether or not the client sent them."""

PREFILL_CAP: Final[Mapping[str, Any]] = MappingProxyType({"max_completion_tokens": 1})
"""Set only where the client sent them, null included: another name of the limit, and the one that wins."""

PREFILL_DROP: Final[Mapping[str, str]] = MappingProxyType(
    {
        "stream_options": "an error without stream; the prefill would fail and no KV would move",
        "min_tokens": "more than the limit of one is an error; whoever seeds the first token sends it by itself",
        "stop": "needs text that one token does not give; it would only keep KV from being handed over",
        "stop_token_ids": "a first token that stops keeps some connectors from handing over; decode checks it",
        "include_stop_str_in_output": "an error or nothing without stop",
        "n": "the prompt is computed once; decode makes the choices",
        "best_of": "as n",
        "use_beam_search": "beams would be computed to be thrown away, and several KV sequences cannot be handed over",
        "echo": "would send the prompt back, with logprobs compute it twice; decode answers it",
    }
)
"""Removed, and why."""

PREFILL_KEEP: Final[Mapping[str, str]] = MappingProxyType(
    {
        "messages": "the prompt",
        "prompt": "the prompt",
        "suffix": "part of the prompt where it is supported; refused by the engine where it is not",
        "tools": "the chat template renders them",
        "chat_template_kwargs": "the chat template reads them",
        "temperature": "the first token's distribution",
        "top_p": "the first token's distribution",
        "seed": "the first token's distribution",
        "logit_bias": "the first token's distribution",
        "presence_penalty": "the first token's distribution",
        "frequency_penalty": "the first token's distribution",
        "bad_words": "the first token's distribution",
        "response_format": "the first token must obey the grammar: decode may be seeded with it",
        "structured_outputs": "as response_format",
        "guided_json": "as response_format",
        "guided_regex": "as response_format",
        "guided_choice": "as response_format",
        "guided_grammar": "as response_format",
        "logprobs": "the first token's log probability is known here only",
        "top_logprobs": "as logprobs",
        "prompt_logprobs": "the prompt's log probabilities are known here only",
        "ignore_eos": "says nothing about one token",
        "parallel_tool_calls": "says nothing about one token",
        "truncate_prompt_tokens": "the prompt",
        "add_generation_prompt": "the prompt",
        "continue_final_message": "the prompt",
        "documents": "the chat template reads them",
        "reasoning_effort": "the chat template may read it",
        "cache_salt": "which cached blocks may be used; both legs must name the same",
        "priority": "who is computed first, on either leg",
        "service_tier": "as priority, for engines that know it",
        "user": "for the engine's records",
    }
)
"""Decided to stay, and why: the members for which the choice is not obvious, or wrong elsewhere."""

UNFORCED: Final = "auto"
"""In place of a forced tool choice. Not ``none``: servers may leave the tools out of the prompt then, and a
prompt that differs between the legs is a wrong answer. An engine whose prefill refuses ``auto`` sets its own."""


def unforced_choice(parsed: Mapping[str, Any]) -> dict[str, Any]:
    """Members to set so that no tool call is forced: a call of one token is half-made, and some servers validate it.

    ``tools`` (and ``functions``, its former name) stay. Without any the choice stays too, so that the engine's own
    refusal reaches the client.
    """
    out: dict[str, Any] = {}
    for choice, offer in (("tool_choice", "tools"), ("function_call", "functions")):
        if parsed.get(offer) and parsed.get(choice) not in (None, "none", "auto"):
            out[choice] = UNFORCED
    return out
