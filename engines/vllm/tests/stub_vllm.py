"""Writes a package ``vllm`` that has what the parser process uses of vLLM. Its parser does as certain texts tell it;
real ones are in tests/vllm."""

from __future__ import annotations

from pathlib import Path

_ABSTRACT = """
from types import SimpleNamespace as N

class ChatCompletionNamedToolChoiceParam: ...

class ChatCompletionRequest:
    def __init__(self, body):
        self.tools = body.get("tools")
        self.tool_choice = body.get("tool_choice") or ("auto" if self.tools else "none")
        self.skip_special_tokens = body.get("skip_special_tokens", True)
        self.parallel_tool_calls = body.get("parallel_tool_calls")
        self.arguments = body.get("chat_template_kwargs") or {}
    @classmethod
    def model_validate(cls, body):
        if body.get("tool_choice") == "perhaps":
            raise ValueError("tool_choice must be something else")
        return cls(body)
    def model_copy(self, deep):
        return ChatCompletionRequest(vars(self))
    def build_chat_params(self, template, kind):
        return N(with_defaults=lambda d: N(chat_template_kwargs={**d, **self.arguments}))

class DelegatingParser:
    _engine_based = False
    def __init__(self, tokenizer, tools=None, chat_template_kwargs=None, model_config=None):
        self.text, self.sent, self.open, self.arguments = "", 0, False, chat_template_kwargs
    def adjust_request(self, request):
        request.skip_special_tokens = not request.tools
        return request
    def set_prompt_token_ids(self, ids):
        self.open = 99 in ids
    def count_reasoning_tokens(self, ids):
        return len(ids)
    def parse_delta(self, text, ids, request, prompt_token_ids=None, *, finished):
        if text == "die":
            import os; os._exit(3)
        if text == "hang":
            import time; time.sleep(60)
        if text == "raise":
            raise RuntimeError("it broke")
        if text == "":
            return None
        if text == "args":
            more = N(index=0, id=None, function=N(name=None, arguments="{}"))
            return N(content=None, reasoning=None, tool_calls=[more])
        if text == "call":
            calls = [N(index=i, id=f"id-{i}", function=N(name="f", arguments="")) for i in (0, 1)]
            return N(content=None, reasoning=None, tool_calls=calls)
        return N(content=text, reasoning=f"<{prompt_token_ids}{self.arguments}>" if finished else None, tool_calls=[])
    def parse(self, text, request, enable_auto_tools, model_output_token_ids):
        calls = [N(id=None, name="f", arguments="{}")] * text.count("call")
        return ("open" if self.open else None), text.replace("call", ""), calls

def make_tool_call_id():
    return "made"
"""

_MANAGER = """
from vllm.parser.abstract_parser import DelegatingParser
class ParserManager:
    @classmethod
    def get_parser(cls, tool_parser_name=None, reasoning_parser_name=None, enable_auto_tools=False, model_name=None,
                   is_harmony=False):
        print("noise on standard output")
        if reasoning_parser_name == "broken":
            raise TypeError("its tokenizer does not fit")
        return DelegatingParser
"""


def write(site: Path) -> None:
    """Into a directory for ``PYTHONPATH``."""
    files = {
        "__init__.py": "",
        "version.py": "__version__ = '0.99'",
        "parser/__init__.py": _MANAGER,
        "parser/abstract_parser.py": _ABSTRACT,
        "tokenizers/__init__.py": "def get_tokenizer(path, **options): return path",
        "reasoning/__init__.py": "_REASONING_PARSERS_TO_REGISTER = {'deepseek_r1': ('a', 'B'), 'qwen3': ('c', 'D')}",
        "tool_parsers/__init__.py": "_TOOL_PARSERS_TO_REGISTER = {'hermes': ('a', 'B')}",
    }
    for name, text in files.items():
        place = site / "vllm" / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)
