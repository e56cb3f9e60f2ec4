"""OpenAI bodies to token ids, as vLLM renders them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from pdhub.api import ConfigError, InvalidRequest


class PromptRenderer:
    """The model's tokenizer and chat template.

    Args:
        directory: the model's. vocabulary: ids below it are valid prompts.
    """

    def __init__(self, directory: Path, vocabulary: int) -> None:
        from transformers import AutoTokenizer

        try:
            self._tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
        except (OSError, ValueError) as error:
            raise ConfigError(f"cannot load the tokenizer at {directory}: {error}", where="model.path") from error
        self._vocabulary = vocabulary

    def tokenize(self, body: Mapping[str, Any]) -> tuple[int, ...]:
        """Token ids of ``messages`` or ``prompt``. Raises InvalidRequest naming the member at fault."""
        ids = self._chat(body) if "messages" in body else self._plain(body.get("prompt"))
        if not ids:
            raise InvalidRequest("the prompt is empty", param="messages" if "messages" in body else "prompt")
        return tuple(ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text without special tokens."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def _plain(self, prompt: Any) -> list[int]:
        if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], (str, list)):
            prompt = prompt[0]
        if isinstance(prompt, str):
            return self._encode(prompt, special=True)
        if not isinstance(prompt, list) or not all(type(token) is int for token in prompt):
            raise InvalidRequest("prompt must be one string or one list of token ids", param="prompt")
        if not all(0 <= token < self._vocabulary for token in prompt):
            raise InvalidRequest("a token id is outside the vocabulary", param="prompt")
        return prompt

    def _chat(self, body: Mapping[str, Any]) -> list[int]:
        messages, tools = body["messages"], body.get("tools")
        extra = body.get("chat_template_kwargs") or {}
        if not isinstance(messages, list) or not messages:
            raise InvalidRequest("messages must be a non-empty list", param="messages")
        if tools is not None and not isinstance(tools, list):
            raise InvalidRequest("tools must be a list", param="tools")
        if not isinstance(extra, Mapping):
            raise InvalidRequest("chat_template_kwargs must be an object", param="chat_template_kwargs")
        resume = bool(body.get("continue_final_message", False))
        options: dict[str, Any] = {
            "tools": tools or None,
            "documents": body.get("documents"),
            "add_generation_prompt": bool(body.get("add_generation_prompt", not resume)),
            "continue_final_message": resume,
        }
        if body.get("chat_template"):
            # a template is a program: only the model's own runs here
            raise InvalidRequest("chat_template in a request is not supported", param="chat_template")
        options.update((key, value) for key, value in extra.items() if key not in ("tokenize", "chat_template"))
        try:
            text = self._tokenizer.apply_chat_template(
                [_message(message) for message in messages], tokenize=False, **options
            )
        except (TemplateError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise InvalidRequest(f"the messages cannot be rendered: {error}", param="messages") from error
        return self._encode(text, special=False)

    def _encode(self, text: str, *, special: bool) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=special)["input_ids"])


def _message(message: Any) -> dict[str, Any]:
    """One message as templates expect it: text parts joined, arguments of tool calls parsed."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise InvalidRequest("each message needs a role", param="messages")
    out = dict(message)
    content = out.get("content")
    if isinstance(content, list):
        out["content"] = "\n".join(_text(part) for part in content)
    elif content is None:
        out["content"] = ""
    elif not isinstance(content, str):
        raise InvalidRequest("content must be text or a list of parts", param="messages")
    calls = out.get("tool_calls")
    if isinstance(calls, list):
        out["tool_calls"] = [_call(call) for call in calls]
    return out


def _text(part: Any) -> str:
    if isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    raise InvalidRequest("only text parts are supported in content", param="messages")


def _call(call: Any) -> Any:
    """Clients send arguments as JSON text, templates print an object."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except json.JSONDecodeError as error:
        raise InvalidRequest("arguments of a tool call are not JSON", param="messages") from error
    return {**call, "function": {**function, "arguments": arguments}}
