"""Device memory: set aside for lost writers up to a limit, else given back."""

import pytest
from copying import CopyNative

from pdhub.onesided.device import DeviceMemory, DeviceStock


@pytest.fixture
def native():
    native = CopyNative()
    native.open()
    return native


class Tensor:
    def __init__(self, nbytes):
        self.nbytes = nbytes

    def data_ptr(self):
        return id(self)

    def numel(self):
        return self.nbytes


def device_memory(native, stock, nbytes):
    tensor = Tensor(nbytes)
    return DeviceMemory(stock, tensor, "cuda:0", native.register(tensor.data_ptr(), nbytes, "cuda:0"), b"")


def test_device_memory_of_lost_writers_is_set_aside_up_to_a_limit(native):
    stock = DeviceStock(native, 100, 0)
    first, second = device_memory(native, stock, 70), device_memory(native, stock, 70)
    assert first.detach()
    assert not second.detach(), "more than the limit cannot be withheld: the fence is not proven"
    assert len(native.registered) == 1
    first.reclaim()
    assert second.detach()
    assert native.registered == set()


def test_device_memory_goes_back(native):
    stock = DeviceStock(native, 100, 0)
    device_memory(native, stock, 10).reuse()
    assert native.registered == set()


def test_device_memory_stays_registered_while_it_is_warm(native):
    stock = DeviceStock(native, 100, 25)
    first, second, third = (device_memory(native, stock, 10) for _ in range(3))
    first.reuse()
    second.reuse()
    assert len(native.registered) == 3
    third.reuse()
    assert len(native.registered) == 2, "the oldest has gone"
    assert first.handle not in native.registered
