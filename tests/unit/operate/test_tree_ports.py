"""A taken port is found before anything starts; 0 becomes a free one."""

from __future__ import annotations

import random
import socket
from collections.abc import Iterator

import pytest

from pdhub.api import ConfigError
from pdhub.config.models import Config
from pdhub.operate.ports import check, free_port, listeners, settle


def config(router: int = 0, node: int = 0, launch: bool = True, control: int = 0, host: str = "127.0.0.1") -> Config:
    return Config.model_validate(
        {
            "model": {"name": "m"},
            "router": {"host": host, "port": router},
            "prefill": [{"name": "p", "port": 0, "engine": {"type": "toy"}}],
            "pools": [
                {
                    "name": "fast",
                    "engine": {"type": "toy"},
                    "nodes": [{"name": "n", "host": host, "port": node, "launch": launch, "control_port": control}],
                }
            ],
            "policy": {"type": "x"},
        }
    )


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen(1)
        yield sock.getsockname()[1]


def test_every_taken_port_is_named_with_its_place(taken: int) -> None:
    with pytest.raises(ConfigError) as caught:
        check(listeners(config(router=taken, node=taken)))
    text = str(caught.value)
    assert f"router.port: router cannot listen on 127.0.0.1:{taken}: Address already in use" in text
    assert "pools.0.nodes.0.port: n cannot listen" in text
    assert "hint: choose another port" in text


def test_a_node_of_another_machine_is_said_to_be_one() -> None:
    with pytest.raises(ConfigError) as caught:
        check(listeners(config(node=8200, host="192.0.2.1")))
    assert "n cannot listen on 192.0.2.1:8200" in caught.value.message
    assert caught.value.hint == "a node on another machine is started there; here it has `launch: false`"


def test_a_router_that_listens_elsewhere_is_told_what_is_possible() -> None:
    with pytest.raises(ConfigError) as caught:
        check(listeners(config(router=8000, host="192.0.2.1")))
    assert caught.value.hint is not None
    assert "0.0.0.0" in caught.value.hint


def test_a_taken_control_port_is_found_too(taken: int) -> None:
    with pytest.raises(ConfigError, match=r"pools\.0\.nodes\.0\.control_port"):
        check(listeners(config(control=taken)))


def test_a_node_that_runs_elsewhere_may_use_its_port(taken: int) -> None:
    check(listeners(config(node=taken, launch=False)))


def test_zero_becomes_a_free_port_and_fixed_ones_stay() -> None:
    rng = random.Random(3)
    fixed = free_port("127.0.0.1", set(), rng)
    overrides = settle(config(router=fixed), rng)
    assert [text.split("=")[0] for text in overrides] == ["prefill.0.port", "pools.0.nodes.0.port"]
    ports = {int(text.split("=")[1]) for text in overrides}
    assert len(ports) == 2
    assert fixed not in ports


def test_free_ports_never_repeat() -> None:
    taken: set[int] = set()
    assert len({free_port("127.0.0.1", taken, random.Random(5)) for _ in range(20)}) == 20


def test_an_address_that_is_not_ours_is_an_error() -> None:
    with pytest.raises(ConfigError, match="no free port"):
        free_port("192.0.2.1", set(), random.Random(1))
