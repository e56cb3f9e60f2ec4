"""OpenAI bodies to token ids."""

from __future__ import annotations

import pytest
from pdhub_transformers.prompt import PromptRenderer

from pdhub.api import ConfigError, InvalidRequest

HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def renderer(llama_dir):
    return PromptRenderer(llama_dir, 320)


def text(renderer, body):
    return renderer.decode(renderer.tokenize(body))


def test_messages_go_through_the_template(renderer):
    assert text(renderer, {"messages": HELLO}) == "<user>hello\n<assistant>"
    assert text(renderer, {"messages": HELLO, "add_generation_prompt": False}) == "<user>hello\n"


def test_tools_and_template_options_reach_the_template(renderer):
    body = {"messages": HELLO, "tools": [{"type": "function"}], "chat_template_kwargs": {"shout": True}}
    assert text(renderer, body) == "<user>hello\ntools:1\n!<assistant>"


def test_parts_are_joined_and_arguments_parsed(renderer):
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    call = {"function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    messages = [{"role": "user", "content": parts}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    assert text(renderer, {"messages": messages}) == "<user>a\nb\n<assistant>Rome\n<assistant>"


@pytest.mark.parametrize("prompt", ["héllo 😀 1234", ["héllo 😀 1234"]])
def test_text_prompts_round_trip(renderer, prompt):
    assert text(renderer, {"prompt": prompt}) == "héllo 😀 1234"


def test_ids_are_taken_as_they_are(renderer):
    assert renderer.tokenize({"prompt": [5, 6, 7]}) == (5, 6, 7)
    assert renderer.tokenize({"prompt": [[5, 6]]}) == (5, 6)


@pytest.mark.parametrize(
    "body",
    [
        {}, {"prompt": ""}, {"prompt": []}, {"prompt": ["a", "b"]}, {"prompt": [1, True]}, {"prompt": [320]},
        {"prompt": [-1]}, {"prompt": 5}, {"messages": []}, {"messages": "hi"}, {"messages": [{"content": "x"}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        {"messages": [{"role": "user", "content": 5}]}, {"messages": HELLO, "tools": {}},
        {"messages": HELLO, "chat_template_kwargs": 5}, {"messages": HELLO, "chat_template": "{{ 1 }}"},
        {"messages": [{"role": "a", "content": "", "tool_calls": [{"function": {"arguments": "{"}}]}]},
        {"messages": [{"role": "a", "content": "", "tool_calls": [5]}]},
    ],
    ids=str,
)  # fmt: skip
def test_what_cannot_be_rendered_is_refused(renderer, body):
    with pytest.raises(InvalidRequest):
        renderer.tokenize(body)


def test_a_missing_tokenizer_is_a_config_error(tmp_path):
    with pytest.raises(ConfigError, match="tokenizer"):
        PromptRenderer(tmp_path, 10)
