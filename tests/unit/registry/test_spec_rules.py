"""Junk from a hook is reported with the plugin, the hook and the argument at fault."""

from __future__ import annotations

from typing import Any

import pytest

from pdhub.api import API_VERSION
from pdhub.registry import Status, load

HEAD = "from pdhub.api import *\nfrom pdhub.api import hookimpl, EngineSpec, CommandSpec, PolicySpec, TransportSpec\n"
GOOD = "summary='x', runtime=print"

CASES = {
    "returns None inside": ("engines", "[None]", "must return EngineSpec objects"),
    "wrong kind": ("engines", "[TransportSpec(name='x', summary='x', factory=print)]", "must return EngineSpec"),
    "not iterable": ("engines", "42", "TypeError"),
    "raises": ("engines", "1 / 0", "ZeroDivisionError"),
    "upper-case name": ("engines", f"[EngineSpec(name='Bad Name', {GOOD})]", "argument 'name'"),
    "name is no text": ("engines", f"[EngineSpec(name=7, {GOOD})]", "argument 'name'"),
    "no summary": ("engines", "[EngineSpec(name='x', summary=' ', runtime=print)]", "argument 'summary'"),
    "two lines": ("engines", "[EngineSpec(name='x', summary='a\\nb', runtime=print)]", "argument 'summary'"),
    "config is a dict": ("engines", f"[EngineSpec(name='x', config={{}}, {GOOD})]", "argument 'config'"),
    "config is an instance": ("engines", f"[EngineSpec(name='x', config=NoConfig(), {GOOD})]", "argument 'config'"),
    "stability is text": ("engines", f"[EngineSpec(name='x', stability='new', {GOOD})]", "argument 'stability'"),
    "no facet": ("engines", "[EngineSpec(name='x', summary='x')]", "at least one of client"),
    "facet is no callable": ("engines", "[EngineSpec(name='x', summary='x', client=3)]", "argument 'client'"),
    "version is text": ("engines", f"[EngineSpec(name='x', api_version='1.0', {GOOD})]", "argument 'api_version'"),
    "newer major": (
        "engines",
        f"[EngineSpec(name='x', api_version=({API_VERSION[0] + 1}, 0), {GOOD})]",
        f"needs plugin API {API_VERSION[0] + 1}.0",
    ),
    "newer minor": (
        "engines",
        f"[EngineSpec(name='x', api_version=({API_VERSION[0]}, {API_VERSION[1] + 1}), {GOOD})]",
        "install matching versions",
    ),
    "factory missing": ("transports", "[TransportSpec(name='x', summary='x', factory=None)]", "argument 'factory'"),
    "part is text": ("policies", "[PolicySpec(name='x', summary='x', part='any', factory=print)]", "argument 'part'"),
    "verb of the host": ("commands", "[CommandSpec(name='up', summary='x', factory=print)]", "a verb of pdhub"),
}


@pytest.mark.parametrize(("kind", "returned", "expected"), CASES.values(), ids=CASES)
def test_junk_names_plugin_hook_and_argument(install: Any, kind: str, returned: str, expected: str) -> None:
    install("junk", f"{HEAD}\n@hookimpl\ndef pdhub_register_{kind}():\n    return {returned}\n")
    (found,) = [r for r in load().rows() if r.distribution == "pdhub-junk"]
    assert found.status is Status.BROKEN
    assert expected in found.error
    assert f"pdhub_register_{kind}" in found.error


def test_good_specs_beside_a_bad_one_stay_usable(install: Any) -> None:
    specs = f"[EngineSpec(name='fine', {GOOD}), EngineSpec(name='BAD', {GOOD})]"
    install("mixed", f"{HEAD}\n@hookimpl\ndef pdhub_register_engines():\n    return {specs}\n")
    registry = load()
    assert registry.engine("fine")
    assert {r.status for r in registry.rows() if r.distribution == "pdhub-mixed"} == {Status.OK, Status.BROKEN}


def test_an_older_minor_is_compatible(install: Any) -> None:
    specs = f"[EngineSpec(name='old', api_version=({API_VERSION[0]}, 0), {GOOD})]"
    install("old", f"{HEAD}\n@hookimpl\ndef pdhub_register_engines():\n    return {specs}\n")
    assert load().engine("old")


def test_a_misspelt_hook_is_found(install: Any) -> None:
    install("typo", f"{HEAD}\n@hookimpl\ndef pdhub_register_engine():\n    return []\n")
    (found,) = [r for r in load().rows() if r.distribution == "pdhub-typo"]
    assert "no hook 'pdhub_register_engine'; did you mean 'pdhub_register_engines'?" in found.error


def test_a_forgotten_mark_is_found(install: Any) -> None:
    install("bare", f"{HEAD}\ndef pdhub_register_engines():\n    return []\n")
    (found,) = [r for r in load().rows() if r.distribution == "pdhub-bare"]
    assert "it implements no hook; put @hookimpl before" in found.error
    assert found.status is Status.BROKEN


def test_an_argument_that_the_hook_does_not_have_is_found(install: Any) -> None:
    install("args", f"{HEAD}\n@hookimpl\ndef pdhub_request_finished(request):\n    return None\n")
    (found,) = [r for r in load().rows() if r.distribution == "pdhub-args"]
    assert "request" in found.error
    assert found.status is Status.BROKEN
