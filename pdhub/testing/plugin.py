"""pytest plugin of pdhub: loaded by pytest wherever pdhub is installed, so it imports nothing heavy."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pdhub.testing.hub import HubFactory


@pytest.fixture
async def hub() -> AsyncIterator[HubFactory]:
    """Router, nodes and prefill instances in this process, on free loopback ports; see :mod:`pdhub.testing.hub`."""
    from pdhub.testing.hub import HubFactory

    factory = HubFactory()
    try:
        yield factory
    finally:
        await factory.close()


def pytest_configure(config: Any) -> None:
    # The kits' assertions should explain themselves like any test's.
    pytest.register_assert_rewrite(
        "pdhub.testing.engine_kit",
        "pdhub.testing.engine_features",
        "pdhub.testing.order_kit",
        "pdhub.testing.parser_kit",
        "pdhub.testing.policy_kit",
        "pdhub.testing.package_kit",
        "pdhub.testing.transport_kit",
    )
