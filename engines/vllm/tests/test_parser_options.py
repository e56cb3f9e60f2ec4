"""What `pdhub check` and `pdhub doctor` say of the parser's options."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pdhub_vllm.parser_checks as checks
import pytest
import stub_vllm
from pdhub_vllm.config import VLLMConfig
from pdhub_vllm.operate_facts import Answer
from pdhub_vllm.parser_config import VLLMParserConfig, declared
from pdhub_vllm.parser_python import known_names, python_of, tokenizer_of
from pydantic import ValidationError

from pdhub.api import ConfigError, Feature, NodeSpec, ParserContext, Severity, Topology


@pytest.fixture
def context(tmp_path, monkeypatch):
    stub_vllm.write(tmp_path / "site")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    (tmp_path / "tokenizer_config.json").write_text("{}")
    return ParserContext("m", str(tmp_path), Topology("m", None, (), "shm"))


def config(**options):
    return VLLMParserConfig(**{"python": sys.executable, **options})


def node(name, role="decode", args=(), command=("vllm", "serve")):
    options = VLLMConfig.model_validate({"serve": {"args": list(args), "command": list(command)}})
    return NodeSpec(name, role, None if role == "prefill" else "p", "http://x", "vllm", options.model_dump())


def topology(*nodes):
    return Topology("m", None, nodes, "shm")


def test_known_names_pass(context):
    assert checks.refusals(config(reasoning="qwen3", tools="hermes"), context) == ()


@pytest.mark.parametrize(
    ("options", "where", "fix"),
    [
        ({"reasoning": "qwen"}, "model.parser.config.reasoning", "did you mean 'qwen3'?"),
        ({"tools": "hermse"}, "model.parser.config.tools", "did you mean 'hermes'?"),
        ({"tools": "zzz"}, "model.parser.config.tools", "there are: hermes"),
    ],
)
def test_unknown_names_are_errors_that_suggest(context, options, where, fix):
    (found,) = checks.refusals(config(**options), context)
    assert (found.severity, found.where, found.fix) == (Severity.ERROR, where, fix)


def test_a_plugin_may_bring_any_name(context):
    assert checks.refusals(config(tools="mine", tools_plugin="/plugins/mine.py"), context) == ()


def test_a_python_without_vllm_and_none_at_all(context, tmp_path):
    for python in (str(tmp_path / "nothing"), "/bin/false"):
        (found,) = checks.refusals(config(tools="hermes", python=python), context)
        assert (found.severity, found.where) == (Severity.ERROR, "model.parser")
    (tmp_path / "site" / "vllm" / "__init__.py").unlink()
    (tmp_path / "site" / "vllm").rename(tmp_path / "site" / "other")
    (found,) = checks.refusals(config(tools="hermes"), context)
    assert "has no vllm" in found.message


def test_the_tokenizers_directory_is_wanted(context, tmp_path):
    assert tokenizer_of(ParserContext("m", str(tmp_path / "tokenizer.json"), context.topology)) == str(tmp_path)
    for missing in (None, str(tmp_path / "site")):
        with pytest.raises(ConfigError, match="tokenizer"):
            tokenizer_of(ParserContext("m", missing, context.topology))


def test_the_python_is_that_of_the_servers(tmp_path):
    (tmp_path / "bin").mkdir()
    for name in ("vllm", "python"):
        (tmp_path / "bin" / name).touch()
    command = (str(tmp_path / "bin" / "vllm"), "serve")
    assert python_of(VLLMParserConfig(tools="x"), topology(node("a", command=command))) == str(tmp_path / "bin/python")
    assert python_of(VLLMParserConfig(tools="x"), topology(node("a", command=("no-such-command",)))) == sys.executable
    assert python_of(VLLMParserConfig(tools="x", python="/my/python"), topology()) == "/my/python"


def test_servers_that_are_started_with_other_parsers_are_named(context):
    nodes = topology(node("a", args=["--tool-call-parser=xlam"]), node("b", args=["--tool-call-parser", "hermes"]))
    found = checks.refusals(config(tools="hermes"), ParserContext("m", context.tokenizer, nodes))
    assert [(f.severity, f.where) for f in found] == [(Severity.WARNING, "a")]
    assert "xlam" in found[0].message


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (Answer(400, '{"error": {"message": "chat_request is required when"}}'), None),
        (Answer(403, ""), "is off"),
        (Answer(200, "{}"), "without parsers"),
        (Answer(0, "refused"), "answers nothing"),
    ],
)
def test_the_endpoint_of_prefill_instances_is_asked(context, monkeypatch, answer, says):
    monkeypatch.setattr(checks, "ask", lambda *_: answer)
    asked = ParserContext("m", None, topology(node("p", "prefill"), node("d")))
    found = checks.checks(config(tools="hermes", via="derender"), asked)
    assert [(f.severity, f.where) for f in found] == ([(Severity.ERROR, "p")] if says else [])
    assert says is None or says in found[0].message
    assert checks.checks(config(tools="hermes", via="child"), asked) == ()


def test_one_name_at_least_and_what_it_gives():
    with pytest.raises(ValidationError, match="name `reasoning`, `tools` or both"):
        VLLMParserConfig()
    assert declared(VLLMParserConfig(tools="x")) == {Feature.TOOLS}
    assert declared(VLLMParserConfig(tools="x", reasoning="y")) == {Feature.TOOLS, Feature.REASONING}


def test_names_are_read_without_importing_anything(context, tmp_path):
    (tmp_path / "site" / "vllm" / "__init__.py").write_text("raise SystemExit('imported')")
    assert known_names(sys.executable)["tools"] == ["hermes"]
    (tmp_path / "site" / "vllm" / "tool_parsers" / "__init__.py").write_text("names = 3")
    assert known_names(sys.executable)["tools"] is None, "another vLLM keeps them elsewhere: nothing is refused"
    script = Path(checks.__file__).with_name("parser_names.py")
    subprocess.run([sys.executable, "-I", str(script)], check=True, capture_output=True)
