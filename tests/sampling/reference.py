"""The sampler's definition in plain numpy: float64, full sorts, one row at a time.

Float32 arithmetic may put a token that lies within rounding of a boundary on either side. `acceptable`
therefore evaluates the definition with every boundary moved a little both ways and returns all tokens that
come out; away from boundaries, that is one token.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from hypothesis import strategies as st

from quire import _native
from quire.executor.sampler import HostSampler
from quire.logprobs import TokenLogprob
from quire.parameters import TextTokens
from quire.types import NewSeq, SamplingParams

EPSILON = 2e-6
ROUNDING = 2e-5  # of a weight: the exponent is a float32 of up to 87


def new_seq(
    params: SamplingParams,
    tokens: Sequence[int] = (),
    prompt_len: int | None = None,
    *,
    seed: int = 1,
    sample_index: int = 0,
    stop_ids: Sequence[int] = (),
    texts: TextTokens | None = None,
) -> NewSeq:
    """A sequence whose prompt is all of `tokens` unless prompt_len says less."""
    return NewSeq(
        seq_id=0,
        token_ids=list(tokens),
        prompt_len=len(tokens) if prompt_len is None else prompt_len,
        params=params,
        sample_index=sample_index,
        seed=seed,
        blocks=(),
        stop_ids=tuple(stop_ids),
        texts=texts,
    )


def sample_one(logits: np.ndarray, new: NewSeq, position: int | None = None, isa: str = "") -> int:
    """The token a fresh sampler draws for one row; -1 when the row fails."""
    sampler = HostSampler(logits.shape[-1], 1, isa)
    sampler.add(0, new)
    where = len(new.token_ids) if position is None else position
    return int(sampler.sample({"logits": as_rows(logits)}, ints(0), ints(where)).token_ids[0])


def as_rows(logits: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(np.atleast_2d(logits), np.float32)


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def edited(logits: np.ndarray, new: NewSeq, position: int) -> np.ndarray:
    """Masks, bias and penalties, in float32 as the sampler does them."""
    params, x = new.params, logits.astype(np.float32).copy()
    if params.allowed_token_ids is not None:
        keep = np.zeros(len(x), bool)
        keep[list(params.allowed_token_ids)] = True
        x[~keep] = -np.inf
    x[list(params.banned_token_ids)] = -np.inf
    if position - new.prompt_len < params.min_tokens:
        x[list(new.stop_ids)] = -np.inf
    for token, bias in params.logit_bias.items():
        x[token] += np.float32(bias)
    outputs = Counter(new.token_ids[new.prompt_len :])
    repetition = np.float32(params.repetition_penalty)
    for token in set(new.token_ids):
        x[token] = x[token] / repetition if x[token] > 0 else x[token] * repetition
    for token, count in outputs.items():
        x[token] -= np.float32(params.frequency_penalty) * np.float32(count)
        x[token] -= np.float32(params.presence_penalty)
    return x


def kept(x: np.ndarray, params: SamplingParams, nudge: float = 0.0) -> tuple[np.ndarray, np.ndarray]:
    """Ids that survive truncation, rising, and their probabilities. `nudge` moves boundaries, relatively."""
    order = np.lexsort((np.arange(len(x)), -x.astype(np.float64)))
    scaled = x.astype(np.float64) / params.temperature
    weight = np.exp(scaled - scaled.max())
    if params.top_k > 0:
        order = order[: params.top_k]
    if params.top_p < 1:
        reached = np.cumsum(weight[order]) / weight[order].sum()
        order = order[: 1 + int(np.searchsorted(reached, params.top_p * (1 + nudge)))]
    if params.min_p > 0:
        order = order[weight[order] >= min(params.min_p * (1 + nudge), 1.0)]
    ids = np.sort(order[weight[order] > 0])
    return ids, weight[ids] / weight[ids].sum()


def race(ids: np.ndarray, probabilities: np.ndarray, times: np.ndarray) -> set[int]:
    """The token whose time divided by its probability is the least, and those that are as good within rounding."""
    finish = times[ids].astype(np.float64) / probabilities
    return set(ids[finish <= finish.min() * (1 + ROUNDING)].tolist())


def finishes(ids: np.ndarray, probabilities: np.ndarray, times: np.ndarray) -> np.ndarray:
    """Tokens in the order in which they finish, the lower id first among equals."""
    raced = ids[probabilities > 0]
    order: np.ndarray = raced[np.argsort(times[raced] / probabilities[probabilities > 0], kind="stable")]
    return order


def times_of(new: NewSeq, position: int, vocab: int) -> np.ndarray:
    """The noise of a sequence at a position."""
    return _native.race_times(new.seed % 2**64, new.sample_index, position, vocab)


def acceptable(logits: np.ndarray, new: NewSeq, position: int) -> set[int]:
    """Every token the definition gives, boundaries moved by up to EPSILON; {-1} when the row must fail."""
    if not (logits < np.inf).all():
        return {-1}
    x = edited(logits, new, position)
    if (x == -np.inf).all():
        return {-1}
    if new.params.temperature == 0:
        return {int(np.argmax(x))}
    times = times_of(new, position, len(x))
    sets = [kept(x, new.params, nudge) for nudge in (0, -EPSILON, EPSILON)]
    return {token for ids, p in sets for token in race(ids, p, times)}


def position_logprobs(logits: np.ndarray, token: int, count: int) -> list[TokenLogprob]:
    """The chosen token and the `count` likeliest, under the raw logits."""
    x = logits.astype(np.float64)
    logprobs = x - x.max() - np.log(np.exp(x - x.max()).sum())
    order = np.lexsort((np.arange(len(x)), -x))
    rank = {int(t): i for i, t in enumerate(order, 1)}
    best = [t for t in order[:count] if x[t] > -np.inf]
    return [TokenLogprob(int(t), float(logprobs[t]), rank[int(t)]) for t in (token, *best)]


def penalties(**more: st.SearchStrategy[Any]) -> st.SearchStrategy[SamplingParams]:
    """Parameters that look at the tokens so far, and `more`."""
    return st.builds(
        SamplingParams,
        temperature=st.sampled_from([0.0, 1.0]),
        repetition_penalty=st.sampled_from([1.0, 0.7, 1.5]),
        frequency_penalty=st.sampled_from([0.0, 0.5, -0.5]),
        presence_penalty=st.sampled_from([0.0, 1.0]),
        min_tokens=st.integers(0, 6),
        logit_bias=st.sampled_from([{}, {2: 1.5, 3: -1.5}]),
        **more,
    )
