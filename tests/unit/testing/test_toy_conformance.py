"""The toy engine passes the engine kit, so that the kit is known to be passable."""

import pytest

from pdhub.testing import EngineConformance, toy


class TestToy(EngineConformance):
    @pytest.fixture
    def spec(self):
        return toy.pdhub_register_engines()[0]

    @pytest.fixture
    def options(self):
        return {"slots": 2, "chunk_tokens": 8}

    def reference(self, prompt, max_tokens):
        return toy.generate(prompt, max_tokens)
