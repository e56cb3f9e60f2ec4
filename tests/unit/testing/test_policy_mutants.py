"""Each rule of the policy kit catches at least one broken policy."""

import inspect
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from pdhub.api import Decision, Feature, Health, Reason, Snapshot
from pdhub.policies.candidates import Candidates
from pdhub.policies.slo_threshold import SloThreshold, SloThresholdConfig
from pdhub.testing import PolicyConformance
from pdhub.testing.policy_kit import make_latency, make_pool

POOLS = ("fast", "general")


def sound():
    return SloThreshold(SloThresholdConfig(tpot_below_ms=20, fast="fast", otherwise="general"))


class TestSound(PolicyConformance):
    @pytest.fixture
    def policy(self):
        return sound()


class Mutant:
    """A policy around the sound one."""

    def __init__(self):
        self.inner = sound()
        self.count = 0

    def choose(self, request, snapshot, now, rng):
        self.count += 1
        return self.change(self.inner.choose(request, snapshot, now, rng), request, snapshot)

    def change(self, decision, request, snapshot):
        return decision

    def observe(self, record):
        self.inner.observe(record)


class Alternates(Mutant):
    def change(self, decision, request, snapshot):
        return replace(decision, order=decision.order[::-1]) if self.count % 2 else decision


class TakesTheFirst(Mutant):
    def change(self, decision, request, snapshot):
        first = [(p.name, n.name) for p in snapshot.pools for n in p.nodes if (p.name, n.name) in decision.order]
        return replace(decision, order=tuple(first))


class SaysItInItsOwnWords(Mutant):
    def change(self, decision, request, snapshot):
        return replace(decision, reason="because")


class ReadsAFile(Mutant):
    def change(self, decision, request, snapshot):
        Path("/proc/loadavg").read_text()
        return decision


class AsksTheNetwork(Mutant):
    def change(self, decision, request, snapshot):
        socket.getaddrinfo("127.0.0.1", 80)
        return decision


class ForgetsOne(Mutant):
    def change(self, decision, request, snapshot):
        return replace(decision, candidates=decision.candidates[1:])


class SilentDrop(Mutant):
    def change(self, decision, request, snapshot):
        return replace(decision, candidates=tuple(replace(c, why="") for c in decision.candidates))


class ChoosesDropped(Mutant):
    def change(self, decision, request, snapshot):
        return replace(decision, order=tuple((c.pool, c.node) for c in decision.candidates))


class IgnoresFeatures(Mutant):
    def choose(self, request, snapshot, now, rng):
        return self.inner.choose(replace(request, features=frozenset()), snapshot, now, rng)


class IgnoresHealth(Mutant):
    def choose(self, request, snapshot, now, rng):
        pools = tuple(replace(p, nodes=tuple(replace(n, health=Health.READY) for n in p.nodes)) for p in snapshot.pools)
        return self.inner.choose(request, replace(snapshot, pools=pools), now, rng)


class IgnoresModel(Mutant):
    def choose(self, request, snapshot, now, rng):
        return self.inner.choose(replace(request, model="m"), snapshot, now, rng)


class NeedsAFleet(Mutant):
    def change(self, decision, request, snapshot):
        assert snapshot.pools[0] is not None
        return decision


class LearnsByChoosing(Mutant):
    def change(self, decision, request, snapshot):
        turn = self.count // 40 % max(1, len(decision.order))
        return replace(decision, order=decision.order[turn:] + decision.order[:turn])


class ChokesOnHoles(Mutant):
    def observe(self, record):
        assert record.ttft_ms > 0


class AnswersNothing(Mutant):
    def change(self, decision, request, snapshot):
        return Decision((), decision.candidates, Reason.SHED, "x")


class ExplainsLater(Mutant):
    """Its explanation is made from what it has learned by the time somebody reads it."""

    def __init__(self):
        super().__init__()
        self.seen = 0

    def change(self, decision, request, snapshot):
        made = decision.candidates
        return replace(
            decision, candidates=Candidates(lambda: [replace(c, scores={"seen": float(self.seen)}) for c in made])
        )

    def observe(self, record):
        self.seen += 1


class ShedsEverybody(Mutant):
    def change(self, decision, request, snapshot):
        seen = [snapshot.latency.predict(request, p, p.nodes[0], 0.0) for p in snapshot.pools if p.nodes]
        hopeless = request.slo.tpot_ms and all((s.tpot_ms or 0) > request.slo.tpot_ms for s in seen)
        return Decision((), decision.candidates, Reason.SHED, "x") if hopeless else decision


class WantsToKnow(Mutant):
    def change(self, decision, request, snapshot):
        views = {(p.name, n.name): (p, n) for p in snapshot.pools for n in p.nodes}
        known = [k for k in decision.order if snapshot.latency.predict(request, *views[k], 0.0).tpot_ms is not None]
        return replace(decision, order=tuple(known))


RULES = {
    "R01": [Alternates],
    "R02": [TakesTheFirst],
    "R03": [ForgetsOne],
    "R04": [SilentDrop, ChoosesDropped, SaysItInItsOwnWords],
    "R05": [IgnoresFeatures, AnswersNothing],
    "R06": [IgnoresHealth],
    "R07": [IgnoresModel],
    "R08": [NeedsAFleet],
    "R09": [LearnsByChoosing],
    "R10": [ChokesOnHoles],
    "R11": [ExplainsLater],
    "R12": [ShedsEverybody],
    "R13": [WantsToKnow],
    "R14": [ReadsAFile, AsksTheNetwork],
}


def rules():
    return {name.split("_")[1]: name for name in dir(PolicyConformance) if name.startswith("test_")}


def test_every_rule_has_a_mutant_and_a_reason():
    assert set(rules()) == set(RULES)
    assert all(getattr(PolicyConformance, name).__doc__ for name in rules().values())


@pytest.mark.parametrize(("rule", "mutant"), [(r, m) for r, ms in RULES.items() for m in ms])
def test_mutant_is_caught(rule, mutant):
    pools = (make_pool("fast", 4), make_pool("general", 4, features=frozenset({Feature.SEED})))
    values = {
        "policy": mutant(),
        "snapshot": Snapshot(1, pools, make_latency(POOLS)),
        "health": Health.DOWN,
        "pool_names": POOLS,
    }
    method = getattr(PolicyConformance(), rules()[rule])
    with pytest.raises((AssertionError, IndexError, TypeError)):
        method(**{name: values[name] for name in inspect.signature(method).parameters})
