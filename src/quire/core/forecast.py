"""When a request will get its first token: the steps ahead of it, played in advance.

The play knows what the scheduler does: running sequences decode first, prompts share the rest of the tokens of a step
in order, a waiting sequence starts when there is a slot and room for its prompt. It goes from one event (a prompt is
complete, a stream ends) to the next, all steps in between having the cost of the first. A step that runs comes to its
end without the new request. What arrives later is unknown and left out: under orders by arrival it changes little.

Where sequences take turns (core/step_sharing) a step has half of those that decode, each of which has a token in every
other step, and a small chunk of the prompts. One sequence alone has a token in each: none runs beside it.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Iterable, Sequence
from operator import attrgetter

from quire.core.cost_model import FEATURES, bend_of
from quire.core.step_sharing import CHUNK
from quire.records import dataclass

PACE_MEMORY = 1 / 64  # of the latest step in the mean time of steps with streams
_OVER = 0.95  # of the time since a step began: one that should have ended by then has, unheard of


@dataclass(frozen=True, slots=True)
class Demand:
    """A sequence that waits or runs: prompt tokens still to compute, those computed, and tokens of output to come."""

    prompt: int
    computed: int
    output: float


@dataclass(frozen=True, slots=True)
class Live:
    """A request that runs or waits, and its place (Policy.place). `late`: it came after the running step had begun."""

    place: tuple[float, ...]
    started: bool
    work: Demand
    late: bool = False


@dataclass(frozen=True, slots=True)
class Forecast:
    """Seconds from now. `start` is when the request leaves the queue, `end` when its answer is complete as far as that
    was played: 0 if it was not."""

    start: float
    ttft: float
    tpot: float
    end: float = 0.0

    def finish(self, output: float) -> float:
        """The end of an answer of so many tokens: as played, or by the pace of recent steps if that is later."""
        return max(self.end, self.ttft + max(0.0, output - 1) * self.tpot)


class _Play:
    """The state of a play."""

    def __init__(
        self,
        costs: Sequence[float],
        bends: Sequence[float],
        budget: int,
        slots: int,
        tokens: int,
        *,
        turns: bool,
    ) -> None:
        self.step_cost, self.row, self.token, self.key, self.work = costs[:5]
        self.bends = bends
        self.budget, self.slots, self.room = budget, slots, tokens
        self.turns = turns
        self.now, self.rounds = 0.0, 0.0  # rounds: tokens that a stream has had
        self.ends: list[tuple[float, int]] = []  # streams: the round in which each ends, tokens that it holds
        self.keys = 0.0  # that decoding streams read in a step
        self.prompts: deque[list[float]] = (
            deque()
        )  # tokens left, computed, output; the last one may be the new request
        self.seconds = 0.0  # of steps with streams, and their number
        self.paced = 0.0

    def start(self, work: Demand) -> None:
        self.room -= work.prompt + work.computed
        if work.prompt > 0:
            self.prompts.append([work.prompt, work.computed, work.output])
        else:
            self.decode(work.computed, work.output)

    def decode(self, held: float, output: float) -> None:
        heapq.heappush(self.ends, (self.rounds + max(1.0, output), int(held)))
        self.keys += held

    def fits(self, work: Demand) -> bool:
        running = len(self.ends) + len(self.prompts)
        return running < self.slots and (not running or work.prompt + work.computed <= self.room)

    def board(self, waiting: list[Live]) -> list[Live]:
        """Start those that are in the running step; returns the others."""
        left, full = [], False
        space = self.chunk - sum([prompt[0] for prompt in self.prompts])
        for live in waiting:
            full = full or not (live.late or (space > 0 and self.fits(live.work)))
            if full or live.late:
                left.append(live)
            else:
                self.start(live.work)
                space -= live.work.prompt
        return left

    @property
    def round_steps(self) -> int:
        """Steps in which each stream has a token."""
        return 2 if self.turns and len(self.ends) + len(self.prompts) > 1 else 1

    @property
    def rows(self) -> int:
        """Streams in a step."""
        return -(-len(self.ends) // self.round_steps)

    @property
    def chunk(self) -> int:
        """Tokens of prompts in a step."""
        return min(self.budget - self.rows, CHUNK) if self.turns else self.budget - self.rows

    def plain(self) -> float:
        """Seconds of a step without prompts."""
        return self.step_cost + self.row * self.rows + self.key * self.keys / self.round_steps

    def fill(self, queue: deque[Demand]) -> None:
        """Start what fits of those that wait."""
        while queue and self.fits(queue[0]):
            self.start(queue.popleft())

    def finish_step(self, elapsed: float) -> None:
        """To the end of the step that runs now, where the last one heard of ended so long ago."""
        while self.ends or self.prompts:
            self.advance(1)
            if self.now >= _OVER * elapsed:
                break
        self.now = max(0.0, self.now - elapsed)

    def advance(self, most: float = math.inf) -> int:
        """To the next event, at most so many steps. Returns how many prompts were completed."""
        rows, each, cost, complete = self.rows, self.round_steps, self.plain(), []
        count = min(most, max(1.0, (self.ends[0][0] - self.rounds) * each) if rows else 1.0)
        if self.prompts:
            chunk = float(max(1, self.chunk))
            whole = self.prompts[0][0] // chunk  # steps that the first one has for itself
            if whole:
                count, rest = min(count, whole), 0.0
                cost += self._take(self.prompts[0], chunk * count) / count
            else:
                count, rest = 1.0, chunk
                for prompt in self.prompts:
                    taken = min(prompt[0], rest)
                    rest -= taken
                    cost += self._take(prompt, taken)
                    if rest <= 0:
                        break
            cost *= bend_of(self.bends, rows, chunk - rest)
            while self.prompts and self.prompts[0][0] <= 0:
                complete.append(self.prompts.popleft())
        self.now += count * cost
        self.rounds += count / each
        if rows:
            self.seconds, self.paced = self.seconds + count * cost, self.paced + count / each
            self.keys += len(self.ends) * count / each
        while self.ends and self.ends[0][0] <= self.rounds:
            _, held = heapq.heappop(self.ends)
            self.keys = max(0.0, self.keys - held)
            self.room += held
        for _, computed, output in complete:
            self.decode(computed, output - 1)
        return len(complete)

    def _take(self, prompt: list[float], tokens: float) -> float:
        """Compute a part of a prompt; returns its seconds."""
        work = tokens * (prompt[1] + tokens / 2)
        prompt[0] -= tokens
        prompt[1] += tokens
        return self.token * tokens + self.work * work


_place = attrgetter("place")


def outlook(
    costs: Sequence[float],
    lives: Iterable[Live],
    new: Live,
    *,
    budget: int,
    slots: int,
    tokens: int,
    most: float = math.inf,
    pace: float | None = None,
    elapsed: float | None = None,
    to_end: bool = False,
    bends: Sequence[float] = (),
    turns: bool = False,
) -> Forecast:
    """The times of a request among those that live: it waits behind those with a lower place, and those with a higher
    one slow its answer down, which is played `to_end`. O(live · log live).

    `costs` and `bends` are those of a cost model, `tokens` is the capacity of the KV cache. A play ends after `most`
    seconds: `ttft` is infinite then. `pace` is the mean time of recent steps with streams: later prompts will slow this
    request down as they did others. `elapsed` is how long steps have been running since the last report, None if none
    is. `turns`: sequences take turns in two steps.
    """
    if len(costs) != len(FEATURES):
        raise ValueError(f"costs: {len(costs)} numbers, {len(FEATURES)} are expected")
    play = _Play(costs, bends, budget, slots, tokens, turns=turns)
    order = sorted(lives, key=_place)
    for live in order:
        if live.started:
            play.start(live.work)
    waiting = [live for live in order if not live.started]
    if elapsed is not None:
        waiting = play.board(waiting)
        play.finish_step(elapsed)
    queue = deque(live.work for live in waiting if live.place <= new.place)
    start, before = math.inf, 0  # before: prompts that are completed first
    while True:
        play.fill(queue)
        if not queue and math.isinf(start) and play.fits(new.work):
            start, before, work = play.now, len(play.prompts), new.work
            play.start(work if work.prompt else Demand(1, work.computed, work.output))
        if play.now > most or not (play.ends or play.prompts):
            return Forecast(start, math.inf, math.inf)
        before -= play.advance()
        if before < 0 and math.isfinite(start):
            break
    plain = play.plain() * play.round_steps
    if pace is not None:
        pace *= play.round_steps
    else:
        pace = play.seconds / play.paced if play.paced else 0.0
    ttft, tpot = play.now, max(plain, pace)
    if not to_end:
        return Forecast(start, ttft, tpot)
    queue = deque(live.work for live in waiting if live.place > new.place)
    last = play.rounds + new.work.output - 1
    while play.rounds < last and play.now <= most:
        play.fill(queue)
        play.advance()
    return Forecast(start, ttft, tpot, play.now)
