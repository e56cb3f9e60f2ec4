"""Many sessions to several nodes; writes end in any order, fail, are revoked; owners leave at any moment."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from pdhub.api import KVLayout, RequestError, TransferState
from pdhub.core.digest import landing_digest
from pdhub.sender import Sender
from pdhub.wire.control import Done, Leave, Revoke
from tests.unit.sender.fakenode import FakeNode, HeldTransport, chunks, until

SESSIONS = 150


def test_every_session_ends_once_and_no_byte_is_wrong(
    layout: KVLayout, make_sender: Callable[..., Sender], transport: HeldTransport
) -> None:
    nodes = [FakeNode(layout) for _ in range(3)]
    transport.held.update(node.transport for node in nodes)
    transport.can_abort = True
    sender = make_sender(slots=5, verify=True)
    stop = threading.Event()

    def pump() -> None:
        """Ends posted writes late, in any order, now and then with a failure."""
        rng = random.Random(1)
        while not stop.is_set():
            posted = transport.posted()
            rng.shuffle(posted)
            for transfer in posted[:3]:
                failed = rng.random() < 0.03
                error = RuntimeError("link down") if failed else None
                transfer.end(TransferState.FAILED if failed else TransferState.DONE, error)
            time.sleep(0.0005)

    def one(number: int) -> str:
        rng = random.Random(number)
        node = nodes[number % 3]
        tokens = rng.randrange(1, 60)
        name = f"t{number}"
        try:
            session = sender.join(node.params(name), tokens)
        except RequestError:
            return "refused"
        act = rng.random()
        pieces = chunks(layout, tokens, 8, seed=number)
        moment = rng.randrange(len(pieces))
        try:
            for index, chunk in enumerate(pieces):
                if index == moment and act < 0.2:
                    session.fail("the owner left")
                if index == moment and 0.2 <= act < 0.4:
                    node.say(Revoke(name, 1, "cancelled"))
                session.send(chunk)
            session.finish()
        except RequestError:
            session.fail("given up")
            return "failed"
        return "done"

    threads = [threading.Thread(target=pump) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        with ThreadPoolExecutor(12) as pool:
            outcomes = list(pool.map(one, range(SESSIONS)))
        until(lambda: sum(len(n.got(Done)) + len(n.got(Leave)) for n in nodes) == SESSIONS, "one end a session")
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert outcomes.count("done") > SESSIONS * 0.4
    assert outcomes.count("failed") > SESSIONS * 0.2
    assert sender.stats().sessions == 0
    for number, outcome in enumerate(outcomes):
        node, name = nodes[number % 3], f"t{number}"
        done = [m for m in node.got(Done) if m.transfer_id == name]
        left = [m for m in node.got(Leave) if m.transfer_id == name]
        assert len(done) + len(left) == 1
        if outcome == "done":
            tokens = random.Random(number).randrange(1, 60)
            view = node.landings[name].view
            assert view is not None
            assert done[0].digest == landing_digest(view, layout, node.capacity, tokens)
        else:
            assert left
    for node in nodes:
        node.close()
