"""Rules about the life of transfers, peers and instances."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from pdhub.api import Transfer, TransferState, WriteOp
from pdhub.testing.transport_kit.pair import (
    FINAL,
    PATIENCE_S,
    TransportPair,
    done,
    first_byte,
    holds,
    long_write,
    pattern,
    peek,
    poke,
    until,
)
from pdhub.testing.transport_kit.process import SideProcess
from pdhub.testing.transport_writer import pack_grant, pack_metadata

LARGE = 8 << 20
GUARD = 0xA5


class LifeRules:
    """T40 to T53."""

    def test_T40_on_done_is_called_once_with_a_final_state(self, pair: TransportPair) -> None:
        """A second call frees a staging slot twice; a missing one leaks it."""
        target, source = pair.target(LARGE), pair.source(pattern(4096))
        calls: list[tuple[Transfer, TransferState]] = []
        transfers = [
            pair.post(target, [WriteOp(source, 0, 0, 4096)], on_done=lambda t: calls.append((t, t.state)))
            for _ in range(20)
        ]
        for transfer in transfers:
            done(transfer)
        running = pair.post(target, long_write(pair, LARGE, 1), on_done=lambda t: calls.append((t, t.state)))
        running.abort()
        running.wait(PATIENCE_S)
        pair.node.fence(target.region.id, pair.caps.fence_within_s)
        late = pair.post(target, [WriteOp(source, 0, 0, 4096)], on_done=lambda t: calls.append((t, t.state)))
        late.wait(PATIENCE_S)
        until(lambda: len(calls) >= 22, "every on_done")
        pair.peer.close()
        time.sleep(0.05)
        assert len(calls) == 22, f"{len(calls)} calls of on_done for 22 transfers"
        assert all(state in FINAL for _, state in calls), "on_done was called in a state that is not final"
        assert {id(t) for t, _ in calls} == {id(t) for t in (*transfers, running, late)}

    def test_T41_on_done_may_raise_and_write(self, pair: TransportPair) -> None:
        """A callback posts the next chunk; one that fails must not stop the transport for everybody else."""
        target, source = pair.target(4096), pair.source(pattern(4096))
        chained: list[Transfer] = []

        def next_chunk(_: Transfer) -> None:
            chained.append(pair.post(target, [WriteOp(source, 2048, 2048, 2048)]))
            raise RuntimeError("a mistake of the caller")

        done(pair.post(target, [WriteOp(source, 0, 0, 2048)], on_done=next_chunk))
        until(lambda: bool(chained), "on_done")
        done(chained[0])
        assert holds(target.region, pattern(4096))

    def test_T42_a_timeout_is_not_a_stop(self, pair: TransportPair) -> None:
        """``wait`` with a limit is how a sender watches for a revoke; it must neither raise, nor stop, nor lie."""
        target = pair.target(LARGE)
        running = pair.post(target, long_write(pair, LARGE, 7))
        assert running.wait(0) is TransferState.POSTED, "a long write cannot be final at once"
        assert running.wait(0.01) is TransferState.POSTED, "a timeout stopped the write"
        assert running.error is None
        poke(target.region, bytes(LARGE))
        until(lambda: peek(target.region, LARGE - 1, 1) == b"\x07", "more bytes after a timeout")
        running.abort()
        assert running.wait(PATIENCE_S) in FINAL
        quick = pair.write(pair.target(10), pattern(10))
        assert (quick.wait(), quick.wait(0), quick.state) == (TransferState.DONE,) * 3

    def test_T43_abort_tells_the_truth(self, pair: TransportPair) -> None:
        """The sender overwrites its staging memory after True: a byte that still leaves it is another request's."""
        for _ in range(3):
            target = pair.target(LARGE)
            transfer = pair.post(target, long_write(pair, LARGE, 1))
            first_byte(target, 1)
            if transfer.abort():
                assert transfer.state in FINAL, "abort() is True but the transfer goes on"
                poke(target.region, bytes([GUARD]) * LARGE)
                time.sleep(0.05)
                assert holds(target.region, bytes([GUARD]) * LARGE), "bytes landed after abort() was True"
            assert transfer.wait(2 * PATIENCE_S) in FINAL
            pair.node.fence(target.region.id, pair.caps.fence_within_s)
            pair.node.unregister(target.region.id)

    def test_T44_abort_is_harmless_at_the_end(self, pair: TransportPair) -> None:
        """Cancel and completion race all the time."""
        target = pair.target(4096)
        transfer = pair.write(target, pattern(4096))
        assert transfer.abort() in (True, False)
        assert transfer.state is TransferState.DONE, "a final state changed"
        assert transfer.error is None
        pair.write(target, pattern(4096, 1))
        assert holds(target.region, pattern(4096, 1))

    def test_T45_a_queued_write_can_be_aborted(self, pair: TransportPair) -> None:
        """With many requests in flight most cancels hit a write that waits for its turn."""
        target = pair.target(LARGE)
        running = pair.post(target, long_write(pair, LARGE, 1))
        queued = pair.post(target, [WriteOp(pair.source(b"\x02" * LARGE), 0, 0, LARGE)])
        stopped = queued.abort()
        if stopped:
            poke(target.region, bytes([GUARD]) * LARGE)  # what landed before may stay; nothing may follow
        running.abort()
        assert running.wait(2 * PATIENCE_S) in FINAL
        assert queued.wait(PATIENCE_S) in FINAL
        if stopped and queued.state is not TransferState.DONE:
            time.sleep(0.05)
            assert b"\x02" not in peek(target.region), "an aborted write landed"

    def test_T46_a_closed_peer_ends_its_transfers(self, pair: TransportPair) -> None:
        """A sender that drops a node must get its memory back."""
        target = pair.target(LARGE)
        transfers = [pair.post(target, long_write(pair, LARGE, 1)) for _ in range(2)]
        pair.peer.close()
        pair.peer.close()
        for transfer in transfers:
            state = transfer.wait(PATIENCE_S)
            assert state in (TransferState.FAILED, TransferState.ABORTED), f"its peer closed, a write ended as {state}"
        assert pair.refused(target.grant, [WriteOp(pair.source(b"x"), 0, 0, 1)]), "a closed peer still writes"
        pair.peer = pair.sender.connect(pair.node.export_metadata())
        pair.write(pair.target(4096), pattern(4096))

    def test_T47_region_ids_are_never_reused(self, pair: TransportPair) -> None:
        """A late message that names a region must not mean another one."""
        seen: set[str] = set()
        for _ in range(50):
            region = pair.node.allocate(4096)
            assert region.id not in seen, "a region id came twice"
            seen.add(region.id)
            pair.node.unregister(region.id)
            pair.node.unregister(region.id)
        pair.node.unregister("never-there")

    def test_T48_undeclared_abilities_are_refused(self, pair: TransportPair) -> None:
        """What is ignored today is relied on tomorrow."""
        for device in ("cpu", "cuda", "cuda:0", "nonsense"):
            if device.partition(":")[0] not in pair.caps.devices:
                with pytest.raises(ValueError):
                    pair.node.allocate(4096, device)
        assert "cpu" not in pair.caps.devices or pair.node.allocate(4096, "cpu").nbytes == 4096
        for size in (0, -1):
            with pytest.raises(ValueError):
                pair.node.allocate(size)
        if not pair.caps.notify_ordered:
            target = pair.target(64)
            with pytest.raises(ValueError):
                pair.sender.write(pair.peer, target.grant, [], notify=b"done")

    def test_T49_close_is_idempotent_and_leaks_nothing(self, pair: TransportPair) -> None:
        """A node lives for months; what stays behind each time ends it."""
        self._exchange(pair)  # whatever is made once a process
        before = _footprint()
        for _ in range(3):
            self._exchange(pair)
        until(lambda: not _more(before), "giving back everything")

    @staticmethod
    def _exchange(pair: TransportPair) -> None:
        other = TransportPair(pair.spec, pair.config)
        target = other.target(1 << 20)
        other.write(target, pattern(1 << 20))
        fenced = other.target(1 << 20)
        other.write(fenced, b"x")
        other.node.fence(fenced.region.id, other.caps.fence_within_s)
        other.node.unregister(fenced.region.id)
        for _ in range(5):
            other.sender.connect(other.node.export_metadata()).close()
        other.post(target, long_write(other, 1 << 20, 1))
        for transport in (other.sender, other.node):
            transport.close()
            transport.close()

    def test_T50_an_idle_transport_sleeps(self, pair: TransportPair) -> None:
        """Nodes are idle most of the day; a spinning thread also takes the interpreter from the engine."""
        pair.write(pair.target(4096), pattern(4096))
        time.sleep(0.05)
        start, cpu = time.monotonic(), time.process_time()
        time.sleep(0.4)
        used = (time.process_time() - cpu) / (time.monotonic() - start)
        assert used < 0.1, f"an idle transport takes {used:.0%} of a core"

    def test_T51_an_instance_can_follow_another(self, pair: TransportPair) -> None:
        """A node that drains and restarts is a new instance: old grants are nothing to it, new ones work."""
        old = pair.target(4096)
        pair.write(old, b"x")
        pair.node.close()
        assert pair.refused(old.grant, [WriteOp(pair.source(b"y"), 0, 0, 1)]), "a closed node still takes writes"
        pair.node = pair.make()
        pair.node.open()
        pair.peer.close()
        pair.peer = pair.sender.connect(pair.node.export_metadata())
        fresh = pair.target(4096, GUARD)
        assert pair.refused(old.grant, [WriteOp(pair.source(b"y"), 0, 0, 1)]), "a grant outlived its instance"
        pair.write(fresh, pattern(4096))
        assert holds(fresh.region, pattern(4096))

    def test_T52_peers_of_one_target_are_independent(self, pair: TransportPair) -> None:
        """A sender connects for each hand-over; the end of one must not fail another, nor make it start anew."""
        targets = [pair.target(LARGE) for _ in range(2)]
        going = pair.post(targets[0], long_write(pair, LARGE, 1))
        first_byte(targets[0], 1)
        for _ in range(3):
            other = pair.sender.connect(pair.node.export_metadata())
            waiting = pair.sender.write(other, targets[1].grant, [WriteOp(pair.source(b"x"), 0, 0, 1)])
            other.close()
            assert waiting.wait(PATIENCE_S) in FINAL, "a closed peer's write does not end"
            untouched = (TransferState.POSTED, TransferState.DONE)  # done: it was served before the other one
            assert going.wait(0) in untouched, "the end of one peer ended another's write"
        going.abort()
        assert going.wait(PATIENCE_S) in FINAL
        pair.write(pair.target(4096), pattern(4096))

    def test_T53_a_process_that_used_it_ends_well(
        self, pair: TransportPair, process: Callable[[], SideProcess]
    ) -> None:
        """A library that crashes when the process exits turns every drained node into one that died."""
        writer = process()
        writer.ask("connect", **pack_metadata(pair.node.export_metadata()))
        target = pair.target(4096)
        number = writer.ask("write", grant=pack_grant(target.grant), nbytes=4096, fill=1)
        assert writer.ask("wait", number=number, timeout_s=PATIENCE_S)["state"] == "done"
        status = writer.end()
        assert status == 0, f"the process ended with status {status}"


def _more(before: tuple[int, int, int]) -> bool:
    return any(now > then for now, then in zip(_footprint(), before, strict=True))


def _footprint() -> tuple[int, int, int]:
    """Descriptors, threads and files in /dev/shm."""
    gc.collect()
    shared = Path("/dev/shm")
    return (
        len(os.listdir("/proc/self/fd")),
        threading.active_count(),
        len(list(shared.iterdir())) if shared.is_dir() else 0,
    )
