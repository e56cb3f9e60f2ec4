"""The configured parser of reasoning and tool calls, as router and command line need it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pdhub.api.errors import ConfigError
from pdhub.api.operate import Finding, Severity
from pdhub.api.parser import ParserContext
from pdhub.api.request import Feature
from pdhub.config.build import Plan
from pdhub.config.topology import topology


def parser_context(plan: Plan, changed: Callable[[], None] = lambda: None, *, secrets: bool = False) -> ParserContext:
    """What the plugin is given. ``secrets``: with API keys, for checks that make calls."""
    model = plan.config.model
    return ParserContext(model.name, model.tokenizer or model.path, topology(plan, secrets=secrets), changed)


def parser_features(plan: Plan) -> frozenset[Feature]:
    """What pools that speak tokens can do because of the parser."""
    return frozenset() if plan.parser is None else plan.parser.spec.declares(plan.parser.config)


def splits_reasoning(plan: Plan) -> bool:
    """Whether every chat answer begins with reasoning that has to be split off."""
    told = plan.config.model.reasoning
    return Feature.REASONING in parser_features(plan) if told is None else told


def parser_findings(plan: Plan) -> Sequence[Finding]:
    """All that the plugin finds wrong, the live nodes included. Blocking. Raises ConfigError for a key that is not
    set."""
    if plan.parser is None:
        return ()
    spec, context = plan.parser.spec, parser_context(plan, secrets=True)
    asked = [find for find in (spec.refusals, spec.checks) if find is not None]
    return [finding for find in asked for finding in find(plan.parser.config, context)]


def refuse_parser(plan: Plan) -> Sequence[Finding]:
    """What is wrong with the parser's options on this machine, but nothing that ends a start. Blocking.

    Raises:
        ConfigError: for the first error.
    """
    if plan.parser is None or plan.parser.spec.refusals is None:
        return ()
    findings = plan.parser.spec.refusals(plan.parser.config, parser_context(plan))
    for finding in findings:
        if finding.severity is Severity.ERROR:
            raise ConfigError(finding.message, where=finding.where, hint=finding.fix or None)
    return findings
