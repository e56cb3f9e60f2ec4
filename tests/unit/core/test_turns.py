"""The line in front of a prefill instance: how much is sent ahead, who is next, what it costs to be behind."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdhub.core.admission import DroppedReason, Outcome, Ticket
from pdhub.core.pace import Pace
from pdhub.core.turns import UNTRIED_TOKENS, Ahead, Backlog, TurnQueue, restless


def ticket(name: str, weight: int = 100, priority: int = 0, deadline: float = 1e6, tenant: str = "t") -> Ticket:
    return Ticket(name, deadline, priority, tenant, weight=weight)


def measured(per_s: float = 1000.0, seconds: float = 0.1) -> TurnQueue:
    """A line whose instance has computed so many tokens a second; idle at second 10."""
    line = TurnQueue(Ahead(seconds))
    line.offer(ticket("first", int(per_s)), 9.0)
    line.release("first", 10.0)
    return line


class TestPace:
    def test_unknown_before_the_first_answer(self):
        pace = Pace()
        pace.sent(100, 0.0)
        assert pace.per_s(5.0) is None

    def test_side_by_side_counts_once_in_time(self):
        pace = Pace()
        for _ in range(4):
            pace.sent(250, 1.0)
        for _ in range(4):
            pace.answered(250, 2.0)
        assert pace.per_s(2.0) == pytest.approx(1000, rel=0.3)

    def test_idle_time_does_not_count(self):
        pace = Pace()
        for start in (0.0, 100.0, 1000.0):
            pace.sent(500, start)
            pace.answered(500, start + 1)
        assert pace.per_s(5000.0) == pytest.approx(500)

    def test_overdue_is_slower(self):
        pace = Pace()
        pace.sent(1000, 0.0)
        pace.answered(1000, 1.0)
        pace.sent(1000, 1.0)
        assert pace.per_s(1.5) == pytest.approx(1000)
        assert pace.per_s(101.0) < 25

    def test_who_leaves_teaches_nothing(self):
        pace = Pace()
        pace.sent(1000, 0.0)
        pace.answered(1000, 1.0)
        pace.sent(1000, 1.0)
        pace.dropped(1000, 500.0)
        assert (pace.per_s(600.0), pace.under_way) == (pytest.approx(1000), 0)


class TestBound:
    def test_untried(self):
        line = TurnQueue(Ahead())
        offers = [line.offer(ticket(f"t{n}", UNTRIED_TOKENS // 2), 0.0).outcome for n in range(3)]
        assert offers == [Outcome.ADMITTED, Outcome.ADMITTED, Outcome.QUEUED]
        assert line.next_s(0.0) is None

    def test_so_many_seconds_of_work(self):
        line = measured(per_s=1000, seconds=0.5)
        assert line.capacity == 500
        offers = [line.offer(ticket(f"t{n}", 250), 10.0).outcome for n in range(3)]
        assert offers == [Outcome.ADMITTED, Outcome.ADMITTED, Outcome.QUEUED]

    def test_the_next_is_sent_shortly_before_the_last_is_computed(self):
        line = measured(per_s=1000, seconds=0.05)
        line.offer(ticket("runs", 400), 10.0)
        line.offer(ticket("waits", 400), 10.1)
        line.offer(ticket("third", 400, deadline=2e6), 10.1)
        at = line.next_s(10.1)
        assert at == pytest.approx(10.35, abs=0.002)
        assert line.probe(at - 0.01) == []
        assert [t.id for t in line.probe(at + 0.001)] == ["waits"]
        assert line.next_s(at + 0.001) is None, "not before one of the two has been answered"

    def test_tokens_instead(self):
        line = TurnQueue(Ahead(seconds=0.1, tokens=50))
        line.offer(ticket("a", 1000), 0.0)
        line.release("a", 1.0)
        assert line.capacity == 50

    def test_changed_while_some_wait(self):
        line = TurnQueue(Ahead(tokens=100))
        for name in "abc":
            line.offer(ticket(name), 0.0)
        assert [t.id for t in line.set_ahead(Ahead(tokens=200), 0.0)] == ["b"]

    def test_one_prompt_at_least(self):
        assert measured().offer(ticket("long", 100_000), 10.0).outcome is Outcome.ADMITTED


class TestOrder:
    def test_the_important_overtake_what_waits(self):
        line = measured()
        for name, priority in (("bulk-1", -1), ("bulk-2", -1), ("high", 5)):
            line.offer(ticket(name, priority=priority), 10.0)
        assert [t.id for t in line.release("bulk-1", 10.1)] == ["high"]

    def test_nobody_slips_past_one_that_is_too_heavy(self):
        line = measured(per_s=1000, seconds=0.1)
        line.offer(ticket("runs", 100), 10.0)
        line.offer(ticket("heavy", 5000, deadline=20.0), 10.0)
        assert line.offer(ticket("light", 1, deadline=30.0), 10.0).outcome is Outcome.QUEUED
        assert [t.id for t in line.release("runs", 10.1)] == ["heavy"]

    def test_late_is_late(self):
        line = measured()
        line.offer(ticket("runs"), 10.0)
        line.offer(ticket("waits", deadline=11.0), 10.0)
        assert [(r.ticket.id, r.reason) for r in line.expire(11.0)] == [("waits", DroppedReason.TTL_EXPIRED)]


class TestBacklog:
    def test_idle(self):
        assert measured().backlog(ticket("me"), 0, 10.0) == Backlog(0.0, 0)

    def test_room_is_left(self):
        line = measured(seconds=0.5)
        line.offer(ticket("runs", 100), 10.0)
        assert line.backlog(ticket("me", 100), 100, 10.0) == Backlog(0.0, 100)

    def test_behind_others(self):
        line = measured(per_s=1000, seconds=0.1)
        for n in range(4):
            line.offer(ticket(f"t{n}"), 10.0)
        found = line.backlog(ticket("me", deadline=2e6), 100, 10.0)
        assert found.wait_ms == pytest.approx(300, rel=0.01)
        assert found.tokens == 100

    def test_what_is_computed_already_is_not_ahead(self):
        line = measured(per_s=1000, seconds=0.05)
        line.offer(ticket("t", 100), 10.0)
        assert line.backlog(ticket("me"), 100, 10.02).wait_ms == pytest.approx(30, rel=0.01)

    def test_only_those_count_that_go_first(self):
        line = measured(per_s=1000, seconds=0.05)
        for n in range(10):
            line.offer(ticket(f"t{n}", priority=-1), 10.0)
        assert line.backlog(ticket("me", priority=1), 100, 10.0).wait_ms == pytest.approx(50, rel=0.01)

    def test_its_own_turn(self):
        line = measured()
        line.offer(ticket("me"), 10.0)
        assert line.backlog(ticket("me"), 70, 10.0) == Backlog(0.0, 70)

    def test_before_anything_was_measured(self):
        line = TurnQueue(Ahead(tokens=100))
        line.offer(ticket("a"), 0.0)
        line.offer(ticket("b"), 0.0)
        assert line.backlog(ticket("me", deadline=2e6), 100, 0.0) == Backlog(0.0, 200)


class TestRestless:
    def test_somebody_moves_to_where_nothing_is_to_do(self):
        lines = {"busy": measured(), "idle": measured()}
        for n in range(3):
            lines["busy"].offer(ticket(f"t{n}"), 10.0)
        assert restless(lines, "idle", 10.0) == ("busy", ticket("t1"))

    def test_nobody_where_there_is_a_line(self):
        lines = {"busy": measured(), "full": measured()}
        for n in range(3):
            lines["busy"].offer(ticket(f"t{n}"), 10.0)
            lines["full"].offer(ticket(f"u{n}"), 10.0)
        assert restless(lines, "full", 10.0) is None

    def test_alone(self):
        assert restless({"idle": measured()}, "idle", 10.0) is None


events = st.lists(
    st.tuples(
        st.sampled_from(["come", "come", "come", "answer", "answer", "cancel", "expire", "probe"]),
        st.integers(0, 7),
        st.sampled_from([1, 40, 100, 900]),
        st.sampled_from([-1, 0, 0, 5]),
        st.sampled_from("ab"),
    ),
    max_size=60,
)


@settings(deadline=None, max_examples=150)
@given(events=events, ahead=st.sampled_from([Ahead(0.1), Ahead(2.0), Ahead(tokens=1), Ahead(tokens=150)]))
def test_any_order_of_events(events, ahead):
    """Nobody is lost or twice there, no more is outstanding than may be, nobody waits at an idle instance, and none
    that waits is more important than who has its turn."""
    line, now = TurnQueue(ahead), 0.0
    waiting: dict[str, Ticket] = {}
    running: dict[str, Ticket] = {}

    def came(tickets):
        for each in tickets:
            assert all(other.priority <= each.priority for other in waiting.values() if other.deadline > now)
            running[each.id] = waiting.pop(each.id)
            checked(each)

    def checked(each):
        before = [t.weight for t in running.values() if t.id != each.id]
        if line._ahead_of.tokens is None:
            before = before[1:]  # of which some may be computed already
        assert sum(before) < line.capacity or not before

    for number, (what, pick, weight, priority, tenant) in enumerate(events):
        now += 0.25
        if what == "come":
            mine = Ticket(f"t{number}", now + 3 * (pick + 1), priority, tenant, now, weight=weight)
            outcome = line.offer(mine, now).outcome
            if outcome is Outcome.ADMITTED:
                assert not [t for t in waiting.values() if t.deadline > now]
                running[mine.id] = mine
                checked(mine)
            else:
                assert outcome is Outcome.QUEUED
                waiting[mine.id] = mine
        elif what == "answer" and running:
            name = list(running)[pick % len(running)]
            del running[name]
            came(line.release(name, now))
        elif what == "cancel" and (running or waiting):
            name = list({**running, **waiting})[pick % (len(running) + len(waiting))]
            running.pop(name, None)
            waiting.pop(name, None)
            came(line.cancel(name, now))
        elif what == "probe":
            came(line.probe(now))
        elif what == "expire":
            for refusal in line.expire(now):
                del waiting[refusal.ticket.id]
        assert line.load == sum(t.weight for t in running.values())
        assert (line.waiting, line.running) == (len(waiting), len(running))
        assert running or not [t for t in waiting.values() if t.deadline > now]
        for each in waiting.values():
            found = line.backlog(each, line.load, now)
            assert found.wait_ms >= 0
            assert found.tokens >= 0
            assert line.ahead(each) <= sum(t.weight for t in waiting.values()) - each.weight
    for name in [*running, *waiting]:
        line.cancel(name, now)
    assert (line.load, line.waiting, line.running, line._pace.under_way) == (0, 0, 0, 0)
