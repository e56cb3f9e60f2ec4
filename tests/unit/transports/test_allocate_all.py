"""Regions of one landing on several devices: all of them, or nothing stays allocated."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pdhub.api import Transport
from pdhub.transports.plugin import pdhub_register_transports


@pytest.fixture(params=["shm", "tcp"])
def transport(request) -> Iterator[Transport]:
    spec = next(spec for spec in pdhub_register_transports() if spec.name == request.param)
    one = spec.factory(spec.config())
    yield one
    one.close()


def test_one_region_a_device(transport):
    regions = transport.allocate_all(100, ["cpu", "cpu"])
    assert [region.nbytes for region in regions] == [100, 100]
    assert len({region.id for region in regions}) == 2


def test_all_or_nothing(transport, monkeypatch):
    given, back = [], []
    allocate, unregister = transport.allocate, transport.unregister

    def counted(nbytes, device):
        given.append(allocate(nbytes, device))
        return given[-1]

    def counted_back(name):
        back.append(name)
        unregister(name)

    monkeypatch.setattr(transport, "allocate", counted)
    monkeypatch.setattr(transport, "unregister", counted_back)
    with pytest.raises(ValueError, match="nowhere"):
        transport.allocate_all(100, ["cpu", "cpu", "nowhere"])
    assert len(given) == 2
    assert back == [region.id for region in given]


def test_reaches(transport):
    assert transport.reaches("cpu")
    assert not transport.reaches("cuda:0")
