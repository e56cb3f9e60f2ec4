"""What a user hears when the library is missing or does not start, and how its protocol is chosen."""

import os

import pytest
from pdhub_mooncake import library
from pdhub_mooncake.codes import meaning
from pdhub_mooncake.plugin import MooncakeConfig, pdhub_register_transports
from pdhub_mooncake.route import AT_ONCE, MooncakeSending
from pdhub_mooncake.settings import FORCED_BY, forced

from pdhub.api import PluginError, TransferFailed
from pdhub.onesided import Piece, StillUnderWay

(SPEC,) = pdhub_register_transports()


def test_a_missing_library_is_an_error_at_start_with_the_command(monkeypatch):
    monkeypatch.setattr(library.importlib.util, "find_spec", lambda name: None)
    transport = SPEC.factory(MooncakeConfig())
    with pytest.raises(PluginError, match="Mooncake is not installed") as error:
        transport.open()
    assert 'pip install "pdhub-mooncake[non-cuda]"' in error.value.hint
    transport.close()


@pytest.mark.parametrize(
    ("said", "hint"),
    [
        ("libibverbs.so.1: cannot open shared object file", "apt-get install libibverbs1"),
        ("libcudart.so.12: cannot open shared object file", "pdhub-mooncake[non-cuda]"),
    ],
)
def test_a_library_that_does_not_load_says_what_to_install(monkeypatch, said, hint):
    def broken(name):
        raise ImportError(said)

    monkeypatch.setattr(library.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(library.importlib, "import_module", broken)
    with pytest.raises(PluginError, match=said) as error:
        library.load()
    assert hint in error.value.hint


def test_an_engine_that_does_not_start_is_an_error_with_its_code(monkeypatch):
    class NoDevice:
        def initialize(self, host, metadata, protocol, devices):
            assert (host, metadata, protocol, devices) == ("127.0.0.1", "P2PHANDSHAKE", "rdma", "mlx5_0,mlx5_1")
            return -202

    monkeypatch.setattr("pdhub_mooncake.engine.load", lambda: NoDevice)
    transport = SPEC.factory(MooncakeConfig(network_devices=["mlx5_0", "mlx5_1"]))
    with pytest.raises(PluginError, match=r"protocol rdma on 127.0.0.1: device context error \(-202\)") as error:
        transport.open()
    assert "protocol tcp" in error.value.hint
    transport.close()


@pytest.mark.parametrize("protocol", FORCED_BY)
def test_the_protocol_is_forced_only_while_the_engine_starts(monkeypatch, protocol):
    for names in FORCED_BY.values():
        for name in names:
            monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MC_FORCE_HCA", "of the user")
    with forced(protocol):
        set_now = {name for names in FORCED_BY.values() for name in names if name in os.environ}
        assert set_now == set(FORCED_BY[protocol])
    assert os.environ["MC_FORCE_HCA"] == "of the user"
    assert "MC_FORCE_TCP" not in os.environ


def test_codes_have_words():
    assert meaning(-3) == "address not registered (-3)"
    assert meaning(-12345) == "error (-12345)"


class Engine:
    """Answers what it is told to."""

    def __init__(self, status=1, refuse_after=10**9):
        self.status = status
        self.refuse_after = refuse_after
        self.asked = []
        self.running = 0
        self.most = 0

    def transfer_submit_write(self, session, source, target, nbytes):
        if len(self.asked) >= self.refuse_after:
            return 0
        self.asked.append((source, target, nbytes))
        self.running += 1
        self.most = max(self.most, self.running)
        return len(self.asked)

    def transfer_check_status(self, number):
        self.running -= self.status != 0
        return self.status


PIECES = [Piece(n, "cpu", 1000 + n, "cpu", 10) for n in range(1000)]


def finish(sending):
    while not sending.poll():
        continue


def test_a_large_batch_is_split():
    engine = Engine()
    finish(MooncakeSending(engine, "there:1", PIECES))
    assert engine.asked == [(n, 1000 + n, 10) for n in range(1000)]
    assert engine.most == AT_ONCE


def test_an_error_code_becomes_an_exception_once_nothing_runs():
    engine = Engine(status=-1)
    sending = MooncakeSending(engine, "there:1", PIECES)
    with pytest.raises(TransferFailed, match=r"invalid argument \(-1\)"):
        finish(sending)
    assert engine.running == 0
    assert sending.unproven


def test_a_request_that_broke_is_repeated_and_said():
    engine = Engine()
    broken = [10, 20, 20]

    def check(number):
        engine.running -= 1
        source = engine.asked[number - 1][0]
        if source in broken:
            broken.remove(source)
            return -1
        return 1

    engine.transfer_check_status = check
    sending = MooncakeSending(engine, "there:1", PIECES)
    finish(sending)
    assert sending.unproven, "bytes of the attempt that broke may still arrive"
    assert sorted(engine.asked) == sorted([(n, 1000 + n, 10) for n in [*range(1000), 10, 20, 20]])


def test_nothing_is_repeated_or_posted_once_nobody_wants_it():
    engine = Engine(status=-1)
    sending = MooncakeSending(engine, "there:1", PIECES)
    sending.stop()
    with pytest.raises(TransferFailed):
        finish(sending)
    assert len(engine.asked) == AT_ONCE
    assert engine.running == 0


def test_what_went_well_is_proven():
    sending = MooncakeSending(Engine(), "there:1", PIECES)
    finish(sending)
    assert not sending.unproven


def test_a_target_that_cannot_be_reached_is_an_exception():
    with pytest.raises(TransferFailed, match="cannot be reached"):
        finish(MooncakeSending(Engine(refuse_after=3), "there:1", PIECES))


def test_a_time_out_of_the_library_is_no_end():
    with pytest.raises(StillUnderWay):
        finish(MooncakeSending(Engine(status=-2), "there:1", PIECES[:1]))
