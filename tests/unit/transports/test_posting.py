"""The states of a posted write."""

import threading

from pdhub.api import TransferState
from pdhub.transports.posting import Posting, refused


def test_the_first_final_state_stays():
    calls = []
    posting = Posting(calls.append)
    assert posting.begin()
    posting.finish(TransferState.DONE)
    posting.finish(TransferState.FAILED, ValueError())
    assert (posting.state, posting.error, calls) == (TransferState.DONE, None, [posting])
    assert posting.abort()
    assert posting.state is TransferState.DONE


def test_an_aborted_posting_never_begins():
    posting = Posting(None)
    assert posting.abort()
    assert posting.state is TransferState.ABORTED
    assert not posting.begin()


def test_abort_of_a_worker_that_does_not_stop_is_false():
    posting = Posting(None, abort_within_s=0.01)
    posting.begin()
    assert not posting.abort()
    assert posting.state is TransferState.POSTED
    assert posting.aborting


def test_abort_interrupts_and_waits_for_the_worker():
    posting = Posting(None)
    posting.begin()
    asked = threading.Event()
    posting.interrupt = asked.set

    def work():
        asked.wait(5)
        posting.finish(TransferState.ABORTED)

    worker = threading.Thread(target=work)
    worker.start()
    assert posting.abort()
    worker.join()


def test_a_failure_without_proof_is_no_stop():
    posting = Posting(None)
    posting.begin()
    posting.finish(TransferState.FAILED, OSError(), stopped=False)
    assert not posting.abort()


def test_wait_inside_on_done_returns():
    states = []
    posting = Posting(lambda t: states.append(t.wait()))
    posting.finish(TransferState.DONE)
    assert states == [TransferState.DONE]


def test_refused_has_an_error_and_calls_back():
    calls = []
    transfer = refused("no", calls.append)
    assert transfer.state is TransferState.FAILED
    assert str(transfer.error) == "no"
    assert calls == [transfer]
