"""Rules about the right to write: given by a grant, taken back by a fence, whatever the writer does."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from pdhub.api import PeerMetadata, TransferFailed, TransferState, WriteOp
from pdhub.testing.transport_kit.pair import (
    PATIENCE_S,
    Target,
    TransportPair,
    done,
    first_byte,
    holds,
    long_write,
    pattern,
    repeat,
)
from pdhub.testing.transport_kit.process import SideProcess
from pdhub.testing.transport_writer import pack_grant, pack_metadata, unpack_grant, unpack_metadata

GUARD = 0xA5
LARGE = 8 << 20


def named_memory() -> set[str]:
    """Names of shared memory on this host."""
    shared = Path("/dev/shm")
    return {entry.name for entry in shared.iterdir()} if shared.is_dir() else set()


class RightsRules:
    """T20 to T33."""

    def test_T20_a_forged_grant_is_refused(self, pair: TransportPair) -> None:
        """Whoever can guess a grant can write into other people's answers."""
        target, source = pair.target(4096, GUARD), pair.source(pattern(4096))
        real = target.grant.data
        forged = [secrets.token_bytes(len(real)), bytes(len(real)), b"", real[:-1], real[:-1] + bytes([real[-1] ^ 1])]
        for data in forged:
            grant = replace(target.grant, data=data)
            assert pair.refused(grant, [WriteOp(source, 0, 0, 4096)]), "a forged grant was accepted"
        assert holds(target.region, bytes([GUARD]) * 4096)

    def test_T21_a_grant_opens_only_its_region(self, pair: TransportPair) -> None:
        """The id beside a grant is a label; the right is what the target put into it."""
        mine, other = pair.target(4096, GUARD), pair.target(4096, GUARD)
        assert mine.grant.data != other.grant.data
        source = pair.source(pattern(4096))
        pair.refused(replace(mine.grant, region_id=other.region.id), [WriteOp(source, 0, 0, 4096)])
        assert holds(other.region, bytes([GUARD]) * 4096), "a grant opened another region"

    def test_T22_metadata_is_stable_and_holds_no_grant(self, pair: TransportPair) -> None:
        """It is told to every sender, and logged."""
        before = pair.node.export_metadata()
        targets = [pair.target(4096) for _ in range(3)]
        after = pair.node.export_metadata()
        assert before == after, "metadata changed"
        assert before.transport == pair.node.name == pair.spec.name
        for target in targets:
            assert target.grant.data not in after.data, "a grant can be read out of the metadata"

    def test_T23_unreachable_targets_raise(self, pair: TransportPair) -> None:
        """A wrong address or version is found when connecting, not by a hand-over that never ends."""
        good = pair.node.export_metadata()
        gone = pair.make()
        gone.open()
        address = gone.export_metadata()
        gone.close()
        other = PeerMetadata("another", good.data)
        for bad in (other, PeerMetadata(good.transport, b"\x00garbage"), PeerMetadata(good.transport, b""), address):
            with pytest.raises(TransferFailed):
                pair.sender.connect(bad)

    def test_T24_a_grant_dies_with_its_region(self, pair: TransportPair) -> None:
        """A sender that is late with one more chunk must not write into the next request's landing."""
        source = pair.source(pattern(LARGE))
        for _ in range(3):
            target = pair.target(LARGE)
            pair.write(target, b"x" * 1000)
            pair.node.unregister(target.region.id)
            successors = [pair.target(LARGE, GUARD) for _ in range(2)]
            assert pair.refused(target.grant, [WriteOp(source, 0, 0, LARGE)]), "a grant outlived its region"
            for successor in successors:
                assert holds(successor.region, bytes([GUARD]) * LARGE), "a late write hit another landing"
                pair.node.unregister(successor.region.id)
            with pytest.raises(ValueError):
                pair.node.grant(target.region.id, "writer")

    def test_T25_a_fence_ends_the_right(self, pair: TransportPair) -> None:
        """After True the host hands the capacity to somebody else."""
        target, other = pair.target(LARGE), pair.target(4096)
        source = pair.source(pattern(LARGE))
        pair.write(target, b"x" * 1000)
        assert pair.node.fence(target.region.id, pair.caps.fence_within_s)
        with pytest.raises(ValueError):
            pair.node.grant(target.region.id, "again")
        assert pair.refused(target.grant, [WriteOp(source, 0, 0, LARGE)]), "a fenced grant still writes"
        pair.node.unregister(target.region.id)
        successor = pair.target(LARGE, GUARD)
        assert pair.refused(target.grant, [WriteOp(source, 0, 0, LARGE)])
        assert holds(successor.region, bytes([GUARD]) * LARGE), "a fenced writer hit the next landing"
        pair.write(other, pattern(4096))
        assert holds(other.region, pattern(4096)), "the fence of one region stopped another"

    def test_T26_a_running_write_is_fenced(self, pair: TransportPair) -> None:
        """The usual case: the client left while prefill sends."""
        target = pair.target(LARGE)
        transfer = pair.post(target, long_write(pair, LARGE, 1))
        first_byte(target, 1)
        assert pair.node.fence(target.region.id, pair.caps.fence_within_s), "not fenced in the declared time"
        pair.node.unregister(target.region.id)
        successor = pair.target(LARGE, GUARD)
        state = transfer.wait(PATIENCE_S)
        assert state in (TransferState.FAILED, TransferState.ABORTED), f"a fenced write ended as {state}"
        assert holds(successor.region, bytes([GUARD]) * LARGE), "a fenced write went on in the next landing"

    def test_T27_a_fence_is_idempotent(self, pair: TransportPair) -> None:
        """The host asks again after a time-out, and for regions that nobody ever wrote to."""
        within = pair.caps.fence_within_s
        assert within > 0
        assert pair.caps.fences_by, "say how revocation is proven"
        untouched = pair.node.allocate(4096)
        granted = pair.target(4096)
        for region in (untouched, granted.region):
            for _ in range(2):
                assert pair.node.fence(region.id, within), "a second fence is not proven"
            pair.node.unregister(region.id)
            assert pair.node.fence(region.id, within), "nothing can write to a region that is gone"

    def test_T28_a_stopped_writer_that_resumes_changes_nothing(
        self, pair: TransportPair, process: Callable[[], SideProcess]
    ) -> None:
        """A paused process (SIGSTOP, a debugger, a frozen VM) wakes up in the middle of its copy, minutes later."""
        writer, target, number = _in_a_write(pair, process)
        writer.stop()
        assert pair.node.fence(target.region.id, pair.caps.fence_within_s), "not fenced in the declared time"
        pair.node.unregister(target.region.id)
        successors = [pair.target(LARGE, GUARD) for _ in range(3)]
        writer.resume()
        ended = writer.ask("wait", number=number, timeout_s=PATIENCE_S)
        assert ended["state"] == "failed", f"a fenced write ended as {ended['state']}"
        for successor in successors:
            assert holds(successor.region, bytes([GUARD]) * LARGE), "a resumed writer hit the next landing"
        again = writer.ask("write", grant=pack_grant(successors[0].grant), nbytes=LARGE, fill=2)
        ended = writer.ask("wait", number=again, timeout_s=PATIENCE_S)
        assert ended["state"] == "done", f"the resumed writer's next write ended as {ended['state']}: {ended['error']}"
        assert holds(successors[0].region, b"\x02" * LARGE)

    def test_T29_a_stopped_writer_survives_unregister(
        self, pair: TransportPair, process: Callable[[], SideProcess]
    ) -> None:
        """The host may free a landing whose writer said that it left, but that stands still in its last copy."""
        writer, target, number = _in_a_write(pair, process)
        writer.stop()
        pair.node.unregister(target.region.id)
        successors = [pair.target(LARGE, GUARD) for _ in range(3)]
        writer.resume()
        ended = writer.ask("wait", number=number, timeout_s=PATIENCE_S)
        assert ended["state"] == "failed", f"a write into a freed region ended as {ended['state']}"
        for successor in successors:
            assert holds(successor.region, bytes([GUARD]) * LARGE), "a resumed writer hit the next landing"

    def test_T30_a_killed_writer_is_fenced(self, pair: TransportPair, process: Callable[[], SideProcess]) -> None:
        """kill -9 leaves no goodbye; the landing must come back without a restart of the node."""
        writer, target, _ = _in_a_write(pair, process)
        writer.kill()
        assert pair.node.fence(target.region.id, pair.caps.fence_within_s), "a dead writer could not be fenced"
        pair.node.unregister(target.region.id)
        successor = pair.target(LARGE, GUARD)
        pair.write(successor, pattern(LARGE))
        assert holds(successor.region, pattern(LARGE)), "the node is of no use after a writer died"

    def test_T31_a_killed_target_fails_writes(self, pair: TransportPair, process: Callable[[], SideProcess]) -> None:
        """The sender must answer its request with an error, not wait for a node that is gone."""
        node = process()
        reached = node.ask("target", nbytes=LARGE)
        peer = pair.sender.connect(unpack_metadata(reached["metadata"]))
        grant = unpack_grant(reached["grant"])
        transfer = pair.sender.write(peer, grant, long_write(pair, LARGE, 1))
        node.kill()
        state = transfer.wait(PATIENCE_S)
        assert state is TransferState.FAILED, f"a write to a dead target ended as {state}"
        assert isinstance(transfer.error, TransferFailed)
        peer.close()

    def test_T32_a_killed_target_leaves_nothing(self, pair: TransportPair, process: Callable[[], SideProcess]) -> None:
        """Shared memory with a name outlives its process and fills the host, one crash after the other."""
        before = named_memory()
        node = process()
        reached = node.ask("target", nbytes=LARGE)
        peer = pair.sender.connect(unpack_metadata(reached["metadata"]))
        transfer = pair.sender.write(peer, unpack_grant(reached["grant"]), [WriteOp(pair.source(b"x"), 0, 0, 1)])
        done(transfer)
        node.kill()
        peer.close()
        left = named_memory() - before
        assert not left, f"left in /dev/shm: {sorted(left)}"

    def test_T33_the_fence_of_a_stopped_writer_harms_no_other(
        self, pair: TransportPair, process: Callable[[], SideProcess]
    ) -> None:
        """One client's cancel must not cost another's request; to break a connection is not to revoke a landing."""
        writer, target, _ = _in_a_write(pair, process)
        mine = pair.target(LARGE)
        running = pair.post(
            mine, repeat(WriteOp(pair.source(b"\x03" * LARGE), 0, 0, LARGE), pair.caps.max_ops, 1 << 28)
        )
        writer.stop()
        assert pair.node.fence(target.region.id, pair.caps.fence_within_s), "not fenced in the declared time"
        state = running.wait(PATIENCE_S)
        assert state is TransferState.DONE, f"another writer's write ended as {state}: {running.error!r}"
        assert holds(mine.region, b"\x03" * LARGE)
        pair.write(mine, pattern(LARGE))
        assert holds(mine.region, pattern(LARGE)), "another writer's grant does not work any more"


def _in_a_write(pair: TransportPair, process: Callable[[], SideProcess]) -> tuple[SideProcess, Target, int]:
    """Another process in the middle of a long write: itself, what it writes to, the write's number."""
    writer = process()
    writer.ask("connect", **pack_metadata(pair.node.export_metadata()))
    target = pair.target(LARGE)
    ops = min(3000, pair.caps.max_ops or 3000)
    number = writer.ask("write", grant=pack_grant(target.grant), nbytes=LARGE, fill=1, ops=ops)
    first_byte(target, 1)
    return writer, target, number
