"""The scheduler's side of the connector, without vLLM."""

from __future__ import annotations

import pickle

import pytest

from pdhub.connector.ledger import Ledger
from pdhub.connector.match import match
from pdhub.connector.steps import Advance, End, Failure, Report, Step
from pdhub.wire.http import HandoffParams
from tests.unit.connector.vllm_steps import PARAMS, asked, new, output


@pytest.mark.parametrize(
    "params", [None, {}, {"do_remote_decode": True}, {"pdhub": None}, "pdhub", [1], {"tilert_host": "h"}], ids=str
)
def test_requests_of_others_leave_no_trace(params):
    ledger = Ledger()
    ledger.arrived("r", params, 10)
    assert ledger.step(output(new("r", [1]), r=10)) == Step()
    assert ledger.finished("r") == (False, None)
    assert not ledger.pending
    ledger.reported(Report({"r": Failure("x", "y")}), ["r"])
    assert ledger.finished("r") == (False, None)


def test_a_prompt_in_one_step():
    ledger = Ledger()
    ledger.arrived("r", asked(), 20)
    step = ledger.step(output(new("r", [4, 5]), r=20))
    (start,) = step.starts
    assert (start.req_id, start.tokens, start.params.transfer_id) == ("r", 20, "t")
    assert step.advances == (Advance("r", ((4, 5),), True, 0, 20),)
    assert ledger.finished("r") == (True, {"pdhub": {"transfer_id": "t", "tokens": 20}})
    assert ledger.pending
    assert ledger.step(output()) == Step(ends=(End("r", True, True),))
    assert ledger.pending
    ledger.reported(None, ["r"])
    assert not ledger.pending


def test_it_joins_before_it_is_scheduled_and_counts_cached_blocks():
    ledger = Ledger()
    ledger.arrived("r", asked(), 40)
    assert [start.req_id for start in ledger.step(output()).starts] == ["r"]
    step = ledger.step(output(new("r", [1, 2, 3], 32), r=8))
    assert not step.starts
    assert step.advances == (Advance("r", ((1, 2, 3),), True, 32, 40),)


def test_chunks_add_blocks_and_output_tokens_are_none_of_ours():
    ledger = Ledger()
    ledger.arrived("r", asked(), 48)
    assert ledger.step(output(new("r", [1]), r=16)).advances == (Advance("r", ((1,),), True, 0, 16),)
    assert ledger.step(output(cached={"r": ([2], 16)}, r=16)).advances == (Advance("r", ((2,),), False, 16, 32),)
    assert ledger.step(output(cached={"r": (None, 32)}, r=17)).advances == (Advance("r", (), False, 32, 48),)
    assert ledger.step(output(cached={"r": ([9], 49)}, r=1)).advances == ()
    assert ledger.finished("r")[0]


def test_a_preempted_prompt_starts_again_with_other_blocks():
    ledger = Ledger()
    ledger.arrived("r", asked(), 40)
    ledger.step(output(new("r", [1, 2]), r=32))
    assert ledger.step(output(preempted=("r", "other"))).preempted == ("r",)
    old = ledger.step(output(cached={"r": ([7, 8, 9], 0)}, resumed=("r",), r=40))
    assert old.advances == (Advance("r", ((7, 8, 9),), True, 0, 40),)
    ledger.step(output(preempted=("r",)))
    newer = ledger.step(output(new("r", [5], 0), r=16))
    assert newer.advances == (Advance("r", ((5,),), True, 0, 16),)


def test_an_aborted_prompt_is_not_complete_and_one_that_never_ran_is_not_held():
    ledger = Ledger()
    ledger.arrived("r", asked(), 40)
    ledger.step(output(new("r", [1]), r=16))
    assert ledger.finished("r")[0]
    assert ledger.step(output()).ends == (End("r", True, False),)
    ledger.arrived("waits", asked("u"), 40)
    ledger.step(output())
    assert not ledger.finished("waits")[0]
    assert ledger.step(output()).ends == (End("waits", False, False),)
    ledger.arrived("unseen", asked("v"), 40)
    assert not ledger.finished("unseen")[0]
    assert ledger.step(output()) == Step()


def test_what_failed_is_in_the_answer():
    ledger = Ledger()
    ledger.arrived("r", asked(), 40)
    ledger.step(output(new("r", [1]), r=16))
    ledger.reported(Report({"r": Failure("transfer_failed", "gone"), "x": Failure("a", "b")}), [])
    held, told = ledger.finished("r")
    assert held
    assert told == {
        "pdhub": {
            "transfer_id": "t",
            "tokens": 40,
            "error": {"code": "transfer_failed", "message": "gone", "need": 0},
        }
    }


def test_a_prompt_that_cannot_fit_is_known_before_anything_is_computed():
    fits = {**PARAMS, "capacity_tokens": 32, "prompt_limit": 100, "context": 120}
    assert isinstance(match({"pdhub": fits}, 32), HandoffParams)
    assert match({"pdhub": fits}, 33) == Failure(
        "landing_too_small", "the landing holds 32 tokens, the prompt has 33", 33
    )
    found = match({"pdhub": fits}, 101)
    assert isinstance(found, Failure)
    assert found.code == "context_length_exceeded"
    assert "maximum context length is 120 tokens" in found.message
    assert "(101 in the messages, 20 in the completion)" in found.message
    ledger = Ledger()
    ledger.arrived("r", {"pdhub": fits}, 33)
    assert ledger.step(output(new("r", [1]), r=33)) == Step()
    held, told = ledger.finished("r")
    assert not held
    assert told is not None
    assert told["pdhub"]["error"]["need"] == 33
    assert not ledger.pending


@pytest.mark.parametrize("junk", [1, "x", [], {"transfer_id": 3}, {**PARAMS, "port": "80"}], ids=str)
def test_parameters_that_cannot_be_read_fail_the_hand_over_alone(junk):
    found = match({"pdhub": junk}, 3)
    assert isinstance(found, Failure)
    assert found.code == "invalid_request"


def test_steps_and_reports_survive_pickling():
    ledger = Ledger()
    ledger.arrived("r", asked(), 20)
    step = ledger.step(output(new("r", [4, 5]), r=20))
    assert pickle.loads(pickle.dumps(step)) == step
    merged = Report({"a": Failure("x", "1")}).merged(Report({"a": Failure("y", "2"), "b": Failure("z", "3")}))
    assert merged.failures == {"a": Failure("x", "1"), "b": Failure("z", "3")}
