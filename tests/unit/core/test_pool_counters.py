import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdhub.core.pool import Landings, SlotQueue


def test_landings_refuse_what_would_be_a_fault_of_the_caller():
    landings = Landings(1)
    landings.take()
    assert landings.free == 0
    with pytest.raises(RuntimeError, match="no landing is free"):
        landings.take()
    landings.give_back()
    with pytest.raises(RuntimeError, match="freed twice"):
        landings.give_back()
    with pytest.raises(ValueError, match="at least one landing"):
        Landings(0)
    with pytest.raises(ValueError, match="at least one slot"):
        SlotQueue(0)


def test_slots_go_to_whoever_asked_first():
    slots = SlotQueue(1)
    assert slots.ask("a")
    assert not slots.ask("b")
    assert not slots.ask("c")
    assert slots.ask("a")
    assert slots.give_back("b") == []
    assert slots.give_back("a") == ["c"]
    assert slots.give_back("a") == []
    assert (slots.free, slots.waiting) == (0, 0)
    assert slots.give_back("c") == []
    assert slots.free == 1


@settings(deadline=None, max_examples=100)
@given(st.integers(1, 3), st.lists(st.tuples(st.booleans(), st.sampled_from("abcdefg")), max_size=40))
def test_slots_are_never_lost_nor_given_to_more_than_there_are(total, moves):
    slots = SlotQueue(total)
    held, line = set(), []
    for ask, key in moves:
        if ask:
            if slots.ask(key):
                held.add(key)
            elif key not in line:
                line.append(key)
        else:
            held.discard(key)
            if key in line:
                line.remove(key)
            for granted in slots.give_back(key):
                assert granted == line.pop(0)
                held.add(granted)
        assert len(held) == total - slots.free <= total
        assert slots.waiting == len(line)
        assert not (line and slots.free)
