"""Deadlines that are kept whatever answers turn out to be: the worst case of a request, and of what comes after it.

In the worst case every answer has all its `max_tokens`, no prompt is cached, and each step takes longer than the cost
model says by a margin. What is ahead of a request, or runs, is played like that; of what waits behind it, or comes
later, the price is added: the whole prompt, and a row in each of its steps. A request of a better place may also take
the slot, or the blocks, that the other one waits for, if there are not enough for all: then its whole answer counts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from quire.core.forecast import Demand, Live, outlook
from quire.core.step_sharing import CHUNK
from quire.records import dataclass


@dataclass(frozen=True, slots=True)
class Price:
    """What a request takes from another, in seconds: its prompt, `output` rows in steps of the other, and `ahead` if it
    has a better place."""

    prompt: float
    output: float
    row: float
    ahead: float = 0.0


@dataclass(frozen=True, slots=True)
class StepRoom:
    """What all share: tokens of a step, sequences at once, tokens of the KV cache. `turns`: see forecast.outlook."""

    budget: int
    slots: int
    tokens: int
    turns: bool = False


def worst_demand(prompt: int, computed: int, made: int, most: float) -> Demand:
    """Of a sample that has `made` tokens of the `most` that it may get, and none of its prompt from the cache."""
    left = 0 if made else max(1, prompt - computed)
    return Demand(left, prompt - left + made, max(1.0, most - made))


def expected_price(costs: Sequence[float], prompt: int, output: float) -> Price:
    """Of a request of one sample that is answered as predicted."""
    return Price(costs[2] * prompt, output, costs[1] + costs[3] * prompt)


def worst_price(
    costs: Sequence[float], new: Live, lives: Sequence[Live], room: StepRoom, *, rows: int = 1
) -> Price:
    """Of a request of so many samples beside those that live, all in their worst case."""
    work, samples = new.work, rows
    rows = min(room.slots, len(lives) + samples)
    keys = work.prompt + work.computed + work.output
    every = keys * samples + sum(live.work.prompt + live.work.computed + live.work.output for live in lives)
    step = costs[0] + costs[1] * rows + costs[3] * min(every, room.tokens)
    scarce = len(lives) + samples > room.slots or every > room.tokens
    space, each = (min(CHUNK, room.budget - rows), 2) if room.turns else (room.budget - rows, 1)
    chunks = math.ceil(work.prompt / max(1, space))
    return Price(
        costs[2] * work.prompt + costs[4] * work.prompt * (work.computed + work.prompt / 2),
        work.output,
        (costs[1] + costs[3] * keys) * samples,
        step * (chunks + (each * work.output if scarce else 0)),
    )


def worst_end(
    costs: Sequence[float],
    new: Live,
    lives: Iterable[Live],
    room: StepRoom,
    *,
    elapsed: float | None = None,
    most: float = math.inf,
) -> float:
    """Seconds from now until the answer of a request is complete, at the latest; infinite if that is after `most`."""
    found = list(lives)
    ahead = [live for live in found if live.started or live.place <= new.place]
    grown = sum([live.work.output for live in ahead]) + new.work.output
    played = outlook(
        costs, ahead, new, budget=room.budget, slots=room.slots, tokens=int(room.tokens - grown), most=most,
        elapsed=elapsed, to_end=True, turns=room.turns,
    )  # fmt: skip
    if not math.isfinite(played.ttft) or played.end > most:
        return math.inf
    end = max(played.ttft, played.end)
    for live in found:
        if not (live.started or live.place <= new.place):
            price = worst_price(costs, live, found, room)
            end += price.prompt + min(price.output, new.work.output) * price.row
    return end
