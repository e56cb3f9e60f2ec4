"""The transport and the package against pdhub's own rules, with the real library."""

from dataclasses import replace
from typing import ClassVar

import pytest
from pdhub_mooncake.engine import MooncakeNative
from pdhub_mooncake.library import load
from pdhub_mooncake.plugin import pdhub_register_transports
from pdhub_mooncake.transport import FENCES_BY

from pdhub.api import PluginError
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


def missing() -> str:
    """Why the library cannot be used here; empty if it can."""
    try:
        load()
    except PluginError as error:
        return str(error)
    return ""


@pytest.mark.skipif(bool(missing()), reason=missing())
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
