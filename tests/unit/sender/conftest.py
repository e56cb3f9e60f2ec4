from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

from pdhub.api import GroupKind, KVGroup, KVLayout, Order
from pdhub.sender import Sender
from tests.unit.sender.fakenode import FakeNode, HeldTransport, until

BT = 4


@pytest.fixture
def layout(request: pytest.FixtureRequest) -> KVLayout:
    groups = (
        KVGroup("full", GroupKind.FULL, (0, 1, 2), BT, BT * 8, ("token:4", "dim:8"), "uint8"),
        KVGroup("extra", GroupKind.MLA, (0,), BT, BT * 2, ("token:4", "dim:2"), "uint8"),
    )
    return KVLayout("m", 1, 1, groups, getattr(request, "param", Order.BLOCK_MAJOR))


@pytest.fixture
def node(layout: KVLayout) -> Iterator[FakeNode]:
    made = FakeNode(layout)
    yield made
    made.close()


@pytest.fixture
def transport() -> Iterator[HeldTransport]:
    made = HeldTransport()
    made.open()
    yield made
    made.close()


@pytest.fixture
def make_sender(layout: KVLayout, transport: HeldTransport) -> Iterator[Callable[..., Sender]]:
    """Senders with slots of one chunk of 8 tokens; afterwards nothing of them may be left."""
    before = {t.ident for t in threading.enumerate()}
    made: list[Sender] = []

    def make(slots: int = 4, **more: object) -> Sender:
        options = {"chunk_tokens": 8, "staging_bytes": 1 << 20, "slots": slots, **more}
        sender = Sender(transport, name=f"s{len(made)}", layout=layout, **options)  # type: ignore[arg-type]
        made.append(sender)
        return sender

    yield make
    for sender in made:
        sender.close()
        sender.close()
        assert sender.stats().channels == 0
    transport.let_go()
    left = [t for t in threading.enumerate() if t.ident not in before and t.name.startswith("pdhub")]
    assert not left, f"threads left: {left}"
    for sender in made:
        until(lambda s=sender: s.stats().slots_free == s.stats().slots, "all slots free")
