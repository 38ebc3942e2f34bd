"""How many drafts each sequence gets in the next step: as many as raise the tokens accepted per second, often none."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Mapping, Sequence

from quire.config.speculative import MAX_DEPTH
from quire.speculate.proposer import Offer, Room
from quire.speculate.step_costs import PassCosts, StepCosts

FIRST_RATE = 0.7  # acceptance of the first drafts of all: a few are run to see
_SETTLED = 20  # drafts of a sequence that its rate goes by, at most; its first ones count for the others, too
_PRIOR = 4  # drafts that the rate of all counts as in that of a sequence
_SHARED = 100  # drafts that the rate of all goes by, at most
_FIRST = 4  # drafts of the first step with any, whose cost is a guess
_GAIN = 1.02  # that drafts must promise
_FIRST_PROBE, _LAST_PROBE = 16, 512  # steps without drafts before one is tried again
_PROBING = 0.005  # of the time, at most, in such drafts
# Steps with drafts before one without them is run, to see what it costs; sooner until it has run three times.
_BASE, _BASE_AGAIN, _BASES = 64, 16, 3
_RECENT, _LEAST = 9, 3  # steps with drafts whose lower quartile says what handling takes, at least so many

_Draft = tuple[float, int, int, int]  # -its chance, sequence, depth, rank among its siblings
_NO_ROOM = Room(0, 0)


class Rate:
    """A mean that goes by about the `most` latest values; it begins as that of `count` values."""

    __slots__ = ("count", "mean", "most")

    def __init__(self, mean: float, count: int, most: int) -> None:
        self.mean, self.count, self.most = mean, count, most

    def add(self, value: float) -> None:
        """Take in a value."""
        self.count = min(self.count + 1, self.most)
        self.mean += (value - self.mean) / self.count


class Acceptance:
    """How often drafts of a sequence were right, by grade, and when it is worth trying again."""

    __slots__ = ("pause", "rates", "rested")

    def __init__(self, grades: int) -> None:
        self.rates = [Rate(0.0, 0, _SETTLED) for _ in range(grades)]
        self.pause = _FIRST_PROBE
        self.rested = 0  # steps with an offer, since drafts were last run


class Allotment:
    """Shares drafts out. Up to `most` in a step; `grades` of the proposer, and what its passes cost."""

    def __init__(self, most: int, max_rows: int, grades: int, passes: PassCosts | None = None) -> None:
        self._most, self._passes = most, passes
        self._all = [Rate(FIRST_RATE, _PRIOR, _SHARED) for _ in range(grades)]
        self.costs = StepCosts(max_rows + most)
        self._known: dict[int, Acceptance] = {}
        self._slopes: dict[int, float] = {}
        self._bases: dict[int, int] = {}  # by rows: the last step without drafts for its cost
        self._shared = self._since_probe = 0  # steps
        self._extra = deque[float](maxlen=_RECENT)  # seconds of steps with drafts beside passes and the step
        self._skipped = 0
        self.declined = False  # the last offers were not worth it

    def start(self, seq_id: int) -> None:
        """Begin with a sequence."""
        self._known[seq_id] = Acceptance(len(self._all))

    def stop(self, seq_id: int) -> None:
        """Forget a sequence."""
        self._known.pop(seq_id, None)

    def observe(self, seq_id: int, grade: int, right: Sequence[bool]) -> None:
        """Take in which drafts were right, of those behind right ones; of siblings, the first."""
        known, every = self._known[seq_id], self._all[grade]
        own = known.rates[grade]
        for was in right:
            if own.count < _SETTLED:
                every.add(was)
            own.add(was)
        known.pause = _FIRST_PROBE if any(right) else min(2 * known.pause, _LAST_PROBE)
        known.rested = 0

    def rate(self, seq_id: int, grade: int) -> float:
        """The chance of a draft of a sequence. Before much is known of it, that of all counts."""
        own, every = self._known[seq_id].rates[grade], self._all[grade]
        return (own.mean * own.count + every.mean * _PRIOR) / (own.count + _PRIOR)

    def observe_step(self, tokens: int, seconds: float) -> None:
        """Take in the cost of a step without prompts."""
        if self.costs.observe(tokens, seconds):
            self._slopes.clear()

    def observe_extra(self, seconds: float) -> None:
        """Take in what a step with drafts took beside the step itself and the passes: to choose and to handle them."""
        self._extra.append(seconds)

    def skipped(self, steps: int) -> None:
        """Steps have run since the last `share`, besides the last one."""
        self._skipped = steps

    def share(self, rows: int, offers: Mapping[int, Offer]) -> dict[int, Room]:
        """Drafts for the next step of `rows` rows, by sequence."""
        steps, self._skipped = 1 + self._skipped, 0
        curve = self.costs.curve
        last = min(self._most, len(curve) - 1 - rows)
        if self.costs.widest <= rows and not any(
            offer.depth and not offer.grows for offer in offers.values()
        ):
            last = min(last, _FIRST)
        self._shared += steps
        self._since_probe += steps
        self.declined = last < 1 or not offers
        if self.declined or self._base_is_due(rows):
            return {}
        heap, slope = list[_Draft](), self._slope(rows, last)
        least = slope * rows  # a draft of a lower gain costs more than it gains
        shapes = {
            seq_id: _Shape(offer, self.rate(seq_id, offer.grade), least) for seq_id, offer in offers.items()
        }
        for seq_id, shape in shapes.items():
            if (gain := shape.first()) > least:
                heap.append((-gain, seq_id, 1, 0))
        heapq.heapify(heap)
        rooms: dict[int, Room] = {}
        for seq_id, depth in self._worth(rows, last, heap, shapes):
            before = rooms.get(seq_id, _NO_ROOM)
            rooms[seq_id] = Room(before.drafts + 1, max(before.depth, depth))
        self._probe(offers, rooms, steps, rows, last)
        self.declined = not rooms
        return rooms

    def _probe(
        self, offers: Mapping[int, Offer], rooms: dict[int, Room], steps: int, rows: int, last: int
    ) -> None:
        """Add a draft of a sequence that has rested for long, unless that takes too much time or can gain nothing."""
        slope = self._slope(rows, last)
        due = slope * rows < 1
        for seq_id in offers.keys() - rooms.keys():
            known, offer = self._known[seq_id], offers[seq_id]
            if due and known.rested >= known.pause:
                passed = (
                    self._passes.of(max(offer.behind, offer.backlog), self.costs.unit)
                    if self._passes
                    else 0.0
                )
                price = slope + (passed + self._beside()) / self.costs.curve[rows]
                if self._since_probe * _PROBING >= price:
                    whole = offer.depth and not offer.grows
                    rooms[seq_id] = Room(min(last, offer.length), offer.depth) if whole else Room(1, 1)
                    self._since_probe, due = 0, False
            known.rested += steps

    def _worth(
        self, rows: int, last: int, heap: list[_Draft], shapes: Mapping[int, _Shape]
    ) -> list[tuple[int, int]]:
        """The drafts that promise the most tokens per second: their sequences and depths."""
        in_turn = len(heap) < 2 and not any(shape.offer.grows for shape in shapes.values())
        if self._passes is None or self._passes.once or in_turn:
            return self._likeliest(rows, last, heap, shapes, MAX_DEPTH)[1]
        # A pass makes the drafts of one depth for all sequences: the first of them pays for it.
        best, found = 0.0, list[tuple[int, int]]()
        for deepest in range(1, MAX_DEPTH + 1):
            rate, order = self._likeliest(rows, last, list(heap), shapes, deepest)
            if rate <= best:
                break
            best, found = rate, order
        return found

    def _likeliest(
        self, rows: int, last: int, heap: list[_Draft], shapes: Mapping[int, _Shape], deepest: int
    ) -> tuple[float, list[tuple[int, int]]]:
        """As many of the likeliest drafts as are best, by sequence and depth, and their tokens per unit of cost."""
        # The likeliest draft next, whatever sequence it is for: gains fall from one to the next.
        curve, order, tokens = self.costs.curve, list[tuple[int, int]](), float(rows)
        best, best_rate = 0, _GAIN * rows / curve[rows]
        bill, beside = _Bill(self._passes, self.costs.unit) if self._passes else None, self._beside()
        taken = dict.fromkeys(shapes, 0)
        tips: dict[tuple[int, int], int] = {}  # drafts taken, by sequence and depth
        while heap and len(order) < last:
            gain, seq_id, depth, rank = heap[0]
            shape = shapes[seq_id]
            count = shape.at_once
            if len(order) + count > last or taken[seq_id] + count > shape.offer.length:
                heapq.heappop(heap)
                continue
            taken[seq_id] += count
            tokens -= gain * count
            order += [(seq_id, max(depth, shape.whole))] * count
            cost = curve[rows + len(order)] + beside
            if bill is not None:
                cost += bill.add(depth, rank, shape.offer.behind) if shape.offer.behind else bill.sum
            if tokens / cost > best_rate:
                best, best_rate = len(order), tokens / cost
            goes_on = depth < deepest
            if goes_on and shape.offer.siblings:
                number = tips.get((seq_id, depth), 0)
                tips[seq_id, depth] = number + 1
                goes_on = number < shape.offer.spread
            more = shape.behind(gain, seq_id, depth, rank, goes_on)
            if more:
                heapq.heapreplace(heap, more[0])
                for draft in more[1:]:
                    heapq.heappush(heap, draft)
            else:
                heapq.heappop(heap)
        return best_rate, order[:best]

    def _base_is_due(self, rows: int) -> bool:
        """Whether too little is known of a step without drafts. Not again at once: one with prompts tells nothing."""
        times, ago = self.costs.known(rows)
        last = self._bases.get(rows, -_BASE_AGAIN)
        due = (times < _BASES or ago >= _BASE) and self._shared - last > _BASE_AGAIN
        if due:
            self._bases[rows] = self._shared
        return due

    def _beside(self) -> float:
        """What drafts cost beside rows and passes, in units of the curve; 0 while it is not known."""
        unit = self.costs.unit
        return (
            sorted(self._extra)[len(self._extra) // 4] / unit if unit and len(self._extra) >= _LEAST else 0.0
        )

    def _slope(self, rows: int, last: int) -> float:
        """The least relative cost of a draft in a step of so many rows: a rate below it times rows gains nothing."""
        slope = self._slopes.get(rows)
        if slope is None:
            curve = self.costs.curve
            slope = min((curve[rows + k] / curve[rows] - 1) / k for k in range(1, last + 1))
            self._slopes[rows] = slope
        return slope


class _Shape:
    """What is expected of the drafts of an offer, the first of which is right with chance `rate`; those with a gain up
    to `least` are left out."""

    __slots__ = ("_depth", "_gains", "_least", "at_once", "offer", "whole")

    def __init__(self, offer: Offer, rate: float, least: float) -> None:
        self.offer, self._least = offer, least
        self._gains, wrong = [rate], 1 - rate  # by rank
        for chance in offer.siblings:
            self._gains.append(wrong * chance)
            wrong *= 1 - chance
        self._depth = offer.depth or offer.length
        self.whole = 0 if offer.grows else offer.depth  # its depth
        self.at_once = offer.length if self.whole else 1

    def first(self) -> float:
        """Expected tokens a draft: of the first one; of all of a whole tree, which goes on rightly so often."""
        rate = self._gains[0]
        if not self.whole:
            return rate
        return sum(rate**depth for depth in range(1, self.whole + 1)) / self.offer.length

    def behind(self, gain: float, seq_id: int, depth: int, rank: int, goes_on: bool) -> list[_Draft]:
        """The drafts that can be taken when this one has been: behind it, if it goes on, and beside it."""
        found: list[_Draft] = []
        if self.whole:
            return found
        gains = self._gains
        if goes_on and depth < self._depth:
            found.append((gain * gains[0], seq_id, depth + 1, 0))
        if rank + 1 < len(gains) and gains[rank]:
            found.append((gain / gains[rank] * gains[rank + 1], seq_id, depth, rank + 1))
        return [draft for draft in found if -draft[0] > self._least]


class _Bill:
    """What the passes for drafts cost: one for each depth, over the sequences that get a draft of that depth."""

    def __init__(self, passes: PassCosts, unit: float) -> None:
        self._passes, self._unit = passes, unit
        self._tokens: list[float] = []  # of each pass
        self._costs: list[float] = []
        self.sum = 0.0

    def add(self, depth: int, rank: int, behind: float) -> float:
        """The sum, with a draft of a depth from 1 up. One pass names all siblings."""
        if rank or (self._passes.once and depth > 1):
            return self.sum
        if depth > len(self._tokens):
            self._tokens.append(0.0)
            self._costs.append(0.0)
        self._tokens[depth - 1] += behind if depth == 1 else 1.0
        cost = self._passes.of(self._tokens[depth - 1], self._unit)
        self.sum += cost - self._costs[depth - 1]
        self._costs[depth - 1] = cost
        return self.sum
