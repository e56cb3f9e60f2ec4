"""How a write is cut: every byte once, in place, in few large pieces."""

from hypothesis import given, settings
from hypothesis import strategies as st

from pdhub.api import Region, WriteOp
from pdhub.onesided.pieces import MAX_PIECES, batches

SOURCE = Region("a", 1000, 1 << 20)
ops = st.lists(
    st.builds(WriteOp, st.just(SOURCE), st.integers(0, 5000), st.integers(0, 5000), st.integers(0, 300)), max_size=30
)


def bytes_of(pieces):
    return [(p.source + n, p.target + n) for p in pieces for n in range(p.nbytes)]


@given(ops, st.integers(1, 700))
@settings(deadline=None, max_examples=100)
def test_every_byte_once_and_in_order(given_ops, most):
    cut = list(batches(given_ops, 1 << 40, "cpu", most))
    expected = [
        (1000 + op.local_offset + n, (1 << 40) + op.remote_offset + n) for op in given_ops for n in range(op.nbytes)
    ]
    assert bytes_of(p for batch in cut for p in batch) == expected
    assert all(0 < sum(p.nbytes for p in batch) <= most for batch in cut)
    assert all(p.nbytes for batch in cut for p in batch)


def test_neighbours_become_one_piece():
    row = [WriteOp(SOURCE, 100 * n, 500 + 100 * n, 100) for n in range(50)]
    ((piece,),) = batches(row, 0, "cuda:1", 1 << 20)
    assert piece == (1000, "cpu", 500, "cuda:1", 5000)


def test_neighbours_on_one_side_only_stay_apart():
    apart = [WriteOp(SOURCE, 0, 0, 10), WriteOp(SOURCE, 10, 20, 10), WriteOp(SOURCE, 30, 30, 10)]
    (batch,) = batches(apart, 0, "cpu", 1 << 20)
    assert len(batch) == 3


def test_a_batch_has_a_bounded_number_of_pieces():
    scattered = [WriteOp(SOURCE, 2 * n, n, 1) for n in range(3 * MAX_PIECES + 1)]
    assert [len(batch) for batch in batches(scattered, 0, "cpu", 1 << 30)] == [MAX_PIECES] * 3 + [1]
