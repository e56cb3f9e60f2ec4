"""The command line: every verb, its exit status, and one clear message instead of a traceback."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from pdhub import __version__
from pdhub.api import Command, CommandSpec, EngineFailed, hookimpl
from pdhub.cli import main
from pdhub.cli.app import app, config_app, verbs
from pdhub.registry import Registry, load
from pdhub.registry.providers import BUILTIN_COMMANDS

Run = Callable[..., tuple[int, str, str]]

CONFIG = """\
model: {name: m}
pools:
  - name: only
    engine: {type: openai, config: {}}
    nodes:
      - {name: only-0, port: 9001, launch: false}
policy: {type: slo_threshold, config: {tpot_below_ms: 20, fast: only, otherwise: only}}
"""


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No variable of the developer's shell changes a test, and no test changes logging for the next."""
    for name in [n for n in os.environ if n.startswith("PDHUB_")]:
        monkeypatch.delenv(name)
    logger = logging.getLogger("pdhub")
    handlers, level = logger.handlers[:], logger.level
    yield
    logger.handlers[:] = handlers
    logger.setLevel(level)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a command line in this process: (exit status, stdout, stderr)."""

    def run(*words: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as exit_:
            main([str(word) for word in words])
        out, err = capsys.readouterr()
        return int(exit_.value.code or 0), out, err

    return run


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "c.yaml"
    path.write_text(CONFIG)
    return path


def test_the_version(run: Run) -> None:
    assert run("--version") == (0, f"pdhub {__version__}\n", "")


@pytest.mark.parametrize("verb", verbs())
def test_every_verb_explains_itself_with_examples(run: Run, verb: str) -> None:
    names = [verb]
    if verb == "config":
        names = [f"config {c.callback.__name__}" for c in config_app.registered_commands if c.callback]
    for name in names:
        status, out, _ = run(*name.split(), "--help")
        assert status == 0
        assert "Examples:" in out
        assert f"pdhub {name}" in out


def test_no_plugin_can_take_a_verbs_name() -> None:
    assert set(verbs()) <= BUILTIN_COMMANDS


def test_plugins_lists_and_prints_json(run: Run) -> None:
    status, out, err = run("plugins")
    assert (status, err) == (0, "")
    assert out.splitlines()[0].split() == [
        "KIND", "NAME", "DISTRIBUTION", "VERSION", "STABILITY", "STATUS", "SUMMARY",
    ]  # fmt: skip
    status, out, _ = run("plugins", "--json")
    rows = {(row["kind"], row["name"]): row for row in json.loads(out)}
    for known in (("transport", "shm"), ("transport", "tcp"), ("policy", "slo_threshold"), ("launcher", "local")):
        assert rows[known]["status"] == "ok"
        assert rows[known]["distribution"] == "pdhub"
        assert set(rows[known]) == {
            "kind", "name", "distribution", "version", "stability", "status", "summary", "error",
        }  # fmt: skip


def test_check_says_what_it_found(run: Run, config: Path) -> None:
    status, out, err = run("check", config)
    assert (status, err) == (0, "")
    assert out.startswith("ok: ")
    assert "only: openai on only-0" in out


def test_check_takes_overrides(run: Run, config: Path) -> None:
    status, _, err = run("check", config, "--set", "policy.config.fast=other")
    assert status == 2
    assert "fast names no pool: 'other'" in err
    assert "the pools are: only" in err


@pytest.mark.parametrize("verb", ["check", "node", "router", "up", "config show"])
def test_a_missing_file_is_one_message(run: Run, verb: str) -> None:
    words = [*verb.split(), "/nowhere.yaml", *(["x"] if verb == "node" else [])]
    status, out, err = run(*words)
    assert (status, out) == (2, "")
    assert err.startswith("error: ")
    assert "/nowhere.yaml" in err
    assert "hint: " in err
    assert "Traceback" not in err


def test_debug_shows_the_traceback(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "Traceback" in run("--debug", "check", "/nowhere.yaml")[2]
    monkeypatch.setenv("PDHUB_DEBUG", "1")
    assert "Traceback" in run("check", "/nowhere.yaml")[2]


def test_a_fault_of_ours_is_a_message_too(run: Run, config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import pdhub.cli.tables

    def broken(plan: Any) -> str:
        raise KeyError("oops")

    monkeypatch.setattr(pdhub.cli.tables, "plan_text", broken)
    status, _, err = run("check", config)
    assert status == 1
    assert err.startswith("error: internal error: KeyError: 'oops'")
    assert "pdhub --debug" in err


def test_other_errors_are_status_1(run: Run, config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import pdhub.router.main

    def broken(path: str, overrides: Any = ()) -> int:
        raise EngineFailed("gone")

    monkeypatch.setattr(pdhub.router.main, "run", broken)
    assert run("router", config) == (1, "", "error: gone\n")


def test_flags_and_names_reach_the_functions(run: Run, config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import pdhub.node.main
    import pdhub.operate.quickstart
    import pdhub.operate.up
    import pdhub.router.main

    calls: list[tuple[Any, ...]] = []

    def record(*arguments: Any) -> int:
        calls.append(arguments)
        return 7

    for module in (pdhub.node.main, pdhub.router.main, pdhub.operate.up, pdhub.operate.quickstart):
        monkeypatch.setattr(module, "run", record)
    assert run("node", config, "n", "--set", "a=1", "--set", "b=2")[0] == 7
    assert run("router", config)[0] == 7
    assert run("up", config, "--set", "a=1")[0] == 7
    assert run("quickstart", "--once", "--prompt", "hi", "--port", "9", "--json")[0] == 7
    assert [(a[0], *map(list, a[-1:])) for a in calls[1:3]] == [(str(config), []), (str(config), ["a=1"])]
    assert (calls[0][:2], list(calls[0][2])) == ((str(config), "n"), ["a=1", "b=2"])
    options = calls[3][0]
    assert (options.once, options.prompt, options.port, options.json) == (True, "hi", 9, True)


def test_config_show_names_sources(run: Run, config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDHUB_ROUTER__PORT", "9000")
    status, out, _ = run("config", "show", config, "--set", "router.retries=0")
    assert status == 0
    lines = {line.split(" = ")[0]: line for line in out.splitlines()}
    assert lines["router.port"].endswith("# env PDHUB_ROUTER__PORT")
    assert lines["router.retries"].endswith("# --set router.retries")
    assert lines["model.name"].endswith(f"# {config}:1")
    assert lines["router.host"].endswith("# default")
    found = json.loads(run("config", "show", config, "--json")[1])
    assert {"path": "model.name", "value": "m", "source": f"{config}:1"} in found


def test_config_schema_ties_options_to_the_type(run: Run) -> None:
    status, out, _ = run("config", "schema")
    assert status == 0
    schema = json.loads(out)
    component = schema["$defs"]["transport_component"]
    assert {"shm", "tcp"} <= set(component["properties"]["type"]["enum"])
    assert schema["$defs"]["HandoffConfig"]["properties"]["transport"]["$ref"] == "#/$defs/transport_component"
    rule = next(r for r in component["allOf"] if r["if"]["properties"]["type"]["const"] == "shm")
    assert rule["then"]["properties"]["config"]["$ref"].startswith("#/$defs/")
    _references_exist(schema, schema["$defs"])


def _references_exist(value: Any, defs: dict[str, Any]) -> None:
    if isinstance(value, dict):
        if "$ref" in value:
            assert value["$ref"].removeprefix("#/$defs/") in defs
        for member in value.values():
            _references_exist(member, defs)
    elif isinstance(value, list):
        for member in value:
            _references_exist(member, defs)


@pytest.mark.parametrize(
    ("words", "message", "hint"),
    [
        (["chekc"], "there is no command 'chekc'", "did you mean 'check'?"),
        (["frobnicate"], "there is no command 'frobnicate'", "pdhub --help"),
        (["nixl", "serve"], "no command plugin 'nixl' is installed", "pip install pdhub-nixl"),
        (["--log-level", "loud", "plugins"], "unknown log level 'loud'", "debug, info, warning, error"),
        (["new", "engin", "x"], "'engin' is not one of", "engine"),
        (["node"], "Missing argument", "CONFIG"),
    ],
)
def test_usage_errors_are_status_2(run: Run, words: list[str], message: str, hint: str) -> None:
    status, _, err = run(*words)
    assert status == 2
    assert message in err
    assert hint in err
    assert "Traceback" not in err


def test_bad_settings_are_status_2(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDHUB_STRICT_PLUGINS", "perhaps")
    status, _, err = run("plugins")
    assert status == 2
    assert "PDHUB_STRICT_PLUGINS" in err


class Fruit(Command):
    help = "Grow fruit.\n\nExamples:\n  pdhub fruit grow"

    def run(self, args: Any) -> int:
        print("fruit", *args)
        return 3


@pytest.fixture
def fruit(monkeypatch: pytest.MonkeyPatch) -> None:
    plugin = ModuleType("fruit")

    @hookimpl
    def pdhub_register_commands() -> list[CommandSpec]:
        return [CommandSpec(name="fruit", summary="x", factory=Fruit)]

    vars(plugin)["pdhub_register_commands"] = pdhub_register_commands
    real = load

    def fake(**arguments: Any) -> Registry:
        return real(extra=[plugin], **arguments)

    monkeypatch.setattr(sys.modules["pdhub.registry"], "load", fake)


def test_a_plugins_command_gets_its_words(run: Run, fruit: None) -> None:
    assert run("fruit", "grow", "--fast", "-n", "3", "--", "x")[:2] == (3, "fruit grow --fast -n 3 -- x\n")
    assert run("--log-level", "error", "fruit")[:2] == (3, "fruit\n")
    assert run("fruit", "grow", "--help")[:2] == (3, "fruit grow --help\n")
    status, out, _ = run("fruit", "--help")
    assert (status, out) == (0, Fruit.help + "\n")
    assert "did you mean 'fruit'?" in run("friut")[2]


def test_the_hidden_verb_is_hidden(run: Run) -> None:
    assert "run-plugin" not in run("--help")[1]
    assert any(command.hidden for command in app.registered_commands)
