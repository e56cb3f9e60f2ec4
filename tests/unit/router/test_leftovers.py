from pdhub.router.leftovers import NEAR_S, Leftovers


def test_what_is_held_and_what_has_ended():
    now = [100.0]
    found = Leftovers(lambda: now[0])
    found.add("p", 110.0)
    found.add("p", 120.0)
    found.add("q", 200.0)
    assert list(found.held()) == [("p", 2, 20.0), ("q", 1, 100.0)]
    assert found.ended("p", 100.0) == 0
    now[0] = 110.0 - NEAR_S  # the instance may have been quicker
    assert found.ended("p", 100.0) == 1
    now[0] = 121.0
    assert found.ended("p", 100.0) == 2
    assert found.ended("p", 115.0) == 1
    assert found.ended("unknown", 0.0) == 0
    assert list(found.held()) == [("p", 0, 0.0), ("q", 1, 79.0)]
