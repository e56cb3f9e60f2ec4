"""Logging: one handler, plain off a terminal, level by name."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from pdhub.telemetry.logs import configure


@pytest.fixture(autouse=True)
def restore() -> Iterator[None]:
    logger = logging.getLogger("pdhub")
    handlers, level = logger.handlers[:], logger.level
    yield
    logger.handlers[:] = handlers
    logger.setLevel(level)


def test_lines_are_plain_off_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    configure("info")
    logging.getLogger("pdhub.part").info("hello %s", "there")
    logging.getLogger("pdhub.part").debug("hidden")
    err = capsys.readouterr().err
    assert err.rstrip().endswith("INFO    pdhub.part: hello there")
    assert "\033" not in err


def test_configuring_again_replaces(capsys: pytest.CaptureFixture[str]) -> None:
    configure("info")
    configure("WARNING", color=True)
    configure("debug", color=False)
    logging.getLogger("pdhub.part").debug("once")
    assert capsys.readouterr().err.count("once") == 1


def test_an_unknown_level_is_refused() -> None:
    with pytest.raises(ValueError, match="choose one of debug, info, warning, error"):
        configure("loud")
