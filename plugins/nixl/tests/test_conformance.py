"""The transport and the package against pdhub's own rules, with the real library."""

import importlib.util

import pytest
from pdhub_nixl.plugin import pdhub_register_transports

from pdhub.testing import PackageConformance, TransportConformance

missing = all(importlib.util.find_spec(f"nixl_{build}") is None for build in ("cu12", "cu13"))


@pytest.mark.skipif(missing, reason='NIXL is not installed: pip install "pdhub-nixl[cu12]"')
class TestNixl(TransportConformance):
    @pytest.fixture
    def spec(self):
        (spec,) = pdhub_register_transports()
        return spec


class TestPackage(PackageConformance):
    distribution = "pdhub-nixl"
