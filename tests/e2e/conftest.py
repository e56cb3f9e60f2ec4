"""Fixtures of the end-to-end tests."""

from __future__ import annotations

import pytest
from tree import Tree


@pytest.fixture
def tree(tmp_path):
    """Make trees of real processes; all of them end with the test."""
    made = []

    def make(topology):
        one = Tree(topology, tmp_path)
        made.append(one)
        return one

    yield make
    for one in made:
        one.close()
