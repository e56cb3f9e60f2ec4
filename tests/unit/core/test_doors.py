"""Which door a request waits at, when it looks again, when it is told."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdhub.api import SLO, Capabilities, NodeView, PoolView, Prediction, RequestView, Snapshot
from pdhub.core.doors import LOOK_S, NODES, find_door, look_at, told_at
from pdhub.core.spill import Way

VIEW = RequestView("r", "m", "/v1/completions", 10, slo=SLO(ttft_ms=1000, tpot_ms=10), arrived_s=0.0)


class Latency:
    """Predictions by node; those asked are noted."""

    def __init__(self, known):
        self.known = known
        self.asked = []

    def predict(self, request, pool, node, now):
        self.asked.append(node.name)
        return self.known.get(node.name, Prediction())


def look(known, *, nodes=("a0", "b0"), opens=lambda pool: True, wait_s=lambda pool: None, now=0.0, **more):
    latency = Latency(known)
    names = {pool: [n for n in nodes if n.startswith(pool)] for pool in "ab"}
    pools = [
        PoolView(p, frozenset({"m"}), Capabilities(frozenset(), 4096), tuple(NodeView(n, p) for n in mine))
        for p, mine in names.items()
    ]
    order = [(n[0], n) for n in nodes]
    way = find_door(VIEW, order, Snapshot(1, tuple(pools), latency), 1.0, now, opens=opens, wait_s=wait_s, **more)
    return way, latency.asked


def test_as_a_rule_the_first_pool_alone_is_asked():
    way, asked = look({"a0": Prediction(900, 9)})
    assert (way, asked) == (Way("a", True), ["a0"])


def test_the_best_of_the_first_nodes_speaks_for_a_pool():
    nodes = [f"a{n}" for n in range(NODES + 3)]
    late = {n: Prediction(2000, 1) for n in nodes}
    way, asked = look({**late, "a3": Prediction(500, 1)}, nodes=[*nodes, "b0"])
    assert way == Way("a", True)
    assert len(asked) == NODES
    assert look({**late, nodes[-1]: Prediction(1, 1)}, nodes=[*nodes, "b0"])[0] == Way("b", True)


def test_what_has_passed_counts():
    known = {"a0": Prediction(600, 1), "b0": Prediction(300, 1)}
    assert look(known)[0].pool == "a"
    assert look(known, now=0.5)[0] == Way("b", True)
    assert look(known, now=0.9)[0] == Way("a", False)


def test_where_nothing_is_predicted_the_queue_itself_tells():
    assert look({}, wait_s={"a": 1.5, "b": 0.2}.get)[0] == Way("b", True)
    assert look({}, wait_s={"a": 1.5, "b": 0.2}.get, inside="a")[0] == Way("a", True)
    assert look({}, wait_s={"a": 1.5, "b": 1.2}.get)[0] == Way("a", False)


def test_a_closed_door_is_no_door_but_for_who_is_inside():
    closed = {"a": False, "b": True}.get
    assert look({}, opens=closed)[0] == Way("b", True)
    assert look({}, opens=closed, inside="a")[0] == Way("a", True)


@given(arrived=st.floats(0, 1e6), budget=st.floats(0.001, 1e5), passed=st.floats(0, 1e5))
def test_told_before_the_time_is_over_and_looked_at_within_bounds(arrived, budget, passed):
    deadline, now = arrived + budget, arrived + passed
    told = told_at(arrived, deadline, now)
    assert told > now or told == pytest.approx(now)
    assert told <= deadline or told - now < 0.0011
    assert LOOK_S[0] <= look_at(deadline, now) - now + 1e-6
    assert look_at(deadline, now) - now <= LOOK_S[1] + 1e-6
