"""Fixtures of the tests on TileRT's real decode server.

Nothing here is collected unless ``PDHUB_TILERT_SITE`` names a directory with TileRT and NIXL; ``make test-tilert``
makes one.
"""

import pytest
from tilert_world import Node, Prefill, router, site


def pytest_ignore_collect(collection_path, config):
    return True if site() is None and collection_path.suffix == ".py" else None


def pytest_collection_modifyitems(items):
    for item in items:
        if "tilert" in item.path.parts:
            item.add_marker(pytest.mark.timeout(120))


@pytest.fixture(scope="session")
def machine(tmp_path_factory):
    """Processes shared by all tests: one node with TileRT's stub engine, one that answers from its KV, a prefill."""
    directory = tmp_path_factory.mktemp("tilert")
    running = [Node(directory, "stub"), Node(directory, "kv", pace_s=0.002), Prefill(directory)]
    try:
        for process in running:
            process.wait(process.url)
        yield running
    finally:
        for process in running:
            process.stop()


@pytest.fixture
async def stub(machine, tmp_path):
    """A router before the node with TileRT's stub engine."""
    async with router(tmp_path, machine[:1], machine[2]) as world:
        await world.script()
        yield world
        await world.idle()


@pytest.fixture
async def kv(machine, tmp_path):
    """A router before the node that answers from the KV that it was given."""
    async with router(tmp_path, machine[1:2], machine[2]) as world:
        await world.script()
        yield world
        await world.script()
        await world.idle()
