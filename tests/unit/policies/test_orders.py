"""Admission orders."""

from dataclasses import replace

import pytest

from pdhub.api import RequestView
from pdhub.policies.orders import Fifo, OrderConfig, PriorityDeadline

VIEW = RequestView("r", "m", "/v1/completions", 10, arrived_s=3.0)


def test_priority_then_deadline():
    order = PriorityDeadline(OrderConfig())
    ranks = [order.rank(replace(VIEW, priority=p), d, 5.0) for p, d in ((2, 9.0), (0, 6.0), (0, 8.0), (-1, 6.0))]
    assert ranks == sorted(ranks)


def test_fifo_knows_arrival_only():
    order = Fifo(OrderConfig())
    assert order.rank(replace(VIEW, priority=9), 4.0, 5.0) == (3.0,)
    assert order.rank(replace(VIEW, arrived_s=0.0), 4.0, 5.0) == (5.0,)


@pytest.mark.parametrize("make", [PriorityDeadline, Fifo])
def test_what_is_sheddable(make):
    assert [make(OrderConfig()).sheddable(replace(VIEW, priority=p)) for p in (-1, 0, 1)] == [True, False, False]
    assert make(OrderConfig(sheddable_below=1)).sheddable(VIEW)
