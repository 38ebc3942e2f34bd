"""Trees of what a draft finds likely: Li et al., EAGLE-2 (arXiv 2406.16858); Medusa's are a case of them.

A draft names several tokens for a place, and says how sure it is of each. How often that is right is learned. The value
of a draft is the chance that it and all before it are right: the tree has the drafts of the greatest value.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise

from quire.executor.base import Guesses
from quire.records import dataclass
from quire.speculate.allotment import Rate
from quire.speculate.proposer import DraftTree, Offer, Room

# Upper ends of the ranges of what a draft says, within which its guesses count as equally good.
_RANGES = (0.01, 0.03, 0.08, 0.15, 0.25, 0.4, 0.55, 0.7, 0.82, 0.91, 0.96, 0.99)
_PRIOR, _SHARED = 4, 200  # guesses: what is said of them counts as so many; a rate goes by at most so many
_FIRST_SIBLING = 0.4  # chance of a sibling, until some have been seen; half of it for each further one


@dataclass(slots=True)
class DraftPlace:
    """What may stand in a place, if the drafts before are right: tokens, the likeliest first, with how often such ones
    are right. `below`: the place behind each, None where it is not known.
    """

    token_ids: list[int]
    rates: list[Rate]
    below: list[DraftPlace | None]


@dataclass(slots=True)
class Tip:
    """A draft that a pass goes on with: the token of a rank in a place of the pass before, the `parent`-th of its
    tree's. `value`: the chance that it and all before it are right. `before`: the tip that the place is behind.
    `line`: of the block tables."""

    place: DraftPlace
    rank: int
    parent: int
    value: float
    before: Tip | None
    line: int = -1

    @property
    def token(self) -> int:
        return self.place.token_ids[self.rank]

    def path(self) -> list[int]:
        """The tokens up to this one."""
        found, at = list[int](), self
        while True:
            found.append(at.token)
            if at.before is None:
                return found[::-1]
            at = at.before


class GrowingTree:
    """The drafts of a sequence while passes make them. Its latest places are behind the `tips`; at first there is the
    `root` alone. `depth`: of these places. `own`: the latest tip in the sequence's own line."""

    __slots__ = ("_best", "_places", "depth", "own", "root", "tips")

    def __init__(self, root: DraftPlace) -> None:
        self.root, self.depth, self.tips = root, 1, list[Tip]()
        self.own: Tip | None = None
        self._places, self._best = [root], list[float]()

    def add(self, places: Sequence[DraftPlace]) -> None:
        """Take what a pass says of the places behind the tips."""
        for tip, place in zip(self.tips, places, strict=True):
            tip.place.below[tip.rank] = place
        self._places, self.depth = list(places), self.depth + 1

    def go_on(self, spread: int, room: Room, chance: float) -> list[Tip]:
        """Choose the tips of the next pass, once for each depth: up to `spread` drafts of the latest places, of the
        greatest value, behind which one that is right with this chance would be among the best that there is room for.
        """
        if self.depth >= min(room):
            return []
        found: list[tuple[float, int, int]] = []
        for parent, place in enumerate(self._places):
            above = self.tips[parent].value if self.tips else 1.0
            found += [(-above * rate.mean, parent, rank) for rank, rate in enumerate(place.rates)]
        found.sort()
        best = self._best
        best += [value for value, _, _ in found]
        best.sort()
        del best[room.drafts :]
        least = best[-1] if len(best) == room.drafts else 0.0
        before = self.tips
        self.tips = [
            Tip(self._places[parent], rank, parent, -value, before[parent] if before else None)
            for value, parent, rank in found[:spread]
            if value * chance < least
        ]
        return self.tips


class TreeGrowth:
    """Makes trees of places with up to `width` tokens, chains with 1, and learns from what became of them. Behind up to
    `spread` drafts of one depth there are places."""

    def __init__(self, width: int, spread: int = 1) -> None:
        self.width, self._spread = width, spread
        middles = [(low + high) / 2 for low, high in pairwise((0.0, *_RANGES, 1.0))]
        # of first tokens and of their siblings, by what is said of them
        self._rates = [[Rate(middle, _PRIOR, _SHARED) for middle in middles] for _ in range(2)]
        # by rank: how often a token is right, where those before it are wrong
        self._ranks = [Rate(_FIRST_SIBLING * 0.5**rank, _PRIOR, _SHARED) for rank in range(-1, width - 1)]

    def offer(self, most: int, behind: float, depth: int = 0) -> Offer:
        """One of up to `most` drafts, up to `depth` in a row, or with 0 as many."""
        if self.width == 1:
            return Offer(min(most, depth or most), 0, behind)
        siblings = tuple(rate.mean for rate in self._ranks[1:])
        return Offer(most, 0, behind, depth or most, siblings, self._spread)

    def places(self, guesses: Guesses) -> list[DraftPlace]:
        """A place for each row."""
        made: list[DraftPlace] = []
        for tokens, sure in zip(guesses.token_ids.tolist(), guesses.sure.tolist(), strict=True):
            count = tokens.index(-1) if tokens[-1] < 0 else len(tokens)
            rates = [
                self._rates[rank > 0][bisect_right(_RANGES, said)] for rank, said in enumerate(sure[:count])
            ]
            order: Sequence[int] = range(count)
            if any(rate.mean < then.mean for rate, then in pairwise(rates)):
                order = sorted(order, key=lambda i: -rates[i].mean)
            made.append(DraftPlace([tokens[i] for i in order], [rates[i] for i in order], [None] * count))
        return made

    def go_on(self, tree: GrowingTree, room: Room) -> list[Tip]:
        """The tips of the next pass; see GrowingTree.go_on."""
        return tree.go_on(self._spread, room, self._ranks[0].mean)

    def learn(self, root: DraftPlace | None, tokens: Sequence[int]) -> None:
        """Take in what followed."""
        place = root if self.width > 1 else None
        for token in tokens:
            if place is None or not place.token_ids:
                return
            right = -1
            for rank, (guess, rate) in enumerate(zip(place.token_ids, place.rates, strict=True)):
                rate.add(guess == token)
                if right < 0:
                    self._ranks[rank].add(guess == token)
                    right = rank if guess == token else -1
            place = place.below[right] if right >= 0 else None

    def drafts(self, root: DraftPlace, count: int) -> DraftTree | list[int]:
        """The `count` drafts of the greatest value."""
        tokens: list[int] = []
        parents: list[int] = []
        number = 0
        # A token waits until its parent and its likelier sibling are in the tree; numbers keep equal ones in order.
        waiting = [(-root.rates[0].mean, 0, root, 0, 0, 1.0)] if root.token_ids else []
        while waiting and len(tokens) < count:
            value, _, place, rank, parent, above = heapq.heappop(waiting)
            tokens.append(place.token_ids[rank])
            parents.append(parent)
            below = place.below[rank]
            if below is not None and below.token_ids:
                number += 1
                heapq.heappush(waiting, (value * below.rates[0].mean, number, below, 0, len(tokens), -value))
            if rank + 1 < len(place.token_ids):
                number += 1
                chance = above * place.rates[rank + 1].mean
                heapq.heappush(waiting, (-chance, number, place, rank + 1, parent, above))
        return DraftTree(tokens, tuple(parents)) if self.width > 1 else tokens
