"""Drafts judged by rejection sampling and by typical acceptance, against exact probabilities."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from quire import _native
from quire.executor.base import Bitmask, Judging
from quire.executor.sampler import HostSampler
from quire.types import SamplingParams

from .reference import as_rows, ints, kept, new_seq
from .test_distribution import p_value

ROWS, ROUNDS = 500, 40
REJECTION = Judging("rejection")


def shares(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    found = np.zeros(len(logits))
    ids, probabilities = kept(logits.astype(np.float32), params)
    found[ids] = probabilities
    return found


def fit(tokens: np.ndarray, shares: np.ndarray) -> float:
    """P-value of tokens under a distribution."""
    counts, ids = np.bincount(tokens, minlength=len(shares)), np.flatnonzero(shares)
    return p_value(counts, ids, shares[ids])


class Trials:
    """ROWS sequences with seeds of their own, a target's row of logits and a draft's, ROUNDS positions of each."""

    def __init__(self, target: np.ndarray, draft: np.ndarray, params: SamplingParams, isa: str = "") -> None:
        self.target, self.draft = (np.tile(as_rows(x), (ROWS, 1)) for x in (target, draft))
        self.slots = np.arange(ROWS, dtype=np.int32)
        self.sampler = HostSampler(len(target), ROWS, isa, max_rows=2 * ROWS)
        for slot in range(ROWS):
            self.sampler.add(slot, new_seq(params, seed=slot))

    def propose(self, position: int) -> tuple[np.ndarray, np.ndarray]:
        """Drafts, and what they were drawn from."""
        kept, positions = np.empty_like(self.draft), np.full(ROWS, position, np.int32)
        drawn = self.sampler.guess({"logits": self.draft}, self.slots, positions, 1, kept)
        return drawn.token_ids[:, 0], kept

    def verify(
        self, drafts: np.ndarray, position: int, judging: Judging | None, mask: Bitmask | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """The tokens in place of the drafts, and those behind them, from the same logits."""
        twice = np.repeat(self.target, 2, axis=0)
        rows = np.stack([drafts, np.full(ROWS, -1, np.int32)], 1).ravel().astype(np.int32)
        positions = np.tile(ints(position, position + 1), ROWS)
        if judging is not None and judging.proposals is not None:
            lines = np.stack([self.slots, np.full(ROWS, -1, np.int32)], 1).ravel().astype(np.int32)
            judging = replace(judging, lines=lines)
        tokens = self.sampler.verify(
            {"logits": twice}, np.repeat(self.slots, 2), positions, rows, mask, judging=judging
        ).token_ids.reshape(ROWS, 2)
        return tokens[:, 0], tokens[:, 1]


RNG = np.random.default_rng(11)
TARGET = RNG.normal(0, 1.5, 60)
DRAFT = TARGET + RNG.normal(0, 1.0, 60)
MODES = {
    "plain": SamplingParams(),
    "cold": SamplingParams(temperature=0.6),
    "top-p": SamplingParams(top_p=0.8),
    "top-k and min-p": SamplingParams(top_k=20, min_p=0.05),
}


@pytest.mark.parametrize("mode", MODES)
def test_rejection_gives_the_distribution_of_the_target(mode: str) -> None:
    params = MODES[mode]
    trials, p, q = Trials(TARGET, DRAFT, params), shares(TARGET, params), shares(DRAFT, params)
    random = np.random.default_rng(1)
    tokens, behind, accepted, scalar = [], [], 0, []
    for position in range(0, 2 * ROUNDS, 2):
        drafts, proposals = trials.propose(position)
        assert np.allclose(proposals, q, atol=1e-6)
        got, after = trials.verify(drafts, position, replace(REJECTION, proposals=proposals))
        tokens.append(got)
        behind.append(after[got == drafts])
        accepted += int((got == drafts).sum())
        scalar.append(scalar_residual(drafts, p, q, random))
    assert fit(np.concatenate(tokens), p) > 1e-3
    assert fit(np.concatenate(behind), p) > 1e-3
    assert accepted / (ROWS * ROUNDS) == pytest.approx(np.minimum(p, q).sum(), abs=0.015)
    # Negative controls: drafts taken as they are, and a residual less the probability of one token.
    assert fit(np.concatenate([trials.propose(2 * r)[0] for r in range(ROUNDS)]), p) < 1e-6
    assert fit(np.concatenate(scalar), p) < 1e-6


def scalar_residual(
    drafts: np.ndarray, p: np.ndarray, q: np.ndarray, random: np.random.Generator
) -> np.ndarray:
    """A wrong form that is in print: after a rejection it draws from max(p - q[draft], 0), the probability of the draft
    taken from that of every token."""
    tokens = drafts.copy()
    for i in np.flatnonzero(random.random(len(drafts)) * q[drafts] >= p[drafts]):
        left = np.maximum(p - q[drafts[i]], 0)
        tokens[i] = random.choice(len(p), p=left / left.sum() if left.sum() else p)
    return tokens


@pytest.mark.parametrize("draft", [int(np.argmax(TARGET)), int(np.argmin(TARGET)), 7])
def test_a_certain_draft(draft: int) -> None:
    """As of prompt lookup: all probability of the proposal is on it."""
    trials, p = Trials(TARGET, DRAFT, SamplingParams()), shares(TARGET, SamplingParams())
    drafts = np.full(ROWS, draft, np.int32)
    tokens = np.concatenate([trials.verify(drafts, 2 * r, REJECTION)[0] for r in range(ROUNDS)])
    assert fit(tokens, p) > 1e-3
    assert (tokens == draft).mean() == pytest.approx(p[draft], abs=0.015)


def test_a_chain_over_steps() -> None:
    """Two drafts a step of a first-order text, with another step where they end: pairs and triples of tokens are
    distributed as without drafts, although positions are drafted again and again."""
    vocab, length, params = 5, 12, SamplingParams()
    rng = np.random.default_rng(2)
    target = rng.normal(0, 1.2, (vocab, vocab)).astype(np.float32)  # the row of the last token
    draft = (target + rng.normal(0, 1.0, (vocab, vocab))).astype(np.float32)
    sampler = HostSampler(vocab, 1, max_rows=3)
    texts = []
    for seed in range(1200):
        sampler.add(0, new_seq(params, seed=seed))
        text = [0]
        while len(text) < length:
            last, drafts, proposals = text[-1], [], np.empty((2, vocab), np.float32)
            for at in range(2):
                drawn = sampler.guess(
                    {"logits": draft[last][None]}, ints(0), ints(len(text) + at), 1, proposals[at : at + 1]
                )
                last = int(drawn.token_ids[0, 0])
                drafts.append(last)
            judging = replace(REJECTION, proposals=proposals, lines=ints(0, 1, -1))
            where = len(text) + np.arange(3, dtype=np.int32)
            rows = {"logits": target[[text[-1], *drafts]]}
            got = sampler.verify(rows, ints(0, 0, 0), where, ints(*drafts, -1), judging=judging).token_ids
            for token, guess in zip(got.tolist(), [*drafts, -1], strict=True):
                text.append(token)
                if token != guess:
                    break
        texts.append(text[:length])
        sampler.drop(0)
    step = np.exp(target) / np.exp(target).sum(1, keepdims=True)
    found, before = np.array(texts), np.eye(vocab)[0]
    for at in range(1, length - 1):
        pairs = found[:, at] * vocab + found[:, at + 1]
        before = before @ step
        assert fit(pairs, (before[:, None] * step).ravel()) > 1e-4, at


@pytest.mark.parametrize("acceptance", ["rejection", "typical"])
def test_greedy_is_greedy(acceptance: str) -> None:
    best = int(np.argmax(TARGET))
    trials = Trials(TARGET, DRAFT, SamplingParams(temperature=0))
    for draft in (best, 7):
        drafts = np.full(ROWS, draft, np.int32)
        assert (trials.verify(drafts, 0, Judging(acceptance, 0.09))[0] == best).all()


@pytest.mark.parametrize("epsilon", [0.01, 0.09, 0.6])
@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(temperature=0.4, top_p=0.9)])
def test_typical(epsilon: float, params: SamplingParams) -> None:
    """A draft is accepted if it is likely enough; else the row gives what it would without drafts."""
    trials, p = Trials(TARGET, DRAFT, params), shares(TARGET, params)
    likely = p[p > 0]
    least = min(epsilon, np.sqrt(epsilon) * np.exp((likely * np.log(likely)).sum()))
    drafts = np.arange(ROWS, dtype=np.int32) % len(TARGET)
    plain = trials.verify(drafts, 4, None)
    got = trials.verify(drafts, 4, Judging("typical", epsilon))
    right = p[drafts] > least
    assert 0 < right.sum() < ROWS
    assert (got[0] == np.where(right, drafts, plain[0])).all()
    assert (got[1] == plain[1]).all()


@pytest.mark.parametrize("acceptance", ["rejection", "typical"])
def test_what_may_not_be_sampled_is_not_accepted(acceptance: str) -> None:
    words = np.full((1, 2), -1, np.int32)
    words[0, 0] &= ~(1 << 7)
    mask = Bitmask(words, np.zeros(2 * ROWS, np.int32))
    likely = TARGET.copy()
    likely[[7, 9]] = 8.0
    params = SamplingParams(banned_token_ids=(9,))
    trials = Trials(likely, DRAFT, params)
    for draft in (7, 9):
        got, _ = trials.verify(np.full(ROWS, draft, np.int32), 0, Judging(acceptance, 0.09), mask)
        assert not np.isin(got, [7, 9]).any()


def test_penalties_count_the_drafts_before() -> None:
    """The second draft repeats the first, which a large penalty forbids."""
    params = SamplingParams(presence_penalty=100)
    sampler = HostSampler(60, 1, max_rows=3)
    sampler.add(0, new_seq(params))
    logits = np.zeros((3, 60), np.float32)
    logits[:, 5] = 20.0
    got = sampler.verify({"logits": logits}, ints(0, 0, 0), ints(0, 1, 2), ints(5, 5, -1), judging=REJECTION)
    assert got.token_ids[0] == 5
    assert got.token_ids[1] != 5


@pytest.mark.parametrize("isa", _native.supported_isas())
def test_instruction_sets(isa: str) -> None:
    found = []
    for each in (isa, "baseline"):
        trials = Trials(TARGET, DRAFT, SamplingParams(top_p=0.95), each)
        drafts, proposals = trials.propose(0)
        rejection = trials.verify(drafts, 0, replace(REJECTION, proposals=proposals))
        typical = trials.verify(drafts, 0, Judging("typical", 0.09))
        found.append((drafts, proposals, *rejection, *typical))
    for one, other in zip(*found, strict=True):
        assert (one == other).all()


def test_bad_arguments() -> None:
    sampler = HostSampler(8, 2)
    sampler.add(0, new_seq(SamplingParams()))
    rows = {"logits": np.zeros((2, 8), np.float32)}

    def verify(judging: Judging) -> None:
        sampler.verify(rows, ints(0, 0), ints(0, 1), ints(3, -1), judging=judging)

    with pytest.raises(ValueError, match="acceptance"):
        verify(Judging("same"))
    proposals = np.zeros((1, 8), np.float32)
    with pytest.raises(ValueError, match="proposals: a row names a line"):
        verify(Judging("rejection", 0, proposals, ints(1, -1)))
    with pytest.raises(ValueError, match="proposals: expected rows"):
        verify(Judging("rejection", 0, proposals[:, :7].copy(), ints(0, -1)))
    with pytest.raises(ValueError, match="for every row"):
        verify(Judging("rejection", 0, proposals, ints(0)))
    with pytest.raises(ValueError, match="distributions"):
        sampler.guess(rows, ints(0, 0), ints(0, 1), 1, proposals)
