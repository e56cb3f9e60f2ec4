"""``prefill``, the default choice of a prefill instance: a short backlog, and a prompt whose beginning it has seen."""

from __future__ import annotations

import random

from pydantic import Field

from pdhub.api.plugin import PluginConfig
from pdhub.api.policy import Candidate, Decision, Policy, Reason, Snapshot
from pdhub.api.request import RequestRecord, RequestView
from pdhub.policies.affinity import PrefixAffinityConfig, PrefixAffinityScorer
from pdhub.policies.candidates import Candidates
from pdhub.policies.capable import sift
from pdhub.policies.draw import mix, seed_of

NAME = "prefill"


class PrefillChoiceConfig(PluginConfig):
    """Options of ``prefill``."""

    entries: int = Field(65_536, ge=0, description="Prompt blocks remembered for affinity; 0 turns it off.")
    hit: float = Field(
        0.8, ge=0, le=1, description="How much of a block that was seen before is taken for already computed."
    )


class PrefillChoice(Policy):
    """Least work until the prompt is computed: the tokens already sent to an instance, and those of the prompt that it
    has not seen. Both are tokens, so that no weight has to be tuned between load and affinity."""

    def __init__(self, config: PrefillChoiceConfig) -> None:
        self._config = config
        self._affinity = PrefixAffinityScorer(PrefixAffinityConfig(entries=max(1, config.entries)))

    def choose(self, request: RequestView, snapshot: Snapshot, now: float, rng: random.Random) -> Decision:
        kept, dropped, nobody = sift(request, snapshot.pools)
        if not kept:
            return Decision((), Candidates(lambda: dropped), nobody, NAME)
        seed = seed_of(request.id)
        shares = self._affinity.score(request, kept, now)
        rows = []
        for (pool, node), share in zip(kept, shares, strict=True):
            hit = 1.0 if node.name in request.cached else self._config.hit  # told by the engine, or guessed
            uncached = request.prompt_tokens * (1 - share * hit)
            work = node.pending_tokens + uncached
            rows.append((work, node.in_flight, mix(seed, node.name), pool.name, node.name, share))
        rows.sort()
        return Decision(
            order=tuple((pool, node) for _, _, _, pool, node, _ in rows),
            candidates=Candidates(
                lambda: [
                    *(Candidate(r[3], r[4], scores={"work_tokens": r[0], "prefix": r[5]}) for r in rows),
                    *dropped,
                ]
            ),
            reason=Reason.LEAST_LOADED,
            policy=NAME,
        )

    def observe(self, record: RequestRecord) -> None:
        if self._config.entries:
            self._affinity.observe(record)
