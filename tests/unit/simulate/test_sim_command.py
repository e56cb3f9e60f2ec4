"""``pdhub simulate`` from its words to its outputs."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path

import pytest

from pdhub.api.errors import ConfigError
from pdhub.simulate.command import Options, mix_of, run, with_policy
from pdhub.simulate.cost import parse_costs

CONFIG = Path(__file__).parents[3] / "configs" / "quickstart.yaml"
TRACE = "synthetic:requests=60,rate=2,prompt=200,output=30"


class Page(HTMLParser):
    """Every tag closed, nothing loaded from anywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.add(tag)
        assert not {"src", "href"} & {name for name, _ in attrs}
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_table_json_and_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "report.html"
    other = tmp_path / "rr.yaml"
    other.write_text("policy: {type: round_robin}\n")
    options = Options(CONFIG, TRACE, policies=[other], baselines=True, oracle=True, out=out, json=True, seeds=2)
    assert run(options) == 0
    shown = json.loads(capsys.readouterr().out)
    names = [p["policy"] for p in shown["policies"]]
    assert names[:2] == ["quickstart", "rr"]
    assert names[-1] == "oracle"
    assert len(shown["runs"]) == 2 * len(names)
    page = Page()
    page.feed(out.read_text())
    page.close()
    assert not page.open
    assert {"svg", "table", "polyline", "rect"} <= page.seen
    assert "script" not in page.seen

    assert run(Options(CONFIG, TRACE)) == 0
    assert "good/s" in capsys.readouterr().out


def test_a_policy_file_may_be_a_section_or_a_whole_configuration(tmp_path: Path) -> None:
    from pdhub.config.build import load_plan

    plan = load_plan(CONFIG)
    section = tmp_path / "a.yaml"
    section.write_text("type: power_of_two\n")
    assert with_policy(plan, section).policy.spec.name == "power_of_two"
    assert with_policy(plan, CONFIG).policy.spec.name == plan.policy.spec.name
    section.write_text("type: nothing_such\n")
    with pytest.raises(Exception, match="nothing_such"):
        with_policy(plan, section)


def test_words_are_checked() -> None:
    from pdhub.config.build import load_plan

    config = load_plan(CONFIG).config
    assert [c.share for c in mix_of(config, ["mlperf/llama2-70b-server=3", "none"]).classes] == [3.0, 1.0]
    for options in (
        Options(CONFIG, TRACE, mix=["gold=1"]),
        Options(CONFIG, TRACE, mix=["none=-1"]),
        Options(CONFIG, TRACE, rate="fast"),
        Options(CONFIG, TRACE, truth="spread=a lot"),
        Options(CONFIG, TRACE, truth="speed=1"),
        Options(CONFIG, "no-such-file.jsonl"),
    ):
        with pytest.raises(ConfigError):
            run(options)


@pytest.mark.parametrize(
    "costs",
    [
        {"pools": {"fast": {"model": "no-such"}}},
        {"pools": {"fast": {"model": "prefill-glm5"}}},
        {"pools": {"fast": {"model": "tilert-glm5", "slots": 0}}},
        {"pools": {"fast": {"tpot_ms": {}}}},
        {"prefill": {"model": "vllm-glm5"}},
    ],
)
def test_costs_are_checked(costs: dict[str, object]) -> None:
    found = parse_costs(costs)
    with pytest.raises(ConfigError):
        _ = found.pool("fast"), found.prefill_cost()


def test_a_pool_may_differ_from_its_model() -> None:
    found = parse_costs({"pools": {"fast": {"model": "tilert-glm5-mtp", "slots": 2}}}).pool("fast")
    assert found is not None
    assert found.slots == 2
    assert found.places == 3


@pytest.mark.parametrize("name", ["nowhere/page.html", "."])
def test_where_the_page_goes_is_looked_at_first(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="--out"):
        run(Options(CONFIG, "synthetic:requests=5", out=tmp_path / name))
