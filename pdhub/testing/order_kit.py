"""The conformance kit for admission orders. Subclass, override :meth:`order`::

class TestMine(OrderConformance):
    @pytest.fixture
    def order(self):
        return MyOrder(MyConfig(...))
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest

from pdhub.api import RequestView
from pdhub.api.policy import AdmissionOrder
from pdhub.testing.policy_kit import make_requests

NOW = 100.0


def _arrived() -> Sequence[tuple[RequestView, float]]:
    """Requests with the moment at which their time to the first token ends."""
    requests = [replace(request, arrived_s=NOW - n / 10) for n, request in enumerate(make_requests())]
    return [(r, r.arrived_s + (r.slo.ttft_ms or 30_000) / 1000) for r in requests]


class OrderConformance:
    """Rules for admission orders."""

    @pytest.fixture
    def order(self) -> AdmissionOrder:
        raise NotImplementedError("override the `order` fixture with an instance of your order")

    def test_A01_same_request_same_answer(self, order: AdmissionOrder) -> None:
        """An order that remembers gives one request two places."""
        for request, deadline in _arrived():
            first = (order.rank(request, deadline, NOW), order.sheddable(request))
            assert (order.rank(request, deadline, NOW), order.sheddable(request)) == first

    def test_A02_ranks_are_numbers_that_compare(self, order: AdmissionOrder) -> None:
        """One number at least, as many for every request, never NaN: it would stand behind all others."""
        ranks = [order.rank(request, deadline, NOW) for request, deadline in _arrived()]
        assert {len(rank) for rank in ranks} == {len(ranks[0])}
        assert ranks[0]
        assert not [n for rank in ranks for n in rank if math.isnan(n)]

    def test_A03_sheddable_is_yes_or_no(self, order: AdmissionOrder) -> None:
        """Whoever is refused for another must be known before."""
        assert all(isinstance(order.sheddable(request), bool) for request, _ in _arrived())

    def test_A04_the_name_of_a_request_means_nothing(self, order: AdmissionOrder) -> None:
        """Ids are drawn by chance; an order by them is a lottery."""
        for request, deadline in _arrived():
            other = replace(request, id="another")
            assert order.rank(other, deadline, NOW) == order.rank(request, deadline, NOW)
            assert order.sheddable(other) == order.sheddable(request)
