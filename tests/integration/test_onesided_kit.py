"""``pdhub.onesided`` against the transport kit, over the plainest library: one that copies to addresses."""

import sys
from pathlib import Path

import pytest

from pdhub.testing import TransportConformance

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "onesided"))

from copying import SPEC

pytestmark = pytest.mark.integration


class TestOneSided(TransportConformance):
    @pytest.fixture
    def spec(self):
        return SPEC

    @pytest.fixture
    def plugins(self):
        return ["copying"]
