"""Rules about bytes: whole, in place, and nowhere else."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from pdhub.api import Region, Transfer, TransferState, WriteOp
from pdhub.testing.transport_kit.pair import (
    PATIENCE_S,
    Target,
    TransportPair,
    done,
    holds,
    pattern,
    peek,
    poke,
    until,
)

SIZES = (1, 3, 4095, 4096, 4097, 65_537, (1 << 20) + 1, (5 << 20) + 7)
GUARD = 0xA5


class BytesRules:
    """T01 to T13."""

    def test_T01_bytes_arrive_whole(self, pair: TransportPair) -> None:
        """Half a block of KV is not an error that anybody sees: it is a wrong answer."""
        for seed, size in enumerate(SIZES):
            target, data = pair.target(size), pattern(size, seed)
            pair.write(target, data)
            assert holds(target.region, data), f"{size} bytes arrived changed"

    def test_T02_done_means_visible(self, pair: TransportPair) -> None:
        """The node starts to read when it hears "done"; bytes that are still on their way would be read as zeros."""
        size = 256 << 10
        target = pair.target(size)
        seen: list[bytes] = []
        for seed in range(20):
            data = pattern(size, seed)
            source = pair.source(data)
            seen.clear()
            transfer = pair.post(
                target, [WriteOp(source, 0, 0, size)], on_done=lambda _: seen.append(peek(target.region))
            )
            done(transfer)
            assert holds(target.region, data), "wait() returned before the bytes were visible"
            until(lambda: bool(seen), "on_done")
            assert seen == [data], "on_done was called before the bytes were visible"
            pair.sender.unregister(source.id)

    def test_T03_nothing_else_is_touched(self, pair: TransportPair) -> None:
        """A write one byte too long damages another request's KV."""
        size = 64 << 10
        before, target, after = (pair.target(size, GUARD) for _ in range(3))
        source = pair.source(pattern(size))
        for offset, nbytes in ((0, 1), (1, 4097), (4096, 8192), (size - 1, 1), (size - 5000, 5000)):
            poke(target.region, bytes([GUARD]) * size)
            done(pair.post(target, [WriteOp(source, size - nbytes, offset, nbytes)]))
            expected = bytearray([GUARD]) * size
            expected[offset : offset + nbytes] = pattern(size)[size - nbytes :]
            assert holds(target.region, bytes(expected)), f"{nbytes} bytes at {offset} touched something else"
        for neighbour in (before, after):
            assert holds(neighbour.region, bytes([GUARD]) * size), "a neighbouring region was touched"
        assert holds(source, pattern(size)), "the source was changed"

    def test_T04_offsets_are_checked_at_the_writer(self, pair: TransportPair) -> None:
        """A planning mistake must be an exception where it was made, before any byte moves."""
        target, source = pair.target(4096, GUARD), pair.source(pattern(4096))
        for local, remote, nbytes in (
            (0, 0, 4097), (1, 0, 4096), (0, 1, 4096), (0, 4096, 1), (4096, 0, 1),
            (-1, 0, 10), (0, -1, 10), (0, 0, -1), (0, 1 << 62, 1), (0, (1 << 64) - 1, 2),
        ):  # fmt: skip
            with pytest.raises(ValueError):
                pair.post(target, [WriteOp(source, local, remote, nbytes)])
            with pytest.raises(ValueError):
                pair.post(target, [WriteOp(source, 0, 0, 1), WriteOp(source, local, remote, nbytes)])
        assert holds(target.region, bytes([GUARD]) * 4096), "a refused write moved bytes"

    def test_T05_bounds_hold_beyond_the_grants_word(self, pair: TransportPair) -> None:
        """A grant that lies about its size must not open what lies behind the region."""
        target, behind = pair.target(100_000, GUARD), pair.target(100_000, GUARD)
        lying = replace(target.grant, nbytes=1 << 30)
        source = pair.source(pattern(200_000))
        assert pair.refused(lying, [WriteOp(source, 0, 50_000, 100_000)]), "more than the region has was accepted"
        assert pair.refused(lying, [WriteOp(source, 0, 100_000, 1)]), "a byte behind the region was accepted"
        assert holds(behind.region, bytes([GUARD]) * 100_000)
        pair.write(behind, pattern(100_000, 3))

    def test_T06_an_empty_write_is_done(self, pair: TransportPair) -> None:
        """A shard without bytes in a chunk is normal and must not hang its hand-over."""
        target, source = pair.target(4096, GUARD), pair.source(pattern(16))
        done(pair.post(target, []))
        done(pair.post(target, [WriteOp(source, 16, 4096, 0)]))
        assert holds(target.region, bytes([GUARD]) * 4096)

    def test_T07_many_operations(self, pair: TransportPair) -> None:
        """A chunk has one operation a layer and block range; all of them count, in any arrangement."""
        count = min(500, pair.caps.max_ops or 500)
        size = 1000 * count
        data = pattern(size)
        target, source = pair.target(size), pair.source(data)
        order = [(7 * n + 3) % count if count % 7 else n for n in range(count)]
        done(pair.post(target, [WriteOp(source, n * 1000, n * 1000, 1000) for n in order]))
        assert holds(target.region, data), "an operation is missing"

    def test_T08_max_ops_is_kept(self, pair: TransportPair) -> None:
        """The sender splits by this figure; a declared limit that is not enforced is found on other hardware."""
        limit = pair.caps.max_ops
        target, source = pair.target(64), pair.source(pattern(64))
        op = WriteOp(source, 0, 0, 64)
        if limit:
            done(pair.post(target, [op] * limit))
            with pytest.raises(ValueError):
                pair.post(target, [op] * (limit + 1))
        else:
            done(pair.post(target, [op] * 20_000))

    def test_T09_live_regions_are_disjoint(self, pair: TransportPair) -> None:
        """Two requests in one span is how one client gets another's answer."""
        regions = [pair.node.allocate(size) for size in (1, 100, 4096, 70_000, 1 << 20, 1 << 20)]
        for number, region in enumerate(regions):
            poke(region, bytes([number + 1]) * region.nbytes)
        for number, region in enumerate(regions):
            assert holds(region, bytes([number + 1]) * region.nbytes), "two live regions share memory"

    def test_T10_concurrent_writers_do_not_mix(self, pair: TransportPair) -> None:
        """Prefill sends many requests at once through one connection."""
        size, threads, rounds = 200_001, 8, 4
        targets = [pair.target(size) for _ in range(threads)]

        def run(number: int) -> None:
            for round_ in range(rounds):
                data = pattern(size, 100 * number + round_)
                pair.write(targets[number], data)
                assert holds(targets[number].region, data), f"writer {number} finds other bytes in round {round_}"

        with ThreadPoolExecutor(threads) as pool:
            for running in [pool.submit(run, number) for number in range(threads)]:
                running.result(2 * PATIENCE_S)

    def test_T11_several_writers_share_a_region(self, pair: TransportPair) -> None:
        """Tensor-parallel ranks write their shards into one landing, each with a grant of its own."""
        size = 300_000
        one = pair.target(2 * size)
        two = Target(one.region, pair.node.grant(one.region.id, "second"))
        data = pattern(2 * size)
        source = pair.source(data)
        transfers = [
            pair.post(one, [WriteOp(source, 0, 0, size)]),
            pair.post(two, [WriteOp(source, size, size, size)]),
        ]
        for transfer in transfers:
            done(transfer)
        assert holds(one.region, data)

    def test_T12_registered_memory_is_a_source(self, pair: TransportPair) -> None:
        """An engine's own buffer is sent without a copy; memory that cannot be used is refused, not read wrongly."""
        data = pattern(100_000)
        mine = bytearray(data)
        view = memoryview(mine)
        region = pair.sender.register(Region("mine", 0, len(mine), view=view, owner=mine))
        target = pair.target(len(mine))
        transfer: Transfer = pair.post(target, [WriteOp(region, 0, 0, len(mine))])
        assert transfer.wait(PATIENCE_S) is TransferState.DONE
        assert holds(target.region, data)
        pair.sender.unregister(region.id)
        with pytest.raises(ValueError):
            pair.post(target, [WriteOp(region, 0, 0, 1)])
        for bad in (
            Region("bad", 0, 5, view=memoryview(b"12345")),
            Region("bad", 0, 10, view=memoryview(bytearray(5))),
        ):
            with pytest.raises(ValueError):
                pair.sender.register(bad)

    def test_T13_preparing_moves_nothing_and_changes_no_right(self, pair: TransportPair) -> None:
        """A sender prepares each landing when it joins, long before it has bytes; some are fenced before they come."""
        target, fenced, source = pair.target(4096, GUARD), pair.target(4096, GUARD), pair.source(pattern(4096))
        for grant in (target.grant, target.grant, fenced.grant):
            pair.peer.prepare(grant)
        for junk in (b"", target.grant.data[:-1], bytes(len(target.grant.data))):
            pair.peer.prepare(replace(target.grant, data=junk))
        done(pair.post(target, [WriteOp(source, 0, 4096, 0)]))
        assert holds(target.region, bytes([GUARD]) * 4096), "preparing moved bytes"
        assert pair.node.fence(fenced.region.id, pair.caps.fence_within_s), "a prepared landing could not be fenced"
        assert pair.refused(fenced.grant, [WriteOp(source, 0, 0, 4096)]), "preparing outlived the fence"
        pair.write(target, pattern(4096))
        assert holds(target.region, pattern(4096))
