"""The page about reading keeps its word: its files are valid, its names are the code's."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pdhub.config.build import build_plan, parse_config
from pdhub.config.load import parse
from pdhub.core import slo
from pdhub.core.slo_classes import PRESETS
from pdhub.registry import load
from pdhub.testing import toy
from pdhub.testing.hub import toy_topology

PAGE = (Path(__file__).parents[3] / "docs" / "slo.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)


@pytest.mark.parametrize("number", range(2))
def test_every_example_is_a_valid_policy(number: int) -> None:
    data, _ = parse(EXAMPLES[number], "docs/slo.md")
    plan = build_plan(parse_config({**toy_topology(), **data}), load(extra=[toy]))
    assert plan.classes.classes


def test_every_name_is_on_the_page() -> None:
    assert len(EXAMPLES) == 2
    headers = [*slo.TTFT[:2], *slo.TPOT[:2], slo.CLASS, *slo.OBJECTIVE, *slo.FAIRNESS, slo.SMG, *slo.SESSION]
    for name in [*headers, *slo.KEY_HEADERS, slo.TTFT[2], slo.TPOT[2], *slo.SMG_PRIORITY]:
        assert f"`{name}`" in PAGE or f".{name}`" in PAGE, name
    for preset in PRESETS:
        model = preset.removeprefix("mlperf/").rsplit("-", 1)[0]
        assert model in PAGE
