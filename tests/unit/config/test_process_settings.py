"""The environment of the process: switches, keys by name, the cache."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdhub.api import ConfigError
from pdhub.config.settings import cache_dir, child_environment, secret, settings


def test_defaults() -> None:
    found = settings()
    assert (found.strict_plugins, found.debug, found.log_level) == (False, False, "info")


def test_switches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDHUB_STRICT_PLUGINS", "1")
    monkeypatch.setenv("PDHUB_LOG_LEVEL", "debug")
    assert settings().strict_plugins
    assert settings().log_level == "debug"


def test_a_key_is_read_by_name_and_must_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    assert secret(None) is None
    monkeypatch.setenv("SOME_KEY", "s3cret")
    assert secret("SOME_KEY") == "s3cret"
    for value in ("", None):
        monkeypatch.delenv("SOME_KEY", raising=False)
        if value is not None:
            monkeypatch.setenv("SOME_KEY", value)
        with pytest.raises(ConfigError, match="SOME_KEY") as caught:
            secret("SOME_KEY")
        assert caught.value.hint == "export SOME_KEY=…"


def test_the_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_dir() == tmp_path / "pdhub"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_dir() == tmp_path / ".cache" / "pdhub"
    monkeypatch.setenv("PDHUB_CACHE_DIR", "~/mine")
    assert cache_dir() == tmp_path / "mine"


def test_a_child_gets_this_environment_and_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME", "old")
    assert child_environment()["SOME"] == "old"
    assert child_environment({"SOME": "new"})["SOME"] == "new"
