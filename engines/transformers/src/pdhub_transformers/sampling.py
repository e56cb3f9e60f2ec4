"""From logits to one token, with the definitions of vLLM.

Order: masks (``min_tokens``) and ``logit_bias``, penalties, then greedy, or temperature → min-p → top-k → top-p →
draw. Log probabilities are of the raw logits. The draw for output position ``i`` depends on ``(seed, i)`` only, so
the two legs of a request, and a verified guess, pick what one engine would have picked.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from pdhub.api import InvalidRequest, Sampling, TokenLogprob
from pdhub_transformers.abilities import MAX_LOGPROBS

GREEDY_BELOW = 1e-5  # a smaller temperature would overflow; vLLM takes it for greedy too


def validate(sampling: Sampling, vocabulary: int, logprobs: int | None) -> None:
    """Raise InvalidRequest for a value out of range; it names the parameter."""
    s = sampling
    problems = {
        "temperature": not (math.isfinite(s.temperature) and s.temperature >= 0),
        "top_p": not 0 < s.top_p <= 1,
        "top_k": s.top_k < -1,
        "min_p": not 0 <= s.min_p <= 1,
        "presence_penalty": not -2 <= s.presence_penalty <= 2,
        "frequency_penalty": not -2 <= s.frequency_penalty <= 2,
        "repetition_penalty": not (math.isfinite(s.repetition_penalty) and s.repetition_penalty > 0),
        "logit_bias": any(not 0 <= i < vocabulary or not math.isfinite(v) for i, v in s.logit_bias.items()),
        "logprobs": logprobs is not None and not 0 <= logprobs <= MAX_LOGPROBS,
    }
    for name, bad in problems.items():
        if bad:
            raise InvalidRequest(f"{name} is out of range", param=name)


def uniform(seed: int, position: int) -> float:
    """The random number in [0, 1) of one output position."""
    key = np.array([seed & 0xFFFF_FFFF_FFFF_FFFF, 0], dtype=np.uint64)
    return float(np.random.Generator(np.random.Philox(key=key, counter=[position, 0, 0, 0])).random())


class Sampler:
    """Picks the tokens of one request, position after position.

    Args:
        sampling: validated; ``seed`` is set unless greedy.
        vocabulary: number of token ids.
        prompt: for the repetition penalty.
        masked: ids that must not be picked while fewer than ``min_tokens`` tokens were.
        logprobs: None, or how many alternatives to report.
    """

    def __init__(
        self,
        sampling: Sampling,
        vocabulary: int,
        prompt: Sequence[int],
        *,
        masked: Sequence[int] = (),
        min_tokens: int = 0,
        logprobs: int | None = None,
    ) -> None:
        self.count = 0
        self.greedy = sampling.temperature < GREEDY_BELOW
        self._sampling = sampling
        self._seed = sampling.seed or 0
        self._logprobs = logprobs
        self._min_tokens = min_tokens if masked else 0
        self._masked = torch.tensor(sorted(set(masked)), dtype=torch.long)
        self._bias_ids = torch.tensor(list(sampling.logit_bias), dtype=torch.long)
        self._bias = torch.tensor(list(sampling.logit_bias.values()), dtype=torch.float32)
        self._counts: Tensor | None = None
        self._seen: Tensor | None = None
        if sampling.presence_penalty or sampling.frequency_penalty:
            self._counts = torch.zeros(vocabulary)
        if sampling.repetition_penalty != 1:
            self._seen = torch.zeros(vocabulary, dtype=torch.bool)
            self._seen[torch.tensor(list(prompt), dtype=torch.long)] = True

    @property
    def plain(self) -> bool:
        """True if the next token is just the largest logit, so that a whole batch can be picked at once."""
        return (
            self.greedy
            and self._logprobs is None
            and self.count >= self._min_tokens
            and not len(self._bias)
            and self._counts is None
            and self._seen is None
        )

    def accept(self, token: int) -> None:
        """Count a token as output."""
        self.count += 1
        if self._counts is not None:
            self._counts[token] += 1
        if self._seen is not None:
            self._seen[token] = True

    def pick(self, logits: Tensor) -> tuple[int, TokenLogprob | None]:
        """The next token and its log probability (None if not asked for); does not count it.

        Args:
            logits: float32 ``[vocabulary]`` on the CPU; not changed.
        """
        token = self._choose(self._adjust(logits))
        return token, None if self._logprobs is None else logprob_of(logits, token, self._logprobs)

    def _adjust(self, logits: Tensor) -> Tensor:
        s = self._sampling
        out = logits.clone()
        if self.count < self._min_tokens:
            out[self._masked] = -math.inf
        if len(self._bias):
            out[self._bias_ids] += self._bias
        if self._seen is not None:
            shrunk = torch.where(out > 0, out / s.repetition_penalty, out * s.repetition_penalty)
            out = torch.where(self._seen, shrunk, out)
        if self._counts is not None:
            out -= s.frequency_penalty * self._counts
            out -= s.presence_penalty * (self._counts > 0)
        return out

    def _choose(self, logits: Tensor) -> int:
        s = self._sampling
        if self.greedy:
            return int(logits.argmax())
        kept = restrict(logits / s.temperature, s.top_k, s.top_p, s.min_p)
        total = torch.softmax(kept, -1, dtype=torch.float64).cumsum(-1)
        index = int(torch.searchsorted(total, uniform(self._seed, self.count) * total[-1], right=True))
        # rounding may put the target on the sum itself, which is beyond every token
        return index if index < len(kept) else int(kept.isfinite().nonzero()[-1])


def restrict(logits: Tensor, top_k: int, top_p: float, min_p: float) -> Tensor:
    """Logits with everything outside min-p, top-k and top-p set to minus infinity; at least one stays."""
    if min_p > 0:
        floor = logits.max() + math.log(min_p)
        logits = logits.masked_fill(logits < floor, -math.inf)
    if 0 < top_k < len(logits):
        logits = logits.masked_fill(logits < logits.topk(top_k).values[-1], -math.inf)
    if top_p < 1:
        ordered, order = logits.sort()
        tail = ordered.softmax(-1).cumsum(-1) <= 1 - top_p
        tail[-1] = False
        logits = logits.index_fill(0, order[tail], -math.inf)
    return logits


def logprob_of(logits: Tensor, token: int, count: int) -> TokenLogprob:
    """Log probability of ``token`` and of the ``count`` best ids, by raw logits."""
    values = logits.log_softmax(-1)
    best = values.topk(min(count, len(values)))
    top = tuple(zip(best.indices.tolist(), best.values.tolist(), strict=True))
    return TokenLogprob(token, float(values[token]), top)
