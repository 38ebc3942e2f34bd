"""How experts of replicas that share them change places: between rounds (expert_replicas), without another meeting.

Before a round the first replica says which two change. All ranks of a stage meet in that round, so they have heard it
before the next one: then those that have the two show them. All meet in that round, too, and before the one behind it
they take them; from then on all routers know the new places.

    round        1          2           3           4
    replica 0    says: a    shows: b    takes: c    d
    replica 1    -          shows: e    takes: -    f

The memory is one for all ranks of all replicas: what was said, how many tokens the places of each replica have had,
and the two experts.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import numpy as np

from quire.executor.base import I64, U8, ExpertLoads
from quire.executor.expert_places import (
    HeldExperts,
    counted_layers,
    movable_bytes,
    placed_at_start,
    ways,
)
from quire.program.program import Program

_SHARE = 0.02  # of the time, for experts that change places
_SAID = 64  # bytes: round, layer, one, other, nanoseconds that each of two ranks took
_LINE = 64


def exchange_bytes(programs: Sequence[Program]) -> int:
    """Bytes of the memory, for replicas with such programs, in the order of ranks; 0 if they share no experts."""
    plan, pairs = programs[0].plan, sum(counted_layers(programs).values())
    return _SAID + plan.data_parallel_size * pairs + 2 * _apart(programs) if plan.shares_experts else 0


def _apart(programs: Sequence[Program]) -> int:
    return -(-movable_bytes(programs) // _LINE) * _LINE


class RoundExchanges:
    """The experts of one rank among those of all replicas; `memory` is of exchange_bytes, of zeros at first.

    `programs`: of its own replica. The rank that leads the first replica chooses what changes.
    """

    def __init__(self, held: HeldExperts, programs: Sequence[Program], memory: U8) -> None:
        plan, self._apart = programs[0].plan, _apart(programs)
        self.replica, self._held = plan.data_parallel_rank, held
        layers = {layer.layer: layer for program in programs for layer in program.expert_layers}
        self._at = {number: placed_at_start(layers[number]) for number in counted_layers(programs)}
        self.placed = {number: [*at] for number, at in self._at.items()}  # once what was chosen has changed
        split = len(memory) - 2 * self._apart
        self._experts, numbers = memory[split:].reshape(2, -1), memory[:split].view(np.int64)
        self._said: I64 = numbers[: _SAID // 8]
        self._counts: I64 = numbers[_SAID // 8 :].reshape(plan.data_parallel_size, -1)
        self._chosen: tuple[int, int, int] | None = None
        self._again = 0.0  # no exchange before this time
        self.begun = 0  # rounds

    @property
    def ready(self) -> bool:
        """Whether two experts may be chosen: all have taken the last ones."""
        # Some ranks may still be in the last of the rounds that have begun. All have met in the one before.
        over = not self._said[0] or self.begun >= int(self._said[0]) + 2
        return self._apart > 0 and self._chosen is None and over and time.monotonic() >= self._again

    def choose(self, layer: int, one: int, other: int) -> None:
        """Have the experts at two places change, as soon as it can be; when `ready`."""
        self._chosen, at = (layer, one, other), self.placed[layer]
        at[one], at[other] = at[other], at[one]

    def begin(self) -> None:
        """The leading rank of a replica begins another round."""
        if self._chosen is not None:
            self._said[1:4], self._chosen = self._chosen, None
            self._said[4:6] = 0
            self._said[0] = self.begun + 2
        self.begun += 1

    def enter(self, number: int) -> None:
        """Before a rank runs its program in this round."""
        due = int(self._said[0])
        if due and number in {due, due + 1}:
            began = time.perf_counter_ns()
            layer, one, other = map(int, self._said[1:4])
            (self._show if number == due else self._take)(layer, one, other)
            self._said[4 + number - due] = max(self._said[4 + number - due], time.perf_counter_ns() - began)
            if number > due:
                self._again = time.monotonic() + int(self._said[4:6].sum()) / 1e9 / _SHARE

    def _show(self, layer: int, one: int, other: int) -> None:
        held = self._held
        for content, (place, _) in zip(self._experts, ways(one, other, 0), strict=True):
            if layer in held.layers and held.holds(layer, place):
                held.read(layer, place, content)

    def _take(self, layer: int, one: int, other: int) -> None:
        held, at = self._held, self._at[layer]
        at[one], at[other] = at[other], at[one]
        if layer not in held.layers:
            return
        for content, (_, to) in zip(self._experts, ways(one, other, 0), strict=True):
            if held.holds(layer, to):
                held.replace(layer, to, content)
        held.put(layer, at)

    def count(self, pairs: Sequence[I64]) -> None:
        """Add to what the places of this replica have had, in the order of `placed`."""
        self._counts[self.replica] += np.concatenate([np.zeros(0, np.int64), *pairs])

    def counted(self) -> list[I64]:
        """What the places of each layer have had of all replicas, so far."""
        ends = np.cumsum([len(at) for at in self.placed.values()])
        return np.split(self._counts.sum(0), ends[:-1]) if len(ends) else []


class SharedLoads:
    """How busy the experts that replicas share are, as the leading rank of one of them sees it. Implements ExpertLoads.

    The first replica knows what those of all have had; for the others nobody had any, so that none counts twice.
    """

    def __init__(self, own: ExpertLoads, exchanges: RoundExchanges) -> None:
        """`own`: of its own replica."""
        self._own, self._exchanges = own, exchanges
        self.ranks = own.ranks
        self._seen: dict[int, I64] = {
            layer: np.zeros(len(at), np.int64) for layer, at in exchanges.placed.items()
        }

    @property
    def move(self) -> bool:
        """See ExpertLoads.move; the first replica chooses."""
        return not self._exchanges.replica and self._exchanges.ready

    @property
    def placed(self) -> Mapping[int, Sequence[int]]:
        """See ExpertLoads.placed."""
        return self._exchanges.placed

    def take_pairs(self) -> Mapping[int, I64]:
        """See ExpertLoads.take_pairs."""
        own, exchanges = self._own.take_pairs(), self._exchanges
        exchanges.count([own[layer] for layer in exchanges.placed])
        if exchanges.replica:
            return {layer: np.zeros_like(pairs) for layer, pairs in own.items()}
        before, self._seen = self._seen, dict(zip(exchanges.placed, exchanges.counted(), strict=True))
        return {layer: pairs - before[layer] for layer, pairs in self._seen.items()}

    def swap(self, layer: int, one: int, other: int) -> None:
        """See ExpertLoads.swap; some rounds later."""
        self._exchanges.choose(layer, one, other)

    def copy(self, layer: int, one: int, other: int) -> None:
        """None: there are no places for copies."""
        raise RuntimeError(f"places {one} and {other} of layer {layer} are the only ones of their experts")
