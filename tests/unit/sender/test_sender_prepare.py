"""A landing is prepared when the sender joins it, not when the first chunk is there."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pdhub.api import Grant, KVLayout
from pdhub.sender import Sender
from tests.unit.sender.fakenode import FakeNode, HeldPeer, HeldTransport, chunks

Make = Callable[..., Sender]


def test_a_joined_landing_is_prepared_before_anything_is_written(
    layout: KVLayout, node: FakeNode, make_sender: Make, transport: HeldTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared: list[Grant] = []
    monkeypatch.setattr(HeldPeer, "prepare", lambda peer, grant: prepared.append(grant))
    session = make_sender().join(node.params(), 8)
    assert [grant.region_id for grant in prepared] == [node.landings["t1"].id]
    assert next(transport.writes) == 0
    session.send(chunks(layout, 8, 8)[0])
    session.finish()
    assert len(prepared) == 1
