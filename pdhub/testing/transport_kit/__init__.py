"""The conformance kit for transports.

Subclass it in ``tests/test_conformance.py`` of a plugin and override one fixture::

    from pdhub.testing import TransportConformance
    from pdhub_mytransport.plugin import SPEC

    class TestMyTransport(TransportConformance):
        @pytest.fixture
        def spec(self):
            return SPEC

Each rule is a test whose name starts with a stable id; its docstring says why the rule exists. What the
capabilities declare is proven, what they do not declare must be refused. Rules with two processes start
``python -m pdhub.testing.transport_writer``, which finds the transport by its name, as the host does; where the
package is not installed, the fixture ``plugins`` names the module that registers it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from pdhub.api import TransportSpec
from pdhub.testing.transport_kit.bytes import BytesRules
from pdhub.testing.transport_kit.life import LifeRules
from pdhub.testing.transport_kit.pair import TransportPair
from pdhub.testing.transport_kit.process import SideProcess
from pdhub.testing.transport_kit.rights import RightsRules

__all__ = ["SideProcess", "TransportConformance", "TransportPair"]


class TransportConformance(BytesRules, RightsRules, LifeRules):
    """Override :meth:`spec`; the other fixtures have defaults."""

    @pytest.fixture
    def spec(self) -> TransportSpec:
        raise NotImplementedError("override the `spec` fixture with your TransportSpec")

    @pytest.fixture
    def options(self) -> dict[str, Any]:
        """Options of the transport, as in YAML's ``config``."""
        return {}

    @pytest.fixture
    def plugins(self) -> Sequence[str]:
        """Modules that register the transport in another process, if its package is not installed."""
        return ()

    @pytest.fixture
    def pair(self, spec: TransportSpec, options: dict[str, Any]) -> Iterator[TransportPair]:
        pair = TransportPair(spec, spec.config.model_validate(options))
        yield pair
        pair.close()

    @pytest.fixture
    def process(
        self, spec: TransportSpec, options: dict[str, Any], plugins: Sequence[str]
    ) -> Iterator[Callable[[], SideProcess]]:
        """Makes processes that hold the other side."""
        made: list[SideProcess] = []

        def make() -> SideProcess:
            made.append(SideProcess(spec.name, options, plugins))
            return made[-1]

        yield make
        for one in made:
            one.close()
