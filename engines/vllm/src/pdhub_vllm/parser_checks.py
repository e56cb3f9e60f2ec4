"""What is wrong with the parser's options: names that vLLM does not know, servers that are started with others."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from typing import Final

from pdhub.api import ConfigError, Finding, ParserContext, Severity
from pdhub_vllm.config import VLLMConfig
from pdhub_vllm.operate_facts import Answer, ask
from pdhub_vllm.operate_ports import ours
from pdhub_vllm.parser_config import Via, VLLMParserConfig
from pdhub_vllm.parser_derender import PATH, PROBE
from pdhub_vllm.parser_python import known_names, python_of, tokenizer_of

WHERE: Final = "model.parser"
FLAGS: Final = {"reasoning": "--reasoning-parser", "tools": "--tool-call-parser"}


def refusals(config: VLLMParserConfig, context: ParserContext) -> Sequence[Finding]:
    """See :attr:`pdhub.api.ParserSpec.refusals`."""
    return (*_machine(config, context), *_servers(config, context))


def _machine(config: VLLMParserConfig, context: ParserContext) -> Iterator[Finding]:
    if config.via is Via.DERENDER:
        return
    try:
        tokenizer_of(context)
        known = known_names(python_of(config, context.topology))
    except ConfigError as error:
        yield Finding(Severity.ERROR, error.where or WHERE, _bare(error), error.hint or "")
        return
    if known["vllm"] is None:
        fix = "set `python` of model.parser to the Python of an environment that has vllm"
        yield Finding(Severity.ERROR, WHERE, f"{known['python']} has no vllm, whose parsers are wanted", fix)
        return
    for kind, plugin in (("reasoning", config.reasoning_plugin), ("tools", config.tools_plugin)):
        name, names = getattr(config, kind), known[kind]
        if name is None or plugin is not None or names is None or name in names:
            continue
        near = difflib.get_close_matches(name, names, 1)
        fix = f"did you mean '{near[0]}'?" if near else f"there are: {', '.join(names)}"
        message = f"vLLM has no {FLAGS[kind].removeprefix('--').replace('-', ' ')} '{name}'"
        yield Finding(Severity.ERROR, f"{WHERE}.config.{kind}", message, fix)


def _servers(config: VLLMParserConfig, context: ParserContext) -> Iterator[Finding]:
    """Those that answer by themselves must mean the same by an answer as the router."""
    for node, options in ours(context.topology):
        for kind, flag in FLAGS.items():
            mine, theirs = getattr(config, kind), _value(options, flag)
            if node.role != "prefill" and node.launch and theirs != mine:
                message = f"is started with {flag} {theirs or '(none)'}, the router parses with {mine or '(none)'}"
                yield Finding(Severity.WARNING, node.name, message, "name the same, or answers differ by their pool")


def checks(config: VLLMParserConfig, context: ParserContext) -> Sequence[Finding]:
    """See :attr:`pdhub.api.ParserSpec.checks`: asks the prefill instances."""
    if config.via is Via.CHILD:
        return ()
    severity = Severity.ERROR if config.via is Via.DERENDER else Severity.INFO
    fix = "start it with `--enable-scale-out` and the parsers that model.parser names (vLLM 0.32 and later)"
    found = []
    for node, _ in ours(context.topology):
        if node.role == "prefill" and (why := _lacks(ask(node, PATH, PROBE))):
            found.append(Finding(severity, node.name, f"its derender endpoint {why}", fix))
    return found


def _lacks(answer: Answer) -> str:
    """What is wrong with an endpoint that was asked without a request; empty if nothing is."""
    if answer.status == 400 and "chat_request is required" in answer.body:
        return ""
    if answer.status == 200:
        return "is on, but without parsers"
    return "is off" if answer.status in (403, 404) else f"answers {answer.status or 'nothing'}"


def _value(options: VLLMConfig, flag: str) -> str | None:
    args = options.serve.args
    for place, word in enumerate(args):
        if word == flag and place + 1 < len(args):
            return args[place + 1]
        if word.startswith(flag + "="):
            return word.partition("=")[2]
    return None


def _bare(error: ConfigError) -> str:
    return error.message.removeprefix(f"{error.where}: ")
