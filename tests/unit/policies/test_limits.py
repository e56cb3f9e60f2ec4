"""Values that an engine has a limit for: known before anything is spent."""

import pytest

from pdhub.api import Capabilities, Feature, NodeView, PoolView, RequestView
from pdhub.api.request import Sampling
from pdhub.policies.capable import beyond, gap
from pdhub.router import sampling as sampling_rules
from pdhub.router.fleet import Pool
from pdhub.wire.capabilities import heard, told

LIMITED = Capabilities(frozenset(Feature), 1000, 5, max_top_k=255, logprobs_from=0.2)


def request(logprobs=None, **members):
    sampling = Sampling(**members)
    features = sampling_rules.features_of(sampling)
    if logprobs is not None:
        features |= {Feature.LOGPROBS}
    return RequestView("r", "m", "/v1/completions", 10, logprobs=logprobs, features=features, sampling=sampling)


@pytest.mark.parametrize(
    ("members", "member"),
    [
        ({"top_k": 256}, "top_k"),
        ({"top_k": 255}, None),
        ({"top_k": 0}, None),
        ({"logprobs": 6}, "logprobs"),
        ({"logprobs": 5}, None),
        ({"logprobs": 0, "temperature": 0.1}, "logprobs"),
        ({"logprobs": 0, "temperature": 0.2}, None),
        ({"logprobs": 5, "temperature": 0.0}, None),
        ({"temperature": 0.1}, None),
    ],
)
def test_what_is_beyond_a_limit_and_what_is_at_its_edge(members, member):
    asked = request(**members)
    found = beyond(asked, LIMITED)
    assert (found[0] if found else None) == member
    pool = PoolView("p", frozenset({"m"}), LIMITED, (NodeView("n", "p"),))
    dropped = gap(asked, pool)
    assert (dropped[0] if dropped else None) == ("capability" if member else None)


def test_no_limit_limits_nothing():
    assert beyond(request(top_k=1 << 30, temperature=0.01, logprobs=1), Capabilities(max_logprobs=1)) is None


def test_limits_travel():
    assert heard(told(LIMITED)) == LIMITED
    assert heard(told(Capabilities())) == Capabilities()


def test_a_pool_has_the_narrowest_limits_of_its_nodes():
    class Client:
        speaks_tokens = True

        def capabilities(self, info):
            return info["told"]

    class Node:
        def __init__(self, told):
            self.info, self.slots = {"told": told}, 0

    wide = Capabilities(frozenset(Feature), 1000, 20)
    for nodes in ((LIMITED, wide), (wide, LIMITED)):
        pool = Pool("p", Client(), {str(n): Node(one) for n, one in enumerate(nodes)}, frozenset({"m"}))
        pool.learn()
        assert (pool.capabilities.max_top_k, pool.capabilities.logprobs_from) == (255, 0.2)
        assert pool.capabilities.max_logprobs == 5
    pool = Pool("p", Client(), {"0": Node(wide)}, frozenset({"m"}))
    pool.learn()
    assert (pool.capabilities.max_top_k, pool.capabilities.logprobs_from) == (None, 0.0)
