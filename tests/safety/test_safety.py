"""A selection of the safety trials; `make safety` runs all of them (run_safety.py)."""

import pytest
from safety_run import Run
from safety_trials import STATES

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_nothing_strange_lands_and_nothing_leaks_at_any_state(transport):
    run = Run([transport], STATES, 4, trees=2)
    await run.run()
    assert not run.wrong, "\n".join(run.wrong)
    assert run.counts["reused"] > 0
    assert run.counts["decoded"] > 0
    for found in run.table().values():
        assert found[transport]["trials"] >= 4
