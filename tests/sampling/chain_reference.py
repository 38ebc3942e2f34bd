"""The steps of the chain in plain numpy, each written from its definition: float64, full sorts, loops over tokens.

`nudge` moves every boundary a little, relatively: a token within rounding of it may be on either side.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from quire import _native
from quire.types import NewSeq, SamplingParams

XTC_DRAW = 4  # purpose of the number in Philox, see csrc/philox.h
DEFAULT = ("penalties", "dry", "temperature", "top_n_sigma", "top_k", "top_p", "min_p", "typ_p", "xtc")
# Mirostat keeps penalties and temperature, and takes the place of all truncation.
MIROSTAT = ("penalties", "dry", "temperature", "mirostat")


def softmax(x: np.ndarray) -> np.ndarray:
    weight = np.exp(x - x.max())
    return weight / weight.sum()


def ranked(x: np.ndarray) -> np.ndarray:
    """Ids that can be sampled, the greatest logit first, the lower id first among equals."""
    order = np.lexsort((np.arange(len(x)), -x))
    return order[x[order] > -np.inf]


def only(x: np.ndarray, ids: np.ndarray) -> np.ndarray:
    y = np.full_like(x, -np.inf)
    y[ids] = x[ids]
    return y


def uniform_of(new: NewSeq, position: int) -> float:
    seed = new.seed % 2**64
    words = _native.philox4x32([position, 0, new.sample_index, XTC_DRAW], seed % 2**32, seed >> 32)
    return ((words[1] << 32 | words[0]) >> 11) * 2.0**-53


class Reference:
    """What a row of a sequence becomes, `past` being its tokens so far and `mu` its mirostat's state."""

    def __init__(self, new: NewSeq, position: int, nudge: float = 0.0, mu: float | None = None) -> None:
        self.p, self.nudge = new.params, nudge
        self.past, self.prompt_len = new.token_ids, new.prompt_len
        self.breakers = set(new.texts.breakers) if new.texts else set()
        self.bad_words = new.texts.bad_words if new.texts else ()
        self.uniform = uniform_of(new, position)
        self.mu = 2 * self.p.mirostat_tau if mu is None else mu
        self.n = 0

    @np.errstate(divide="ignore", invalid="ignore")  # of tokens that are cut
    def run(self, logits: np.ndarray) -> np.ndarray:
        x = logits.astype(np.float64)
        self.n = len(x)
        output = self.past[self.prompt_len :]
        for word in self.bad_words:  # vLLM, v1/sample/ops/bad_words.py
            before = list(word[:-1])
            if len(before) <= len(output) and output[len(output) - len(before) :] == before:
                x[word[-1]] = -np.inf
        order: Sequence[str] = DEFAULT if self.p.samplers is None else self.p.samplers
        for name in MIROSTAT if self.p.mirostat else order:
            step: Callable[[np.ndarray], np.ndarray] = getattr(self, name)
            x = step(x).astype(np.float32).astype(np.float64)  # as logits are kept
        return x

    def fewest(self, count: int, kept: int) -> int:
        """As many as are kept, but not fewer than min_keep as far as there are so many."""
        return min(max(kept, self.p.min_keep), count)

    def penalties(self, x: np.ndarray) -> np.ndarray:
        p, y = self.p, x.astype(np.float32)
        first = 0 if p.repeat_last_n < 0 else max(0, len(self.past) - p.repeat_last_n)
        window = self.past[first:]
        outputs = Counter(t for i, t in enumerate(window, first) if i >= self.prompt_len)
        for token in set(window):
            ratio = np.float32(p.repetition_penalty)
            y[token] = y[token] / ratio if y[token] > 0 else y[token] * ratio
            if outputs[token]:
                y[token] -= np.float32(p.frequency_penalty) * np.float32(outputs[token])
                y[token] -= np.float32(p.presence_penalty)
        return y.astype(np.float64)

    def dry(self, x: np.ndarray) -> np.ndarray:
        """text-generation-webui, modules/sampler_hijack.py, DRYLogitsProcessor."""
        p, y = self.p, x.copy()
        ids = self.past[-p.dry_penalty_last_n :] if p.dry_penalty_last_n > 0 else list(self.past)
        if not p.dry_multiplier or not p.dry_penalty_last_n or not ids or ids[-1] in self.breakers:
            return y
        longest: dict[int, int] = {}
        for i in range(len(ids) - 1):
            if ids[i] != ids[-1] or ids[i + 1] in self.breakers:
                continue
            length = 1
            while length < 50 and i - length >= 0:
                before = ids[-(length + 1)]
                if ids[i - length] != before or before in self.breakers:
                    break
                length += 1
            longest[ids[i + 1]] = max(length, longest.get(ids[i + 1], 0))
        for token, length in longest.items():
            if length >= p.dry_allowed_length:
                y[token] -= p.dry_multiplier * p.dry_base ** (length - p.dry_allowed_length)
        return y

    def temperature(self, x: np.ndarray) -> np.ndarray:
        """llama.cpp, llama_sampler_temp_ext."""
        p, heat, can = self.p, self.p.temperature, ranked(x)
        if p.dynatemp_range > 0 and not p.mirostat:
            if len(can) <= 1:
                return x
            share = softmax(x)[can]
            share = share[share > 0]
            entropy = -(share * np.log(share)).sum() / np.log(len(can))
            low, high = max(0.0, heat - p.dynatemp_range), heat + p.dynatemp_range
            heat = low + (high - low) * min(max(entropy, 0.0), 1.0) ** p.dynatemp_exponent
        return only(x, can[:1]) if heat < 1e-30 else x / heat

    def top_n_sigma(self, x: np.ndarray) -> np.ndarray:
        """Tang et al., 2024: M - n σ."""
        if self.p.top_n_sigma <= 0:
            return x
        can = x[x > -np.inf]
        least = can.max() - self.p.top_n_sigma * can.std() * (1 + self.nudge)
        return np.where(x >= least, x, -np.inf)

    def top_k(self, x: np.ndarray) -> np.ndarray:
        return only(x, ranked(x)[: self.p.top_k]) if self.p.top_k > 0 else x

    def top_p(self, x: np.ndarray) -> np.ndarray:
        if self.p.top_p >= 1:
            return x
        can = ranked(x)
        reached = np.cumsum(softmax(x)[can])
        kept = 1 + int(np.searchsorted(reached, self.p.top_p * (1 + self.nudge)))
        return only(x, can[: self.fewest(len(can), kept)])

    def min_p(self, x: np.ndarray) -> np.ndarray:
        can = ranked(x)
        weight = np.exp(x[can] - x.max())
        kept = int((weight >= min(self.p.min_p * (1 + self.nudge), 1.0)).sum()) if self.p.min_p else len(can)
        return only(x, can[: self.fewest(len(can), kept)])

    def typ_p(self, x: np.ndarray) -> np.ndarray:
        """Meister et al., 2022: the smallest set of tokens whose surprise is nearest to the entropy."""
        if self.p.typical_p >= 1:
            return x
        can = np.sort(ranked(x))
        share = softmax(x)[can]
        with np.errstate(divide="ignore", invalid="ignore"):
            surprise = -np.log(share)
            entropy = np.where(share > 0, share * surprise, 0.0).sum()
        distance = np.round(np.abs(surprise - entropy), 9)  # ties are ties
        order = np.argsort(distance, kind="stable")
        reached = np.cumsum(share[order])
        kept = 1 + int(np.searchsorted(reached, self.p.typical_p * (1 + self.nudge)))
        return only(x, can[order[: self.fewest(len(can), kept)]])

    def xtc(self, x: np.ndarray) -> np.ndarray:
        """text-generation-webui's XTCLogitsWarper, with llama.cpp's min_keep."""
        if self.uniform >= self.p.xtc_probability:
            return x
        can = ranked(x)
        above = int((softmax(x)[can] >= self.p.xtc_threshold * (1 + self.nudge)).sum())
        if above < 2 or len(can) - (above - 1) < self.p.min_keep:
            return x
        return only(x, can[above - 1 :])

    def mirostat(self, x: np.ndarray) -> np.ndarray:
        """Basu et al., 2020, algorithm 1, and its second version, as in llama.cpp."""
        can = ranked(x)
        share = softmax(x)[can]
        if self.p.mirostat == 2:
            kept = int((-np.log2(share) <= self.mu * (1 + self.nudge)).sum())
            return only(x, can[: max(kept, 1)])
        top = x[can[:100]]
        t = np.log(np.arange(2, len(top) + 1) / np.arange(1, len(top)))
        zipf = float((t * -np.diff(top)).sum() / (t * t).sum()) if len(top) > 1 else np.nan
        with np.errstate(all="ignore"):
            excess = np.float64(zipf - 1)
            norm = excess / (1 - self.n**-excess) if excess else 1 / np.log(self.n)
            k = float((norm * 2**self.mu) ** (1 / np.float64(zipf))) * (1 + self.nudge)
        kept = 1 if np.isnan(k) else int(min(max(k, 1), self.n))
        return only(x, can[:kept])

    def next_mu(self, left: np.ndarray, token: int) -> float:
        surprise = -np.log2(softmax(left)[token])
        return float(self.mu - self.p.mirostat_eta * (surprise - self.p.mirostat_tau))


def defaults(**more: object) -> SamplingParams:
    """Parameters of which DRY has no breakers: these are texts."""
    return SamplingParams(**{"dry_sequence_breakers": (), **more})  # type: ignore[arg-type]
