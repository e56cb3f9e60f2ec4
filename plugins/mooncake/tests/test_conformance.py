"""The transport and the package against pdhub's own rules, with the real library."""

import importlib.util
from dataclasses import replace
from typing import ClassVar

import pytest
from pdhub_mooncake.engine import MooncakeNative
from pdhub_mooncake.plugin import pdhub_register_transports
from pdhub_mooncake.transport import FENCES_BY

from pdhub.onesided import OneSidedTransport
from pdhub.testing import PackageConformance, TransportConformance


class Kept(MooncakeNative):
    """Engines are used by one test after the other: the library takes a second to end one."""

    idle: ClassVar[list] = []

    def _start(self):
        return self.idle.pop() if self.idle else super()._start()

    def close(self):
        engine = self._engine
        super().close()
        if engine is not None:
            self.idle.append(engine)


@pytest.fixture(scope="module", autouse=True)
def end():
    yield
    Kept.idle.clear()


@pytest.mark.skipif(
    importlib.util.find_spec("mooncake") is None,
    reason='Mooncake is not installed: pip install "pdhub-mooncake[non-cuda]"',
)
class TestMooncake(TransportConformance):
    @pytest.fixture
    def spec(self, request):
        (spec,) = pdhub_register_transports()
        if "T49" in request.node.name or "T51" in request.node.name:  # rules about the end of an instance
            return spec
        return replace(spec, factory=lambda config: OneSidedTransport("mooncake", Kept(config), config, FENCES_BY))

    @pytest.fixture
    def options(self):
        return {"protocol": "tcp"}


class TestPackage(PackageConformance):
    distribution = "pdhub-mooncake"
