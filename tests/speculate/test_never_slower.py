"""On a virtual clock, with noise, looks and the handling of drafts included: never much slower than without drafts."""

from __future__ import annotations

import random

import pytest

from quire.speculate.allotment import Allotment
from quire.speculate.proposer import Offer
from quire.speculate.rests import Rests
from quire.speculate.step_costs import PassCosts

STEPS = 1500
NOISE, SLOW = 0.1, 0.05  # deviation of a step's time; how often it takes twice as long
BACKLOG = 50  # tokens that the draft has not seen at first


class Clock:
    """Steps of streams whose drafts are right with chance `rate`. In steps of one token: a row more costs `slope`, a
    pass `price`, a look and the handling of drafts `python` each."""

    def __init__(self, streams: int, rate: float, slope: float, price: float, python: float) -> None:
        self.streams, self.rate, self.slope, self.price, self.python = streams, rate, slope, price, python
        self.random = random.Random(1)
        self.passes = PassCosts(64, price)
        self.allotment, self.rests = Allotment(64, 32, 1, self.passes), Rests()
        for stream in range(streams):
            self.allotment.start(stream)
        self.behind = [BACKLOG] * streams
        self.made, self.seconds = 0, 0.0

    def cost(self, tokens: int) -> float:
        return 1 + self.slope * (tokens - 1)

    def run(self) -> float:
        """Throughput relative to none, whose steps have the same noise."""
        counts: dict[int, int] = {}
        for _ in range(STEPS):
            counts = self.step(counts)
        plain = self.streams / (self.cost(self.streams) * (1 + NOISE * 0.8) * (1 + SLOW))
        return self.made / self.seconds / plain

    def step(self, counts: dict[int, int]) -> dict[int, int]:
        """A step with so many drafts of each stream; those of the next one."""
        noise, allotment, rests = self.random, self.allotment, self.rests
        taken = self.draft(counts)
        tokens = self.streams + sum(counts.values())
        step = self.cost(tokens) * (1 + abs(noise.gauss(0, NOISE))) * (2 if noise.random() < SLOW else 1)
        accepted = 0
        for stream, count in counts.items():
            right = next((k for k in range(count) if noise.random() >= self.rate), count)
            allotment.observe(stream, 0, [k < right for k in range(min(right + 1, count))])
            accepted += right
        self.made += self.streams + accepted
        self.seconds += taken + step
        if counts and (plain := allotment.costs.seconds(self.streams)):
            allotment.observe_extra(2 * self.python)
            won = plain / self.streams * (self.streams + accepted) - step - taken - self.python
            rests.won(won / plain)
        allotment.observe_step(tokens, step)
        if not (counts or rests.step()) or rests.resting:
            return {}
        return self.look()

    def draft(self, counts: dict[int, int]) -> float:
        """The time of passes for drafts, and of handling them."""
        taken = self.python if counts else 0.0
        for depth in range(max(counts.values(), default=0)):
            going = [stream for stream, count in counts.items() if count > depth]
            tokens = sum(1 if depth else self.behind[stream] for stream in going)
            passed = self.price * (1 + 0.02 * (tokens - 1)) * (1 + abs(self.random.gauss(0, 0.05)))
            self.passes.observe(tokens, passed)
            taken += passed
        self.behind = [1 if stream in counts else behind + 1 for stream, behind in enumerate(self.behind)]
        return taken

    def look(self) -> dict[int, int]:
        offers = {
            stream: Offer(8, 0, behind if behind <= 32 else 1 + behind / 128, backlog=behind)
            for stream, behind in enumerate(self.behind)
        }
        self.allotment.skipped(max(0, self.rests.passed - 1))
        self.rests.passed = 0
        counts = {stream: room.drafts for stream, room in self.allotment.share(self.streams, offers).items()}
        self.seconds += self.python
        if not counts and self.allotment.declined:
            self.rests.looked(self.python, self.allotment.costs.seconds(self.streams))
        return counts


@pytest.mark.parametrize("python", [0.002, 0.3], ids=["large model", "tiny model"])
@pytest.mark.parametrize("price", [0.12, 0.6])
@pytest.mark.parametrize(("streams", "slope"), [(1, 0.08), (4, 0.01), (16, 0.7)])
def test_drafts_cost_no_more_than_three_percent(
    streams: int, slope: float, price: float, python: float
) -> None:
    for rate in (0.0, 0.5, 0.7):
        assert Clock(streams, rate, slope, price, python).run() > 0.97


def test_drafts_of_a_large_model_gain_what_they_can() -> None:
    assert Clock(1, 0.8, 0.05, 0.12, 0.002).run() > 1.7
    assert Clock(4, 0.8, 0.01, 0.12, 0.002).run() > 1.7
