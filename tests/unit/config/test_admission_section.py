"""The ``admission`` section: the order is a plugin like any other."""

from __future__ import annotations

from typing import Any

import pytest

from pdhub.api import PDHubError
from pdhub.config.build import load_plan
from pdhub.policies.orders import OrderConfig


def test_defaults(write: Any, base: str, registry: Any) -> None:
    plan = load_plan(write(base), registry=registry)
    assert (plan.order.spec.name, plan.order.config) == ("priority_deadline", OrderConfig())
    admission = plan.config.admission
    assert (admission.spill, admission.shed, admission.queue_limit) == (True, True, 256)


def test_another_order_with_options(write: Any, base: str, registry: Any) -> None:
    text = base + "admission: {order: {type: fifo, config: {sheddable_below: 2}}, spill: false}\n"
    plan = load_plan(write(text), registry=registry)
    assert (plan.order.spec.name, plan.order.config) == ("fifo", OrderConfig(sheddable_below=2))
    assert not plan.config.admission.spill


@pytest.mark.parametrize(
    ("order", "message", "hint"),
    [
        ("{type: fivo}", "admission.order.type (c.yaml:17): no admission plugin 'fivo'", "'fifo'"),
        ("{type: fifo, config: {shed: 1}}", "admission.order.config.shed", "sheddable_below"),
        ("{type: fifo, config: {sheddable_below: low}}", "admission.order.config.sheddable_below", ""),
        ("{type: slo}", "no admission plugin 'slo'", ""),
    ],
)
def test_bad_orders_say_where(
    write: Any, base: str, registry: Any, monkeypatch: pytest.MonkeyPatch, order: str, message: str, hint: str
) -> None:
    path = write(base + f"admission: {{order: {order}}}\n")
    monkeypatch.chdir(path.parent)
    with pytest.raises(PDHubError) as caught:
        load_plan("c.yaml", registry=registry)
    assert message in caught.value.message
    assert hint in str(caught.value)
