"""``pdhub doctor``: what every plugin finds wrong with a deployment."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as Late
from functools import partial

from pdhub.api import Finding, Operate, Severity, Topology
from pdhub.config.build import Plan
from pdhub.config.parsing import parser_findings
from pdhub.config.topology import operate_of, topology

log = logging.getLogger("pdhub.operate.doctor")

WITHIN_S = 60.0
"""For the checks of one set of options; they ask live nodes, and a node may be silent."""

_WORST_FIRST = (Severity.ERROR, Severity.WARNING, Severity.INFO)


def examine(plan: Plan, within_s: float = WITHIN_S) -> list[Finding]:
    """Run all checks, those of different engines at the same time.

    Args:
        within_s: for each engine's; what takes longer is a finding itself.

    Returns:
        Every finding once, the worst first.

    Raises:
        ConfigError: an API key that a check may need is not set.
    """
    whole = topology(plan, secrets=True)
    found: dict[Finding, None] = {}
    asked = [(where, _start(partial(operate.checks, whole))) for where, operate in _engines(plan, whole)]
    asked.append(("model.parser", _start(partial(parser_findings, plan))))
    for where, answer in asked:
        found.update(dict.fromkeys(_result(where, answer, within_s)))
    return sorted(found, key=lambda finding: _WORST_FIRST.index(finding.severity))


def failed(findings: Sequence[Finding]) -> bool:
    """Whether any of them is an error."""
    return any(finding.severity is Severity.ERROR for finding in findings)


def _engines(plan: Plan, whole: Topology) -> Iterator[tuple[str, Operate]]:
    """Each distinct set of options once, with the name of what it was found at."""
    seen = []
    for node in whole.nodes:
        key = (node.engine, node.config)
        if key in seen:
            continue
        seen.append(key)
        if (operate := operate_of(plan, node)) is not None:
            yield node.pool or node.name, operate


def _start(checks: Callable[[], Sequence[Finding]]) -> Future[Sequence[Finding]]:
    """In a daemon thread, unlike an executor's: one that never ends must not keep the process."""
    answer: Future[Sequence[Finding]] = Future()

    def work() -> None:
        try:
            answer.set_result(checks())
        except BaseException as error:  # noqa: BLE001  it is raised where the answer is read
            answer.set_exception(error)

    threading.Thread(target=work, name="doctor", daemon=True).start()
    return answer


def _result(where: str, answer: Future[Sequence[Finding]], within_s: float) -> Sequence[Finding]:
    try:
        return answer.result(within_s)
    except Late:
        return (Finding(Severity.ERROR, where, f"its checks took longer than {within_s:g} s"),)
    except Exception as error:  # a plugin's; the other plugins' findings still count
        log.exception("the checks of '%s' failed", where)
        fix = "this is a fault of the engine's plugin"
        return (Finding(Severity.ERROR, where, f"its checks failed: {type(error).__name__}: {error}", fix),)
