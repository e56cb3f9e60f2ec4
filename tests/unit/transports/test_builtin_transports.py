"""The built-in transports keep every rule of the transport kit."""

import pytest

from pdhub.testing import TransportConformance
from pdhub.transports.plugin import pdhub_register_transports

SPECS = {spec.name: spec for spec in pdhub_register_transports()}


class TestShm(TransportConformance):
    @pytest.fixture
    def spec(self):
        return SPECS["shm"]


class TestTcp(TransportConformance):
    @pytest.fixture
    def spec(self):
        return SPECS["tcp"]
