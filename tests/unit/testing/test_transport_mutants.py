"""Each rule of the transport kit catches at least one broken transport, and says what is wrong with it: a rule that
nothing can fail proves nothing."""

import inspect
import os
import re
from pathlib import Path

import pytest
import transport_mutants as m

from pdhub.api import TransferFailed
from pdhub.testing import TransportConformance
from pdhub.testing.transport_kit import SideProcess, TransportPair
from pdhub.transports.plugin import ShmConfig

RULES = {
    "T01": [
        (m.faulty(flip=1), "arrived changed"),
        (m.faulty(drop=1), "ended posted"),
        (m.faulty(fail=1), "ended failed"),
    ],
    "T02": [(m.EarlyDone, "before the bytes were visible")],
    "T03": [(m.OneByteMore, "touched something else")],
    "T04": [(m.NoWriterCheck, "DID NOT RAISE")],
    "T05": [(m.ClampsSilently, "more than the region has was accepted")],
    "T06": [(m.EmptyNeverEnds, "ended posted")],
    "T07": [(m.faulty(lose=1), "an operation is missing")],
    "T08": [(m.NoOpsLimit, "DID NOT RAISE")],
    "T09": [(m.OneMemory, "share memory")],
    "T10": [(m.SharedScratch, "finds other bytes")],
    "T11": [(m.OneGrant, "does not know this grant")],
    "T12": [(m.AcceptsAnyMemory, "DID NOT RAISE")],
    "T13": [(m.Scribbles, "preparing moved bytes")],
    "T20": [(m.TrustsTheLabel, "forged grant was accepted")],
    "T21": [(m.TrustsTheLabel, "opened another region")],
    "T22": [(m.LeakyMetadata, "metadata changed")],
    "T23": [(m.ConnectsToAnything, "DID NOT RAISE")],
    "T24": [(m.GrantOutlivesRegion, "outlived its region")],
    "T25": [(m.faulty(late_write=1), "DID NOT RAISE")],
    "T26": [(m.Reuses, "ended as posted")],
    "T27": [(m.FencesOnce, "second fence")],
    "T28": [(m.Reuses, "ended as posted"), (m.ReusesFenced, "hit the next landing")],
    "T29": [(m.Reuses, "ended as posted"), (m.ReusesFenced, "hit the next landing")],
    "T30": [(m.NeedsGoodbye, "could not be fenced")],
    "T31": [(m.IgnoresDeath, "ended as posted"), (m.faulty(vanish_after=0), "ended as posted")],
    "T32": [(m.NamedSegments, "left in /dev/shm")],
    "T33": [(m.FencesEverything, "another writer's write ended as")],
    "T40": [(m.faulty(duplicate_done=1), "44 calls")],
    "T41": [(m.CallbackUnderLock, "on_done did not happen")],
    "T42": [(m.TimeoutStops, "timeout stopped")],
    "T43": [(m.faulty(lying_abort=1), "after abort() was True"), (m.faulty(late_write=1), "after abort() was True")],
    "T44": [(m.AbortRewrites, "final state changed")],
    "T45": [(m.QueuedAbortLies, "aborted write landed")],
    "T46": [(m.ClosesNothing, "ended as posted")],
    "T47": [(m.SameIds, "came twice")],
    "T48": [(m.AnyDevice, "DID NOT RAISE"), (m.IgnoresNotify, "DID NOT RAISE")],
    "T49": [(m.LeaksDescriptors, "giving back"), (m.LeaksThreads, "giving back")],
    "T50": [(m.Spins, "of a core")],
    "T52": [(m.OnePeerForAll, "ended another's write")],
    "T53": [(m.DiesAtExit, "ended with status 139")],
    "T51": [(m.OutlivesClose, "still takes writes")],
}
CASES = [(rule, mutant, why) for rule, mutants in RULES.items() for mutant, why in mutants]
CAUGHT = (AssertionError, pytest.fail.Exception, TransferFailed)


def rules() -> dict[str, list[str]]:
    out: dict[str, list[str]] = {}
    for name in dir(TransportConformance):
        if name.startswith("test_"):
            out.setdefault(name.split("_")[1], []).append(name)
    return out


class Kit(TransportConformance):
    """Called rule by rule, never collected."""

    __test__ = False


def test_every_rule_has_one_name_and_a_reason_and_a_mutant():
    found = rules()
    assert all(len(names) == 1 for names in found.values()), "a rule id is used twice"
    assert set(found) == set(RULES)
    for (name,) in found.values():
        assert getattr(TransportConformance, name).__doc__


@pytest.fixture
def impatient(request, monkeypatch):
    if request.node.callspec.params["why"] == "DID NOT RAISE":
        return  # nothing hangs there, and on a busy machine an honest write may take long
    for part in ("pair", "bytes", "rights", "life"):
        monkeypatch.setattr(f"pdhub.testing.transport_kit.{part}.PATIENCE_S", 0.4)


@pytest.fixture
def tidy():
    m.LeaksThreads.end.clear()
    yield
    for path in Path("/dev/shm").glob(f"{m.NAMED}*"):
        path.unlink()
    while m.LeaksDescriptors.leaked:
        os.close(m.LeaksDescriptors.leaked.pop())
    m.LeaksThreads.end.set()


def run(rule: str, mutant) -> None:
    pair = TransportPair(m.spec(mutant), ShmConfig())
    made: list[SideProcess] = []

    def process() -> SideProcess:
        name = {m.NamedSegments: "named", m.DiesAtExit: "dies"}.get(mutant, "shm")
        plugins = [] if name == "shm" else ["transport_mutants"]
        made.append(SideProcess(name, {}, plugins))
        return made[-1]

    values = {"pair": pair, "process": process}
    method = getattr(Kit(), rules()[rule][0])
    try:
        method(**{name: values[name] for name in inspect.signature(method).parameters})
    finally:
        for one in made:
            one.close()
        pair.close()
        pair.close()


def run_often(rule: str, mutant, times: int) -> None:
    for _ in range(times):
        run(rule, mutant)


@pytest.mark.usefixtures("impatient", "tidy")
@pytest.mark.parametrize(("rule", "mutant", "why"), CASES, ids=lambda v: getattr(v, "__name__", v))
def test_mutant_is_caught(rule, mutant, why):
    # A process that is stopped between two copies instead of within one does no harm: then once more.
    attempts = 5 if mutant is m.ReusesFenced else 1
    with pytest.raises(CAUGHT, match=re.escape(why)):
        run_often(rule, mutant, attempts)
