"""vLLM's own parsers in a process of their own, for a router that does not import vllm.

Run by the Python of a vLLM: ``python parser_child.py OPTIONS``, the options as JSON. Standard library and vllm only.
One JSON document a line, orders on standard input, answers on standard output in the same order; everything else that
is printed goes to standard error. It ends when its input does.

::

    ← {"ready": {"version", "always", "member"}}        or {"failed": why}, then it ends
    → {"id": 1, "open": BODY, "continuous": false}      ← {"id": 1, "keeps_special_tokens": true}
    → {"id": 1, "prompt": [ids]}                        no answer
    → {"id": 1, "feed": [[text, [ids]], …], "ended": false}   ← {"id": 1, "content", "reasoning", "tool_calls", …}
    → {"id": 1, "whole": [[text, [ids]], …]}            ← the same, of a whole answer
    → {"id": 1, "close": true}                          no answer

An order that fails is answered with ``{"id", "error": why, "wrong": whether the request is to blame}``.

Each piece is one step of the parser, as each token is in vLLM without speculative decoding; so what comes out does not
depend on how many pieces come at once.
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
import sys
import traceback
import uuid
from pathlib import Path
from types import SimpleNamespace
from typing import Any


class Answer:
    """One answer that is being parsed."""

    def __init__(self, parser: Any, request: Any, named: bool, counts: bool, continuous: bool) -> None:
        self.parser = parser
        self.request = request
        self.named = named
        self.counts = counts
        self.continuous = continuous
        self.prompt: list[int] = []
        self.ids: list[int] = []

    def feed(self, pieces: list[Any], ended: bool) -> dict[str, Any]:
        content = reasoning = ""
        calls: list[dict[str, Any]] = []
        for place, (text, ids) in enumerate(pieces):
            self.ids += ids
            delta = self.parser.parse_delta(
                text, ids, self.request, prompt_token_ids=self.prompt, finished=ended and place == len(pieces) - 1
            )
            if delta is None:
                continue
            content += delta.content or ""
            reasoning += getattr(delta, "reasoning", None) or ""
            for call in delta.tool_calls or ():
                self._add(calls, call)
        count = self.counts and (ended or self.continuous)
        return {
            "content": content,
            "reasoning": reasoning,
            "tool_calls": calls,
            "reasoning_tokens": self.parser.count_reasoning_tokens(tuple(self.ids)) if count else None,
        }

    def whole(self, pieces: list[Any], auto: bool, new_id: Any) -> dict[str, Any]:
        text = "".join(piece[0] for piece in pieces)
        ids = [token for piece in pieces for token in piece[1]]
        if hasattr(self.parser, "set_prompt_token_ids"):
            self.parser.set_prompt_token_ids(self.prompt)
        reasoning, content, calls = self.parser.parse(
            text, self.request, enable_auto_tools=auto, model_output_token_ids=ids
        )
        choice = self.request.tool_choice
        forced = self.named or choice == "required"
        if not (forced or (choice == "auto" and auto)):
            calls = None
        if getattr(self.request, "parallel_tool_calls", None) is False:
            calls = (calls or [])[:1]
        return {
            "content": content or "" if forced else content,
            "reasoning": reasoning,
            "tool_calls": [
                {"id": getattr(call, "id", None) or new_id(), "name": call.name, "arguments": call.arguments}
                for call in calls or ()
            ],
            "reasoning_tokens": self.parser.count_reasoning_tokens(tuple(ids)) if self.counts else None,
        }

    def _add(self, calls: list[dict[str, Any]], call: Any) -> None:
        """Arguments that follow each other in one batch of pieces become one delta."""
        if getattr(self.request, "parallel_tool_calls", None) is False and call.index != 0:
            return
        function = call.function
        name = getattr(function, "name", None)
        arguments = getattr(function, "arguments", None) or ""
        last = calls[-1] if calls else None
        if last is not None and last["index"] == call.index and call.id is None and name is None:
            last["arguments"] += arguments
        else:
            calls.append({"index": call.index, "id": call.id, "name": name, "arguments": arguments})


class Desk:
    """All answers, and what they share."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._vllm = importlib.import_module("vllm.parser.abstract_parser")
        manager = importlib.import_module("vllm.parser").ParserManager
        self._defaults = options["chat_template_kwargs"]
        for kind, module, register in (
            ("tools_plugin", "vllm.tool_parsers", "ToolParserManager.import_tool_parser"),
            ("reasoning_plugin", "vllm.reasoning", "ReasoningParserManager.import_reasoning_parser"),
        ):
            if options[kind]:
                owner, method = register.split(".")
                getattr(getattr(importlib.import_module(module), owner), method)(options[kind])
        directory = Path(options["tokenizer"])
        self._tokenizer = importlib.import_module("vllm.tokenizers").get_tokenizer(
            str(directory), tokenizer_mode=options["tokenizer_mode"], trust_remote_code=options["trust_remote_code"]
        )
        self._model = _model_config(directory)
        self._auto = options["tools"] is not None
        self._reasons = options["reasoning"] is not None
        wanted = {
            "tool_parser_name": options["tools"],
            "reasoning_parser_name": options["reasoning"],
            "enable_auto_tools": self._auto,
            "model_name": options["model"],
            "is_harmony": self._model.hf_config.model_type == "gpt_oss",
            "tokenizer": self._tokenizer,
        }
        known = inspect.signature(manager.get_parser).parameters
        self._parser = manager.get_parser(**{name: value for name, value in wanted.items() if name in known})
        trial = self._parser(self._tokenizer)  # fails here rather than with the first request
        engine = bool(getattr(trial, "_engine_based", False)) or not isinstance(trial, self._vllm.DelegatingParser)
        self.facts = {"version": _version(), "always": self._reasons or engine}
        self._answers: dict[int, Answer] = {}

    def serve(self, order: dict[str, Any]) -> dict[str, Any] | None:
        """The answer to one order; None if it has none."""
        number = order["id"]
        if "open" in order:
            return self._open(number, order["open"], order["continuous"])
        if "close" in order:
            self._answers.pop(number, None)
            return None
        answer = self._answers[number]
        if "prompt" in order:
            answer.prompt = order["prompt"]
            return None
        if "whole" in order:
            return answer.whole(order["whole"], self._auto, self._new_id)
        return answer.feed(order["feed"], order["ended"])

    def _open(self, number: int, body: dict[str, Any], continuous: bool) -> dict[str, Any]:
        request = self._vllm.ChatCompletionRequest.model_validate(body)
        named = isinstance(request.tool_choice, self._vllm.ChatCompletionNamedToolChoiceParam)
        arguments = request.build_chat_params(None, "auto").with_defaults(self._defaults).chat_template_kwargs
        parser = self._made(request, arguments)
        keeps = False
        if self._reasons or request.tool_choice != "none" or getattr(self._parser, "always_adjust_request", False):
            # What it asks of sampling is the engine's business; how its text must look is ours. Of a copy: parsers
            # read in the adjusted request that the answer obeys a grammar.
            adjusted = self._made(request, arguments).adjust_request(request.model_copy(deep=True))
            keeps = request.skip_special_tokens and not adjusted.skip_special_tokens
        self._answers[number] = Answer(parser, request, named, self._reasons, continuous)
        return {"keeps_special_tokens": keeps}

    def _made(self, request: Any, arguments: dict[str, Any]) -> Any:
        return self._parser(self._tokenizer, request.tools, chat_template_kwargs=arguments, model_config=self._model)

    def _new_id(self) -> str:
        make = getattr(self._vllm, "make_tool_call_id", None)
        return str(make()) if make is not None else f"chatcmpl-tool-{uuid.uuid4().hex}"


def _model_config(directory: Path) -> Any:
    """As much of vLLM's as parsers look at."""
    try:
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        config = {}
    kind = config.get("model_type")
    architectures = config.get("architectures") or [None]
    return SimpleNamespace(
        hf_config=SimpleNamespace(model_type=kind),
        hf_text_config=SimpleNamespace(model_type=kind),
        hf_overrides={},
        architecture=architectures[0],
        model=str(directory),
    )


def _version() -> str:
    return str(getattr(importlib.import_module("vllm.version"), "__version__", "unknown"))


def _wrong(error: Exception) -> bool:
    """Whether the client's request is to blame: pydantic's refusals are ValueErrors, vLLM's have a name."""
    return isinstance(error, ValueError) or type(error).__name__ == "VLLMValidationError"


def main(options: dict[str, Any]) -> int:
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # vLLM's log goes to standard output

    def say(document: dict[str, Any]) -> None:
        out.write(json.dumps(document).encode() + b"\n")
        out.flush()

    try:
        desk = Desk(options)
    except Exception as error:  # noqa: BLE001  whatever it is, the router tells it
        traceback.print_exc()
        say({"failed": f"{type(error).__name__}: {error}"[:2000]})
        return 1
    say({"ready": desk.facts})
    for line in sys.stdin.buffer:
        order = json.loads(line)
        try:
            answer = desk.serve(order)
        except Exception as error:  # noqa: BLE001  a parser's; the other answers go on
            if not ("open" in order and _wrong(error)):
                traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"[:2000], "wrong": "open" in order and _wrong(error)}
        if answer is not None:
            say({"id": order["id"], **answer})
    return 0


if __name__ == "__main__":
    del sys.path[0]  # the directory of this file, whose modules have names that others have too
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main(json.loads(sys.argv[1])))
