"""Any order of events: never over capacity, nobody lost, nobody twice, the order kept, only the sheddable shed."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pdhub.core.admission import AdmissionQueue, Outcome, Ticket

LIMIT = 4
MOST = 3
"""Capacity is never more; so many may come back from busy nodes to a full queue."""


class Door(RuleBasedStateMachine):
    """The model keeps where each ticket is; an admitted one is compared with all that could have been."""

    def __init__(self):
        super().__init__()
        self.queue = AdmissionQueue(limit=LIMIT, capacity=2)
        self.now = 0.0
        self.count = 0
        self.waiting: dict[str, Ticket] = {}
        self.running: set[str] = set()
        self.served_since: dict[str, list[str]] = {}
        self.tickets: dict[str, Ticket] = {}

    def admitted(self, tickets):
        for ticket in tickets:
            self.in_order(ticket)
            del self.waiting[ticket.id]
            self.running.add(ticket.id)
            for waits, served in self.served_since.items():
                if self.waiting[waits].priority == ticket.priority:
                    served.append(ticket.tenant)

    def in_order(self, ticket):
        """None that could enter is more important; none of the same tenant and priority is more urgent; and no
        other tenant was passed over twice for this one."""
        self.served_since.pop(ticket.id, None)
        assert ticket.deadline > self.now
        for other in self.waiting.values():
            if other.id == ticket.id or other.deadline <= self.now:
                continue
            assert other.priority <= ticket.priority
            if other.priority != ticket.priority:
                continue
            if other.tenant == ticket.tenant:
                assert other.deadline >= ticket.deadline
            else:
                mine = [t for t in self.waiting.values() if t.tenant == other.tenant and t.priority == other.priority]
                since = min((self.served_since[t.id] for t in mine if t.deadline > self.now), key=len)
                if other.tenant not in since:
                    assert since.count(ticket.tenant) <= 1

    @rule(
        those=st.lists(
            st.tuples(
                st.sampled_from([0, 0, 0, 1, -1, -2]),
                st.sampled_from([50.0, 50.0, 5.0, 1.0, 0.0]),
                st.sampled_from("abc"),
            ),
            min_size=1,
            max_size=5,
        )
    )
    def come(self, those):
        for priority, wait, tenant in those:
            self.offer(priority, wait, tenant)

    def offer(self, priority, wait, tenant):
        self.count += 1
        ticket = Ticket(f"t{self.count}", self.now + wait, priority, tenant, self.now)
        self.tickets[ticket.id] = ticket
        opens = self.queue.opens(ticket, self.now)
        offer = self.queue.offer(ticket, self.now)
        assert opens == (offer.outcome is not Outcome.REFUSED)
        gone = [refusal.ticket for refusal in offer.refusals]
        if offer.outcome is Outcome.ADMITTED:
            assert not gone
            assert not [t for t in self.waiting.values() if t.deadline > self.now], "nobody is overtaken"
            self.running.add(ticket.id)
        elif offer.outcome is Outcome.QUEUED:
            for other in gone:
                assert other.priority < 0
                assert other.priority < priority or priority >= 0
                lowest = {min(t.priority for t in self.waiting.values())}
                lowest |= {min(t.priority for t in self.waiting.values() if t.tenant == other.tenant)}
                assert other.priority == min(lowest) or (other.tenant == tenant and other.priority in lowest)
                del self.waiting[other.id]
                self.served_since.pop(other.id)
            self.waiting[ticket.id] = ticket
            self.served_since[ticket.id] = []
        else:
            assert gone == [ticket]
        assert len(gone) <= 1

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 2), step=st.sampled_from([0.0, 0.5, 2.0]))
    def release(self, which, step):
        self.now += step
        ticket_id = sorted(self.running)[which % len(self.running)]
        self.running.remove(ticket_id)
        self.admitted(self.queue.release(ticket_id, self.now))

    @precondition(lambda self: self.running or self.waiting)
    @rule(data=st.data())
    def cancel(self, data):
        ticket_id = data.draw(st.sampled_from(sorted(self.running | self.waiting.keys())))
        self.running.discard(ticket_id)
        self.waiting.pop(ticket_id, None)
        self.served_since.pop(ticket_id, None)
        self.admitted(self.queue.cancel(ticket_id, self.now))
        assert self.queue.cancel(ticket_id, self.now) == []

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 2))
    def busy(self, which):
        """It comes back, however full the queue is; as many run as do."""
        ticket_id = sorted(self.running)[which % len(self.running)]
        self.running.remove(ticket_id)
        assert self.queue.busy(ticket_id, self.now).outcome is Outcome.QUEUED
        self.waiting[ticket_id] = self.tickets[ticket_id]
        self.served_since[ticket_id] = []
        assert self.queue.held_back

    @rule()
    def probe(self):
        before = self.queue.held_back
        admitted = self.queue.probe(self.now)
        assert len(admitted) <= 1 or not before or not self.queue.held_back
        self.admitted(admitted)

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 2))
    def entered(self, which):
        self.admitted(self.queue.entered(sorted(self.running)[which % len(self.running)], self.now))

    @rule(capacity=st.sampled_from([0, 1, 1, 2, 3]))
    def resize(self, capacity):
        self.admitted(self.queue.resize(capacity, self.now))

    @rule(step=st.sampled_from([1.0, 10.0]))
    def pass_time(self, step):
        self.now += step

    @rule()
    def expire(self):
        refused = {refusal.ticket.id for refusal in self.queue.expire(self.now)}
        assert refused == {t.id for t in self.waiting.values() if t.deadline <= self.now}
        for ticket_id in refused:
            del self.waiting[ticket_id]
            del self.served_since[ticket_id]

    @invariant()
    def the_counts_are_right(self):
        assert self.queue.running == len(self.running)
        assert self.queue.waiting == len(self.waiting) <= LIMIT + MOST
        deadlines = [ticket.deadline for ticket in self.waiting.values()]
        assert self.queue.next_deadline() == (min(deadlines) if deadlines else None)

    @invariant()
    def no_place_is_free_while_somebody_waits(self):
        if any(ticket.deadline > self.now for ticket in self.waiting.values()):
            assert self.queue.running >= self.queue.capacity or self.queue.held_back

    @invariant()
    def a_few_probes_end_every_holding_back(self):
        assert self.queue.predicted_wait(self.now) is None or self.queue.predicted_wait(self.now) >= 0

    def teardown(self):
        """Holding back ends, everybody can leave, and then nothing is left."""
        for _ in range(MOST + 1):
            self.admitted(self.queue.probe(self.now))
        assert not self.queue.held_back or self.queue.capacity == 0 or self.queue.running > self.queue.capacity
        self.queue.close()
        for ticket_id in self.running:
            assert self.queue.release(ticket_id, self.now) == []
        assert (self.queue.running, self.queue.waiting) == (0, 0)


TestDoor = Door.TestCase
TestDoor.settings = settings(deadline=None, max_examples=60, stateful_step_count=40)
