"""The built-in orders pass the kit; each of its rules catches at least one broken order."""

import inspect

import pytest

from pdhub.api.policy import AdmissionOrder
from pdhub.policies.orders import Fifo, OrderConfig, PriorityDeadline
from pdhub.testing import OrderConformance


class TestPriorityDeadline(OrderConformance):
    @pytest.fixture
    def order(self):
        return PriorityDeadline(OrderConfig())


class TestFifo(OrderConformance):
    @pytest.fixture
    def order(self):
        return Fifo(OrderConfig(sheddable_below=1))


class Counts(AdmissionOrder):
    count = 0

    def rank(self, request, deadline, now):
        self.count += 1
        return (float(self.count),)


class Uneven(AdmissionOrder):
    def rank(self, request, deadline, now):
        return (0.0, deadline) if request.slo.ttft_ms else (0.0,)


class NotANumber(AdmissionOrder):
    def rank(self, request, deadline, now):
        return (float("nan") if request.slo.tpot_ms is None else request.slo.tpot_ms,)


class Unsure(AdmissionOrder):
    def rank(self, request, deadline, now):
        return (deadline,)

    def sheddable(self, request):
        return None if request.priority == 0 else request.priority < 0


class Lottery(AdmissionOrder):
    def rank(self, request, deadline, now):
        return (float(sum(request.id.encode())),)


MUTANTS = {"A01": [Counts], "A02": [Uneven, NotANumber], "A03": [Unsure], "A04": [Lottery]}


def rules():
    kit = OrderConformance()
    return {name[5:8]: getattr(kit, name) for name, _ in inspect.getmembers(kit) if name.startswith("test_A")}


def test_every_rule_has_a_mutant():
    assert rules().keys() == MUTANTS.keys()


@pytest.mark.parametrize(("rule", "mutant"), [(r, m) for r, found in MUTANTS.items() for m in found])
def test_the_mutant_is_caught(rule, mutant):
    with pytest.raises(AssertionError):
        rules()[rule](mutant())
