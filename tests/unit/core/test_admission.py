"""Who enters, who waits, who is refused and why."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdhub.core.admission import AdmissionQueue, DroppedReason, Offer, Outcome, Refusal, Ticket


def ticket(name, priority=0, deadline=100.0, tenant="t", arrived=0.0):
    return Ticket(name, deadline, priority, tenant, arrived)


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
    queue = full(limit=12)
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


def test_a_full_queue_gives_up_its_last_for_a_more_important_one():
    queue = full(limit=2)
    queue.offer(ticket("soon", deadline=10), 0.0)
    later = ticket("later", deadline=20)
    queue.offer(later, 0.0)
    offer = queue.offer(ticket("vip", priority=1), 0.0)
    assert offer == Offer(Outcome.QUEUED, (Refusal(later, DroppedReason.EVICTED_PRIORITY, None),))
    equal = ticket("equal", deadline=1)
    assert queue.offer(equal, 0.0) == Offer(Outcome.REFUSED, (Refusal(equal, DroppedReason.SATURATED, None),))
    assert served(queue) == ["vip", "soon"]


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
    assert queue.predicted_wait() is None, "a cancelled request tells no service time"


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
    assert queue.predicted_wait() is None
    for name in "ab":
        queue.offer(ticket(name), 0.0)
    queue.release("a", 4.0)
    assert queue.predicted_wait() == 0.0
    queue.offer(ticket("c"), 4.0)
    assert queue.predicted_wait() == pytest.approx(2.0)
    queue.offer(ticket("d"), 4.0)
    assert queue.predicted_wait() == pytest.approx(4.0)
    queue.release("b", 14.0)
    assert queue.predicted_wait() == pytest.approx((4 + 0.2 * (14 - 4)) / 2)


def test_an_id_enters_once():
    queue = full()
    queue.offer(ticket("a"), 0.0)
    for name in ("a", "running0"):
        with pytest.raises(ValueError, match="before"):
            queue.offer(ticket(name), 0.0)
    with pytest.raises(KeyError):
        queue.release("a", 0.0)
