"""Every built-in policy obeys the kit."""

import pytest

from pdhub.api.plugin import NoConfig
from pdhub.policies.power_of_two import PowerOfTwo
from pdhub.policies.round_robin import RoundRobin, RoundRobinConfig
from pdhub.policies.slo import Slo, SloConfig
from pdhub.policies.weighted import Weighted, WeightedConfig
from pdhub.testing.policy_kit import PolicyConformance


class TestSlo(PolicyConformance):
    @pytest.fixture(
        params=[SloConfig(), SloConfig(fill=False, explore=1.0, throughput="fast")], ids=["plain", "spread"]
    )
    def policy(self, request):
        return Slo(request.param)


class TestWeighted(PolicyConformance):
    @pytest.fixture
    def policy(self):
        return Weighted(WeightedConfig(weights={"fast": 0.2}))


class TestRoundRobin(PolicyConformance):
    @pytest.fixture
    def policy(self):
        return RoundRobin(RoundRobinConfig())


class TestPowerOfTwo(PolicyConformance):
    @pytest.fixture
    def policy(self):
        return PowerOfTwo(NoConfig())
