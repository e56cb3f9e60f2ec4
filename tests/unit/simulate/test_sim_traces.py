from __future__ import annotations

from pathlib import Path

import pytest

from pdhub.api.errors import ConfigError
from pdhub.simulate.traces import rate, read_trace

MOONCAKE = """\
{"timestamp": 0, "input_length": 1000, "output_length": 50, "hash_ids": [1, 2]}
{"timestamp": 0, "input_length": 1100, "output_length": 60, "hash_ids": [1, 3]}
{"timestamp": 3000, "input_length": 10, "output_length": 0, "hash_ids": []}
"""
AZURE = """\
TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.6805900,396,109
"""


def test_mooncake_requests_of_one_tick_are_spread_over_it(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(MOONCAKE)
    items = read_trace(str(path))
    assert [item.at_s for item in items] == [0.0, 1.5, 3.0]
    assert items[1].prefix == (1, 3)
    assert items[2].output_tokens == 1  # an answer has at least one token


def test_azure(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text(AZURE)
    items = read_trace(str(path))
    assert [(i.at_s, i.prompt_tokens, i.output_tokens) for i in items] == [
        (0.0, 374, 44),
        (pytest.approx(4.0), 396, 109),
    ]
    assert rate(items) == pytest.approx(0.25)


def test_skip_and_limit_start_at_zero(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text(AZURE)
    (item,) = read_trace(str(path), skip=1, limit=5)
    assert item.at_s == 0.0
    assert item.prompt_tokens == 396


def test_the_format_may_be_said(tmp_path: Path) -> None:
    path = tmp_path / "trace.txt"
    path.write_text(AZURE)
    with pytest.raises(ConfigError, match="format"):
        read_trace(str(path))
    assert len(read_trace(str(path), "azure")) == 2


@pytest.mark.parametrize(
    "row", ["nonsense", '{"timestamp": 1}', '{"timestamp": 1e999, "input_length": 1, "output_length": 1}']
)
def test_a_bad_row_says_which(tmp_path: Path, row: str) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(MOONCAKE + row + "\n")
    with pytest.raises(ConfigError) as caught:
        read_trace(str(path))
    assert "line 4" in str(caught.value.where)


def test_a_missing_file_is_a_configuration_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        read_trace(str(tmp_path / "no.csv"))


def test_synthetic_is_repeatable_and_has_the_rate() -> None:
    items = read_trace("synthetic:requests=2000,rate=4,prompt=100,output=20,burst=3,shared=0.5")
    assert items == read_trace("synthetic:requests=2000,rate=4,prompt=100,output=20,burst=3,shared=0.5")
    assert rate(items) == pytest.approx(4, rel=0.2)
    assert all(i.prompt_tokens >= 1 and i.output_tokens >= 1 for i in items)
    assert items != read_trace("synthetic:requests=2000,rate=4,prompt=100,output=20,burst=3,shared=0.5,seed=1")


@pytest.mark.parametrize("source", ["synthetic:speed=3", "synthetic:rate=fast", "synthetic:rate=0"])
def test_synthetic_words_are_checked(source: str) -> None:
    with pytest.raises(ConfigError):
        read_trace(source)
