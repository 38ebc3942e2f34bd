"""Simulation 2: chances of the next token, shaped by the sampler that serves requests."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from quire.executor.base import F32
from quire.executor.sampler import HostSampler
from quire.learn.scene import Chart, ChartSeries, Scene
from quire.planner.figure import Figure
from quire.records import dataclass
from quire.types import NewSeq, SamplingParams

STORY = "The cat sat on the"
_LISTED = {"mat": 0.42, "floor": 0.15, "bed": 0.12, "roof": 0.08, "couch": 0.06}
_VOCABULARY = 128_256  # tokens that the listed ones are of
_SHOWN = 8


@dataclass(frozen=True, slots=True)
class Likely:
    """The likeliest tokens that a model gave, with the natural logarithms of their chances; what they leave is shared
    by the rest of the vocabulary equally."""

    names: Sequence[str]
    logprobs: Sequence[float]
    vocabulary: int

    def logits(self) -> F32:
        """A row for the sampler, [vocabulary]: the listed tokens first."""
        rest = self.vocabulary - len(self.names)
        left = max(1 - math.fsum(map(math.exp, self.logprobs)), 1e-12)
        row = np.full(self.vocabulary, math.log(left / rest) if rest else 0.0, np.float32)
        row[: len(self.names)] = self.logprobs
        return row


def shaped(logits: F32, params: SamplingParams) -> F32:
    """What the sampler draws from under these parameters: a chance for each of the logits."""
    sampler = HostSampler(len(logits), 1)
    try:
        sampler.add(
            0, NewSeq(seq_id=0, token_ids=[0], prompt_len=1, params=params, sample_index=0, seed=0, blocks=())
        )
        chances = np.zeros((1, len(logits)), np.float32)
        first, one = np.zeros(1, np.int32), np.ones(1, np.int32)
        made = sampler.guess({"logits": logits.reshape(1, -1)}, first, one, 1, chances)
    finally:
        sampler.close()
    if params.temperature == 0:
        chances[0, made.token_ids[0, 0]] = 1.0
    found: F32 = chances[0]
    return found


def decode_loop(temperature: float, top_k: int, top_p: float) -> Scene:
    """The table that lessons print."""
    listed = Likely([*_LISTED], [math.log(chance) for chance in _LISTED.values()], _VOCABULARY)
    now = shaped(listed.logits(), SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p))
    count = len(_LISTED)
    figures = [Figure(name, float(now[at])) for at, name in enumerate(_LISTED)]
    figures.append(Figure("other tokens", float(now[count:].sum()), "", f"{_VOCABULARY - count:,} of them"))
    figures.append(Figure("candidates kept", int((now[:count] > 0).sum()), "of the listed ones"))
    chart = Chart(
        f'After "{STORY}"', "bars", "token", "probability",
        [ChartSeries("temperature 1, all candidates", [*_LISTED], [*_LISTED.values()]),
         ChartSeries("now", [*_LISTED], [float(chance) for chance in now[:count]])],
    )  # fmt: skip
    return Scene(
        figures, [chart],
        remark="At temperature 0.5 chances are squared and made to sum to 1: mat then has 0.79, where lessons print"
        " 0.72.",
    )  # fmt: skip


def of_this_model(likely: Likely, params: SamplingParams, drawn: Sequence[int]) -> Scene:
    """What the model that serves said, what the sampler makes of it, and how often each token was `drawn`: a count for
    each of the likely ones, and behind them one for all others."""
    now = shaped(likely.logits(), params)
    shown, total = min(_SHOWN, len(likely.names)), sum(drawn)
    names = [f"this model: {name}" for name in likely.names[:shown]]
    before = [math.exp(value) for value in likely.logprobs[:shown]]
    figures = [
        Figure(name, float(now[at]), "", f"{before[at]:.4g} at temperature 1; drawn {drawn[at]} times of {total}")
        for at, name in enumerate(names)
    ]  # fmt: skip
    figures.append(
        Figure("this model: all others", float(now[shown:].sum()), "", f"drawn {sum(drawn[shown:])} times")
    )
    chart = Chart(
        f'After "{STORY}", on this server', "bars", "token", "probability",
        [ChartSeries("temperature 1, all candidates", likely.names[:shown], before),
         ChartSeries("now", likely.names[:shown], [float(chance) for chance in now[:shown]]),
         ChartSeries(f"drawn, of {total}", likely.names[:shown], [count / total for count in drawn[:shown]])],
    )  # fmt: skip
    return Scene(figures, [chart])
