"""Who enters, who waits, who is refused and why."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdhub.core.admission import CROWD, REMEMBERED_S, AdmissionQueue, DroppedReason, Offer, Outcome, Refusal, Ticket


def ticket(name, priority=0, deadline=100.0, tenant="t", arrived=0.0, **more):
    return Ticket(name, deadline, priority, tenant, arrived, **more)


def full(limit=10, capacity=1):
    queue = AdmissionQueue(limit, capacity)
    for n in range(capacity):
        assert queue.offer(ticket(f"running{n}"), 0.0).outcome is Outcome.ADMITTED
    return queue


def served(queue, now=1.0):
    """Everybody in the order in which they are admitted, one release after the other."""
    order, current = [], "running0"
    while admitted := queue.release(current, now):
        (next_ticket,) = admitted
        current = next_ticket.id
        order.append(current)
    return order


def test_free_capacity_admits_at_once_and_the_rest_waits():
    queue = AdmissionQueue(limit=1, capacity=2)
    outcomes = [queue.offer(ticket(name), 0.0).outcome for name in "abcd"]
    assert outcomes == [Outcome.ADMITTED, Outcome.ADMITTED, Outcome.QUEUED, Outcome.REFUSED]
    assert (queue.running, queue.waiting) == (2, 1)


def test_priority_then_deadline_then_arrival():
    queue = full()
    for one in (
        ticket("late", deadline=50),
        ticket("low", priority=-1, deadline=10),
        ticket("high", priority=5, deadline=90),
        ticket("second", deadline=40, arrived=2),
        ticket("first", deadline=40, arrived=1),
    ):
        queue.offer(one, 0.0)
    assert served(queue) == ["high", "first", "second", "late", "low"]


def test_tenants_take_turns_within_a_priority():
    queue = full()
    for n in range(3):
        queue.offer(ticket(f"a{n}", tenant="a", deadline=10 + n), 0.0)
    for n in range(2):
        queue.offer(ticket(f"b{n}", tenant="b", deadline=50 + n), 0.0)
    queue.offer(ticket("c0", tenant="c", deadline=90), 0.0)
    assert served(queue) == ["a0", "b0", "c0", "a1", "b1", "a2"]


@settings(deadline=None, max_examples=150)
@given(
    those=st.lists(st.tuples(st.integers(-1, 1), st.sampled_from("abc"), st.integers(2, 9)), min_size=1, max_size=12)
)
def test_the_order_is_that_of_the_rules(those):
    queue = full(limit=100)
    tickets = [ticket(f"t{n:02}", priority=p, tenant=t, deadline=d) for n, (p, t, d) in enumerate(those)]
    for one in tickets:
        queue.offer(one, 0.0)
    expected = []
    for priority in sorted({one.priority for one in tickets}, reverse=True):
        band = [one for one in tickets if one.priority == priority]
        tenants = list(dict.fromkeys(one.tenant for one in band))
        turns = [
            sorted((o for o in band if o.tenant == tenant), key=lambda o: (o.deadline, o.id)) for tenant in tenants
        ]
        for turn in range(len(band)):
            expected += [mine[turn].id for mine in turns if turn < len(mine)]
    assert served(queue) == expected


def test_a_full_queue_gives_up_what_is_sheddable_and_nothing_else():
    queue = full(limit=3)
    queue.offer(ticket("plain", deadline=10), 0.0)
    low, lower = ticket("low", priority=-1), ticket("lower", priority=-2, deadline=5)
    queue.offer(low, 0.0)
    queue.offer(lower, 0.0)
    vip = ticket("vip", priority=9)
    assert queue.opens(vip, 0.0)
    shed = queue.offer(vip, 0.0).refusals
    assert shed == (Refusal(lower, DroppedReason.SATURATED, None, shed=True),), "the lowest goes first"
    also_low = ticket("also-low", priority=-1, deadline=1)
    assert not queue.opens(also_low, 0.0)
    assert queue.offer(also_low, 0.0) == Offer(Outcome.REFUSED, (Refusal(also_low, DroppedReason.SATURATED, None),))
    assert queue.offer(ticket("equal"), 0.0).refusals[0].ticket is low
    late_vip = ticket("late-vip", priority=9)
    assert queue.offer(late_vip, 0.0).outcome is Outcome.REFUSED, "nobody is given up who is not sheddable"
    assert served(queue) == ["vip", "plain", "equal"]


def test_what_is_sheddable_is_what_the_order_says():
    queue = full(limit=1)
    queue.offer(ticket("a", priority=5, sheddable=True), 0.0)
    assert queue.offer(ticket("b", priority=-1, sheddable=False), 0.0).refusals[0].ticket.id == "a"
    assert queue.offer(ticket("c", priority=9), 0.0).outcome is Outcome.REFUSED


def test_the_tenant_with_most_waiting_loses_first():
    queue = full(limit=4)
    for n in range(2):
        queue.offer(ticket(f"a{n}", priority=-1, tenant="a", deadline=10), 0.0)
    queue.offer(ticket("b0", priority=-1, tenant="b", deadline=90), 0.0)
    queue.offer(ticket("c0", priority=-1, tenant="c", deadline=95), 0.0)
    assert queue.offer(ticket("d"), 0.0).refusals[0].ticket.id == "a1"


def test_an_order_decides_with_its_ranks():
    queue = full()
    for name, rank in (("c", (3.0,)), ("a", (1.0,)), ("nan", (float("nan"),)), ("b", (1.5, 9.0))):
        queue.offer(ticket(name, rank=rank), 0.0)
    assert served(queue) == ["a", "b", "c", "nan"]


def test_no_tenant_fills_the_queue_while_others_come():
    queue = full(limit=20)
    queue.offer(ticket("b0", tenant="b"), 0.0)
    got = [queue.offer(ticket(f"a{n}", tenant="a"), 1.0).outcome for n in range(30)]
    mine = got.count(Outcome.QUEUED)
    assert mine < 19
    assert mine >= CROWD * (20 - queue.waiting) - CROWD
    assert queue.offer(ticket("b1", tenant="b"), 2.0).outcome is Outcome.QUEUED


def test_a_tenant_alone_has_the_whole_queue():
    queue = AdmissionQueue(limit=5, capacity=1)
    queue.offer(ticket("other", tenant="other"), 0.0)
    after = REMEMBERED_S + 1
    assert [queue.offer(ticket(f"a{n}"), after).outcome for n in range(5)] == [Outcome.QUEUED] * 5
    assert queue.offer(ticket("a5"), after).outcome is Outcome.REFUSED


def test_a_tenant_that_crowds_gives_up_its_own_sheddable_one():
    queue = full(limit=6)
    for n in range(5):
        queue.offer(ticket(f"a{n}", priority=-1, tenant="a"), 0.0)
    queue.offer(ticket("b0", priority=-1, tenant="b"), 0.0)
    assert queue.offer(ticket("a9", tenant="a"), 0.0).refusals[0].ticket.tenant == "a"


def test_those_ahead_are_those_that_enter_before():
    queue = full()
    assert queue.ahead(ticket("first")) == 0
    for n in range(3):
        queue.offer(ticket(f"a{n}", tenant="a", deadline=10 + n), 0.0)
    queue.offer(ticket("b0", tenant="b", deadline=50), 0.0)
    queue.offer(ticket("v0", priority=1, tenant="v"), 0.0)
    assert queue.ahead(ticket("new", priority=2)) == 0
    assert queue.ahead(ticket("new", priority=1, tenant="v", deadline=200)) == 1
    assert queue.ahead(ticket("new", tenant="c")) == 3, "one of each tenant, and the more important one"
    assert queue.ahead(ticket("new", priority=-1)) == 5


@settings(deadline=None, max_examples=150)
@given(
    those=st.lists(st.tuples(st.integers(-1, 1), st.sampled_from("abc"), st.integers(2, 9)), min_size=1, max_size=12),
    mine=st.tuples(st.integers(-1, 1), st.sampled_from("abcd"), st.integers(2, 9)),
)
def test_ahead_counts_exactly(those, mine):
    queue = full(limit=100)
    for n, (p, t, d) in enumerate(those):
        queue.offer(ticket(f"t{n:02}", priority=p, tenant=t, deadline=d), 0.0)
    p, t, d = mine
    new = ticket("zz", priority=p, tenant=t, deadline=d)
    before = queue.ahead(new)
    queue.offer(new, 0.0)
    assert queue.ahead(new) == before
    assert served(queue).index("zz") == before


def test_busy_nodes_are_tried_by_one_at_a_time_until_one_gets_in():
    queue = AdmissionQueue(limit=1, capacity=3)
    for name in "abc":
        queue.offer(ticket(name), 0.0)
    queue.entered("a", 0.0)
    assert queue.busy("c", 0.0).outcome is Outcome.QUEUED
    assert queue.busy("b", 0.0).outcome is Outcome.QUEUED, "who was in goes before the limit"
    assert (queue.held_back, queue.running, queue.waiting) == (True, 1, 2)
    assert queue.offer(ticket("d"), 0.0).outcome is Outcome.REFUSED
    assert [t.id for t in queue.probe(1.0)] == ["b"]
    queue.busy("b", 1.0)
    assert [t.id for t in queue.release("a", 2.0)] == ["b"], "a place of ours became free"
    assert [t.id for t in queue.entered("b", 2.0)] == ["c"], "it got in: the next may try"
    assert queue.entered("c", 2.0) == []
    assert not queue.held_back
    assert queue.offer(ticket("e"), 2.0).outcome is Outcome.ADMITTED


def test_held_back_ends_by_itself():
    queue = AdmissionQueue(limit=1, capacity=2)
    queue.offer(ticket("a"), 0.0)
    queue.busy("a", 0.0)
    queue.cancel("a", 0.0)
    assert queue.offer(ticket("b"), 0.0).outcome is Outcome.QUEUED
    assert [t.id for t in queue.probe(1.0)] == ["b"]
    queue.probe(2.0)
    assert not queue.held_back


def test_whoever_was_busy_when_it_closed_is_refused():
    queue = full()
    queue.close()
    assert queue.busy("running0", 0.0).refusals[0].reason is DroppedReason.SHUTTING_DOWN
    with pytest.raises(KeyError):
        queue.busy("running0", 0.0)


def test_reasons_of_refusals():
    nobody = AdmissionQueue(limit=1, capacity=0)
    assert nobody.offer(ticket("a"), 0.0).refusals[0].reason is DroppedReason.NO_ENDPOINTS
    queue = full(limit=0)
    assert queue.offer(ticket("a"), 0.0).refusals[0].reason is DroppedReason.SATURATED
    assert queue.offer(ticket("b", deadline=5), 5.0).refusals[0].reason is DroppedReason.TTL_EXPIRED
    queue.close()
    assert queue.offer(ticket("c"), 0.0).refusals[0].reason is DroppedReason.SHUTTING_DOWN
    assert {reason for reason in DroppedReason if not reason.contended} == {
        DroppedReason.NO_ENDPOINTS, DroppedReason.SHUTTING_DOWN, DroppedReason.INTERNAL,
    }  # fmt: skip


def test_the_late_are_refused_never_admitted():
    queue = full()
    queue.offer(ticket("late", deadline=5), 0.0)
    queue.offer(ticket("fine", deadline=9), 0.0)
    assert queue.next_deadline() == 5
    assert [one.id for one in queue.release("running0", 6.0)] == ["fine"]
    refused = queue.expire(6.0)
    assert [(one.ticket.id, one.reason) for one in refused] == [("late", DroppedReason.TTL_EXPIRED)]
    assert refused[0].retry_after_s == 6.0
    assert queue.expire(1_000.0) == []
    assert queue.next_deadline() is None


def test_whoever_leaves_makes_room_in_any_state():
    queue = full()
    queue.offer(ticket("a"), 0.0)
    queue.offer(ticket("b"), 0.0)
    assert queue.cancel("a", 1.0) == []
    assert [one.id for one in queue.cancel("running0", 1.0)] == ["b"]
    assert queue.cancel("running0", 1.0) == []
    assert queue.cancel("never", 1.0) == []
    assert queue.predicted_wait(1.0) is None, "a cancelled request tells no service time"


def test_capacity_follows_the_nodes():
    queue = full(capacity=2)
    queue.offer(ticket("a"), 0.0)
    assert queue.resize(1, 0.0) == []
    assert queue.release("running0", 1.0) == [], "still as many as there may be"
    assert [one.id for one in queue.resize(3, 1.0)] == ["a"]


def test_closing_refuses_those_who_wait():
    queue = full()
    queue.offer(ticket("a"), 0.0)
    assert [(one.ticket.id, one.reason) for one in queue.close()] == [("a", DroppedReason.SHUTTING_DOWN)]
    assert queue.close() == []
    assert queue.release("running0", 1.0) == []


def test_the_predicted_wait_grows_with_the_queue_and_follows_service_times():
    queue = AdmissionQueue(limit=10, capacity=2)
    assert queue.predicted_wait(0.0) is None
    for name in "ab":
        queue.offer(ticket(name), 0.0)
    queue.release("a", 4.0)
    assert queue.predicted_wait(4.0) == 0.0
    queue.offer(ticket("c"), 4.0)
    assert queue.predicted_wait(4.0) == pytest.approx(2.0)
    queue.offer(ticket("d"), 4.0)
    assert queue.predicted_wait(4.0) == pytest.approx(4.0)
    assert queue.predicted_wait(4.0, ahead=0) == pytest.approx(2.0)
    queue.release("b", 14.0)
    assert queue.predicted_wait(14.0) == pytest.approx((4 + 0.2 * (14 - 4)) / 2)


def test_the_predicted_wait_grows_while_nothing_ends():
    queue = full()
    queue.release("running0", 1.0)
    queue.offer(ticket("a"), 1.0)
    assert queue.predicted_wait(1.5) == pytest.approx(1.0)
    assert queue.predicted_wait(9.0) == pytest.approx(8.0)


def test_an_id_enters_once():
    queue = full()
    queue.offer(ticket("a"), 0.0)
    for name in ("a", "running0"):
        with pytest.raises(ValueError, match="before"):
            queue.offer(ticket(name), 0.0)
    with pytest.raises(KeyError):
        queue.release("a", 0.0)
