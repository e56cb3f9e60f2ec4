"""Memory of a target: registered while it is in the stock, and beyond reach when it is detached."""

import ctypes
import gc
import os

import pytest
from copying import CopyNative, copy

from pdhub.onesided.memory import HostStock


@pytest.fixture
def native():
    native = CopyNative()
    native.open()
    return native


def test_memory_stays_registered_while_it_is_warm(native):
    stock = HostStock(native, 1 << 20)
    memory = stock.take(70_000)
    assert len(native.registered) == 1
    number = memory.number
    memory.reuse()
    assert len(native.registered) == 1
    assert stock.take(70_000).number == number
    stock.close()


def test_memory_that_leaves_the_stock_is_deregistered(native):
    stock = HostStock(native, 0)
    stock.take(70_000).reuse()
    assert native.registered == set()


def test_late_writes_into_detached_memory_change_nothing(native):
    stock = HostStock(native, 64 << 20)
    size = 1 << 20
    lost = stock.take(size)
    address = lost.address
    lost.memory.map[:5] = b"first"
    source = ctypes.create_string_buffer(b"\xff" * size, size)
    assert lost.detach()
    assert native.registered == set()
    del lost
    gc.collect()
    later = [stock.take(size) for _ in range(20)]
    for memory in later:
        memory.memory.map[:size] = bytes(size)
    copy(os.getpid(), ctypes.addressof(source), address, size)  # what a stopped writer does when it resumes
    assert all(memory.memory.map[:size] == bytes(size) for memory in later)
    assert all(not address <= memory.address < address + size for memory in later)


def test_what_cannot_be_registered_is_no_memory(native, monkeypatch):
    def refuse(address, nbytes, device):
        raise ValueError("locked memory is exhausted")

    monkeypatch.setattr(native, "register", refuse)
    with pytest.raises(MemoryError, match="locked memory"):
        HostStock(native, 0).take(1)
