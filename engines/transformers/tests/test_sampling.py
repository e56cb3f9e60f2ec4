"""Sampling against a straightforward reading of its definitions."""

from __future__ import annotations

import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pdhub_transformers.sampling import Sampler, logprob_of, restrict, uniform, validate

from pdhub.api import InvalidRequest, Sampling

VOCABULARY = 24


def naive_adjust(logits, s, prompt, output, masked):
    out = list(logits)
    for token in masked:
        out[token] = -math.inf
    for token, bias in s.logit_bias.items():
        out[token] += bias
    for token in range(len(out)):
        if token in prompt or token in output:
            out[token] = out[token] / s.repetition_penalty if out[token] > 0 else out[token] * s.repetition_penalty
        out[token] -= s.frequency_penalty * output.count(token)
        out[token] -= s.presence_penalty * (token in output)
    return out


def naive_kept(logits, top_k, top_p, min_p):
    weights = [math.exp(value - max(logits)) for value in logits]
    kept = {token for token, weight in enumerate(weights) if weight >= min_p}
    if top_k > 0:
        border = sorted((logits[token] for token in kept), reverse=True)[:top_k][-1]
        kept = {token for token in kept if logits[token] >= border}
    total, mass, nucleus = sum(weights[token] for token in kept), 0.0, set()
    for token in sorted(kept, key=lambda token: -logits[token]):
        if mass >= top_p:
            break
        nucleus.add(token)
        mass += weights[token] / total
    return nucleus


def naive_draw(logits, kept, number):
    weights = {token: math.exp(logits[token]) for token in sorted(kept)}
    target, mass = number * sum(weights.values()), 0.0
    for token, weight in weights.items():
        mass += weight
        if mass > target:
            return token
    return max(weights)


def logits_of(seed: int) -> list[float]:
    generator = random.Random(seed)
    return [generator.uniform(-4, 4) for _ in range(VOCABULARY)]


samplings = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 1.7]),
    top_p=st.sampled_from([1.0, 0.9, 0.5, 0.05]),
    top_k=st.sampled_from([0, 1, 3, 100]),
    min_p=st.sampled_from([0.0, 0.05, 0.4]),
    presence_penalty=st.sampled_from([0.0, 1.5, -1.0]),
    frequency_penalty=st.sampled_from([0.0, 0.7, -0.5]),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.8]),
    seed=st.integers(0, 2**63),
    logit_bias=st.dictionaries(st.integers(0, VOCABULARY - 1), st.sampled_from([-100.0, -1.0, 2.5]), max_size=4),
)
tokens = st.lists(st.integers(0, VOCABULARY - 1), max_size=8)


@settings(deadline=None, max_examples=150)
@given(s=samplings, prompt=tokens, output=tokens, masked=st.sets(st.integers(0, 5)), seed=st.integers(0, 1000))
def test_picks_equal_the_naive_ones(s, prompt, output, masked, seed):
    logits = logits_of(seed)
    minimum = len(output) + 1
    sampler = Sampler(s, VOCABULARY, prompt, masked=tuple(masked), min_tokens=minimum)
    for token in output:
        sampler.accept(token)
    picked, _ = sampler.pick(torch.tensor(logits))
    adjusted = naive_adjust(logits, s, prompt, output, masked)
    if s.temperature == 0:
        assert adjusted[picked] == pytest.approx(max(adjusted), abs=1e-4)
        return
    scaled = [value / s.temperature for value in adjusted]
    kept = naive_kept(scaled, s.top_k, s.top_p, s.min_p)
    assert picked not in masked
    assert picked == naive_draw(scaled, kept, uniform(s.seed, len(output)))


@pytest.mark.parametrize("limits", [(3, 1.0, 0.0), (0, 0.4, 0.0), (0, 1.0, 0.2), (5, 0.8, 0.1), (0, 1e-6, 0.0)])
def test_at_least_one_token_stays(limits):
    for seed in range(20):
        logits = logits_of(seed)
        kept = restrict(torch.tensor(logits), *limits).isfinite().nonzero().flatten().tolist()
        assert set(kept) == naive_kept(logits, *limits)
        assert kept


def test_a_position_draws_the_same_whatever_came_before():
    """So that prefill's token and a verified guess are those of one engine."""
    logits = torch.tensor(logits_of(3))
    walked = Sampler(Sampling(seed=11), VOCABULARY, ())
    for _ in range(7):
        walked.accept(walked.pick(logits)[0])
    jumped = Sampler(Sampling(seed=11), VOCABULARY, ())
    for _ in range(7):
        jumped.accept(0)
    assert walked.pick(logits) == jumped.pick(logits)


def test_draws_follow_the_probabilities():
    logits = torch.tensor([0.0, 1.0, 2.0])
    sampler = Sampler(Sampling(seed=5), 3, ())
    counts = [0, 0, 0]
    for _ in range(4000):
        token, _ = sampler.pick(logits)
        sampler.accept(token)
        counts[token] += 1
    for count, share in zip(counts, logits.softmax(-1).tolist(), strict=True):
        assert abs(count / 4000 - share) < 0.03


@pytest.mark.parametrize("seed", [0, 1, -1, 2**63, 2**64 - 1, 2**70])
def test_any_integer_is_a_seed(seed):
    assert 0 <= uniform(seed, 0) < 1
    assert uniform(seed, 0) != uniform(seed, 1)


def test_logprobs_are_of_the_raw_logits():
    logits = logits_of(9)
    s = Sampling(temperature=0.5, top_k=1, logit_bias={2: 50.0}, seed=1)
    token, logprob = Sampler(s, VOCABULARY, (), logprobs=3).pick(torch.tensor(logits))
    total = math.log(sum(math.exp(value) for value in logits))
    assert token == 2
    assert logprob.logprob == pytest.approx(logits[2] - total, abs=1e-5)
    best = sorted(range(VOCABULARY), key=lambda i: -logits[i])[:3]
    assert [i for i, _ in logprob.top] == best
    assert [value for _, value in logprob.top] == pytest.approx([logits[i] - total for i in best], abs=1e-5)
    assert logprob_of(torch.tensor(logits), 2, 0).top == ()


@pytest.mark.parametrize(
    "changes",
    [
        {"temperature": -0.1}, {"temperature": math.nan}, {"temperature": math.inf}, {"top_p": 0.0}, {"top_p": 1.1},
        {"top_k": -2}, {"min_p": -0.1}, {"min_p": 1.5}, {"presence_penalty": 3.0}, {"frequency_penalty": -3.0},
        {"repetition_penalty": 0.0}, {"logit_bias": {VOCABULARY: 1.0}}, {"logit_bias": {0: math.nan}},
    ],
    ids=str,
)  # fmt: skip
def test_values_out_of_range_are_refused(changes):
    with pytest.raises(InvalidRequest) as caught:
        validate(Sampling(**changes), VOCABULARY, None)
    assert caught.value.param == next(iter(changes))


@pytest.mark.parametrize("count", [-1, 21])
def test_too_many_alternatives_are_refused(count):
    with pytest.raises(InvalidRequest, match="logprobs"):
        validate(Sampling(), VOCABULARY, count)
