"""A call to another server than the endpoint's: only where the configuration names it, and without credentials."""

import pytest

from pdhub.api import Call, EngineFailed
from pdhub.router.breaker import Breaker
from pdhub.router.caller import _elsewhere
from pdhub.router.endpoint import Endpoint


def endpoint():
    config = {"bootstrap_url": "http://boot.example:9000", "port": 5}
    breaker = Breaker(1, 1.0, 1.0)
    return Endpoint(
        "p", "http://10.0.0.7:8100", breaker=breaker, probe_failures=3, hosted=False, api_key="k", config=config
    )


@pytest.mark.parametrize("origin", ["http://10.0.0.7:8998", "http://boot.example:9000"])
def test_another_port_of_the_host_or_a_configured_address(origin):
    site = _elsewhere(endpoint(), Call("GET", "/query", origin=origin))
    assert (site.url, site.api_key) == (origin, None)


@pytest.mark.parametrize(
    "origin",
    [
        "http://10.0.0.8:8998", "http://boot.example:9001", "http://10.0.0.7.evil:1", "http://10.0.0.7@evil:1",
        "http://a@10.0.0.7:1", "file://10.0.0.7", "http://10.0.0.7:1/x", "http://10.0.0.7:1?x=1", "", "10.0.0.7:1",
    ],
)  # fmt: skip
def test_anything_else_is_refused(origin):
    with pytest.raises(EngineFailed, match="not configured"):
        _elsewhere(endpoint(), Call("GET", "/query", origin=origin))


def test_nothing_is_posted_elsewhere():
    with pytest.raises(EngineFailed, match="not configured"):
        _elsewhere(endpoint(), Call("POST", "/query", origin="http://10.0.0.7:8998"))
