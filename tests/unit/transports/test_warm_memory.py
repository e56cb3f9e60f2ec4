"""Memory is used again only if nobody here looks at it, and only up to the limit."""

import mmap

import numpy as np
import pytest

from pdhub.transports.memory import WarmMemory, private_memory, rounded, shareable_memory

MIB = 1 << 20


@pytest.fixture(params=[private_memory, shareable_memory])
def warm(request):
    stock = WarmMemory(request.param, 8 * MIB)
    yield stock
    stock.close()


def test_rounding_wastes_at_most_an_eighth():
    for nbytes in (1, 65_536, 65_537, 100_000, MIB, MIB + 1, 123_456_789):
        assert nbytes <= rounded(nbytes)
        assert rounded(nbytes) % mmap.PAGESIZE == 0
        assert rounded(nbytes) <= max(65_536, nbytes * 9 // 8 + mmap.PAGESIZE)


def test_returned_memory_comes_back(warm):
    first = warm.take(MIB)
    warm.give(first)
    assert warm.take(MIB - 5000) is first
    assert warm.take(MIB) is not first


def test_much_larger_memory_is_not_spent_on_little(warm):
    big = warm.take(4 * MIB)
    warm.give(big)
    assert warm.take(MIB) is not big


@pytest.mark.parametrize("look", [memoryview, lambda m: memoryview(m)[5:9], lambda m: np.frombuffer(m, np.uint8)])
def test_memory_that_somebody_looks_at_is_dropped(warm, look):
    memory = warm.take(MIB)
    view = look(memory.map)
    warm.give(memory)
    assert warm.take(MIB) is not memory
    assert bytes(view[:1]) == b"\0", "a view outlives the stock"


def test_the_limit_drops_the_oldest():
    dropped = []
    stock = WarmMemory(private_memory, 3 * MIB, dropped.append)
    one, two, three = (stock.take(size * MIB) for size in (1, 2, 1))
    too_big = stock.take(4 * MIB)
    for memory in (one, two, three, too_big):
        stock.give(memory)
    assert dropped == [one, too_big]
    stock.close()
    stock.close()


def test_shared_memory_cannot_shrink_under_its_readers():
    memory = shareable_memory(MIB)
    import os

    with pytest.raises(PermissionError):
        os.ftruncate(memory.fd, 0)
    memory.drop()
    memory.drop()


def test_impossible_sizes_are_memory_errors():
    for make in (private_memory, shareable_memory):
        with pytest.raises(MemoryError):
            make(1 << 60)
