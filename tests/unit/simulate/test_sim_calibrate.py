"""What was simulated with known costs comes out again as those costs."""

from __future__ import annotations

import dataclasses
import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from pdhub.api.errors import ConfigError
from pdhub.simulate import lab
from pdhub.simulate.calibrate import document, fit_decode, fit_prefill, read_records, watch
from pdhub.simulate.cost import parse_costs
from pdhub.simulate.lab import World, of_plan, simulate
from pdhub.simulate.result import Done
from pdhub.simulate.traces import read_trace
from pdhub.simulate.workload import Class, Mix, arrivals


@pytest.fixture
def records(make_plan: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, list[dict[str, Any]]]:
    plan = make_plan({"type": "round_robin"})
    costs = parse_costs(
        {
            "prefill": {"ms": 12, "ms_per_token": 0.04},
            "pools": {"fast": {"slots": 1, "tpot_ms": {1: 4}}, "general": {"slots": 8, "tpot_ms": {1: 12, 8: 26}}},
        }
    )
    kept: list[Done] = []
    original = lab._result

    def result(*args: Any) -> Any:
        kept.extend(args[5])
        return original(*args)

    monkeypatch.setattr(lab, "_result", result)
    items = read_trace("synthetic:requests=500,rate=7,prompt=500,output=60")
    simulate(World(plan, costs), of_plan(plan), arrivals(items, Mix((Class("c"),))))
    return plan, [json.loads(json.dumps(dataclasses.asdict(d.record))) for d in kept]


def test_costs_come_out_again(records: tuple[Any, list[dict[str, Any]]]) -> None:
    plan, rows = records
    text = document(plan, rows, "test")
    costs = parse_costs(yaml.safe_load(text))
    fast, general = costs.pool("fast"), costs.pool("general")
    assert fast is not None
    assert general is not None
    assert fast.token_ms(1, 500) == pytest.approx(4, rel=0.05)
    assert general.token_ms(4, 500) == pytest.approx(18, rel=0.25)
    assert costs.prefill_cost() is not None
    # It carries a little more: prompts that waited for others.
    slope = fit_prefill([r for r in rows if r["ttft_ms"]])["ms_per_token"]
    assert 0.03 <= slope <= 0.08
    assert "Pool fast" in text


def test_more_company_is_never_quicker() -> None:
    rows = [
        {"tpot_ms": t, "completion_tokens": 50, "concurrency": c}
        for c, t in ((1, 10), (2, 14), (4, 13))
        for _ in range(6)
    ]
    model = fit_decode(rows)
    assert model is not None
    assert list(model["tpot_ms"].values()) == sorted(model["tpot_ms"].values())
    assert model["slots"] == 4


def test_too_little_says_so(make_plan: Any) -> None:
    assert fit_decode([{"tpot_ms": 3.0, "completion_tokens": 50}]) is None
    with pytest.raises(ConfigError, match="nothing to fit"):
        document(make_plan(), [], "test")


@pytest.fixture
def router() -> Iterator[tuple[str, dict[str, Any]]]:
    answer: dict[str, Any] = {"status": 200, "body": {"requests": [{"id": "a"}, {"id": "b"}]}}

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(answer["status"])
            self.end_headers()
            self.wfile.write(json.dumps(answer["body"]).encode())

        def log_message(self, *args: object) -> None:
            return

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", answer
        server.shutdown()
        thread.join()


def test_a_live_router_is_asked(router: tuple[str, dict[str, Any]]) -> None:
    url, answer = router
    assert [r["id"] for r in watch(url, 0)] == ["a", "b"]
    answer["body"] = {"other": 1}
    with pytest.raises(ConfigError, match="not a list"):
        watch(url, 0)
    answer["status"] = 404
    with pytest.raises(ConfigError) as caught:
        watch(url, 0)
    assert "debug_headers" in str(caught.value.hint)


def test_files_of_requests(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    path.write_text('{"id": "a"}\n\n{"id": "b"}\n')
    assert len(read_records(path)) == 2
    path.write_text('{"requests": [{"id": "a"}]}')
    assert len(read_records(path)) == 1
    path.write_text("nonsense")
    with pytest.raises(ConfigError):
        read_records(path)
