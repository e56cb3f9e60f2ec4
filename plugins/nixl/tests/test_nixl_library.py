"""What a user hears when the library is missing, old, or has no such backend."""

import importlib.util

import pytest
from pdhub_nixl import library
from pdhub_nixl.plugin import NixlConfig, pdhub_register_transports

from pdhub.api import PluginError

(SPEC,) = pdhub_register_transports()
HAVE = [build for build in library.BUILDS if importlib.util.find_spec(f"nixl_{build}") is not None]
needs_nixl = pytest.mark.skipif(not HAVE, reason='NIXL is not installed: pip install "pdhub-nixl[cu12]"')


@pytest.mark.parametrize(("build", "command"), [("auto", "[cu12]"), ("cu12", "[cu12]"), ("cu13", "[cu13]")])
def test_a_missing_library_is_an_error_at_start_with_the_command(monkeypatch, build, command):
    monkeypatch.setattr(library.importlib.util, "find_spec", lambda name: None)
    transport = SPEC.factory(NixlConfig(library=build))
    with pytest.raises(PluginError, match="NIXL is not installed") as error:
        transport.open()
    assert error.value.hint == f'pip install "pdhub-nixl{command}"'
    transport.close()


def test_an_old_library_is_refused(monkeypatch):
    monkeypatch.setattr(library.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(library.metadata, "version", lambda name: "1.4.9")
    with pytest.raises(PluginError, match=r"1\.4\.9 is too old") as error:
        library.load("cu13")
    assert "pip install -U" in error.value.hint


def test_a_library_that_does_not_load_says_why(monkeypatch):
    def broken(name):
        raise ImportError("libcudart.so.13: cannot open shared object file")

    monkeypatch.setattr(library.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(library.metadata, "version", lambda name: "1.10.0")
    monkeypatch.setattr(library.importlib, "import_module", broken)
    with pytest.raises(PluginError, match=r"libcudart\.so\.13"):
        library.load("cu13")


@pytest.mark.parametrize(("cuda", "chosen"), [("", "cu12"), ("12", "cu12"), ("13", "cu13")])
def test_of_two_builds_the_one_of_torch_is_loaded(monkeypatch, cuda, chosen):
    monkeypatch.setattr(library.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(library.metadata, "version", lambda name: "1.5.0")
    monkeypatch.setattr(library, "_torch_cuda", lambda: cuda)
    monkeypatch.setattr(library.importlib, "import_module", lambda name: name)
    assert library.load("auto") == f"nixl_{chosen}._bindings"


@needs_nixl
def test_an_unknown_backend_is_named():
    transport = SPEC.factory(NixlConfig(backends=["CARRIER_PIGEON"]))
    with pytest.raises(PluginError, match="no backend 'CARRIER_PIGEON'") as error:
        transport.open()
    assert "UCX" in error.value.hint
    transport.close()


@needs_nixl
def test_backend_options_reach_the_backend():
    transport = SPEC.factory(NixlConfig(backend_options={"UCX": {"num_workers": "nonsense"}}))
    with pytest.raises(PluginError, match="UCX does not start"):
        transport.open()
    transport.close()
