"""The experts of a model: how many tokens each has had, and how two of them change places.

Ranks that hold whole experts hold those at a run of places. At the start expert e is at place e, and places behind
those have the first ones once more. Routers give places of the experts that they choose, so the ops behind them know
only places (csrc/expert_places.h); tokens take turns with those of an expert that is at several. Two experts change
places between steps: both their ranks show them in memory that all map, then each takes the other's; or one is copied
over another that is elsewhere, too. A row has the bits of its expert wherever that is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from quire import _native
from quire.executor.base import I64, U8
from quire.program.memory import param_bytes
from quire.program.program import Program
from quire.program.rank_nodes import RankNodes
from quire.program.tensors import ExpertLayer

# An expert that is larger stays where it is: two are copied out and in between two steps, about 50 ms.
MOST_BYTES = 64 << 20


class UncountedExperts:
    """Of an executor that does not count them. Implements executor.base.ExpertLoads."""

    ranks, move = 1, False

    def __init__(self) -> None:
        self.placed: dict[int, list[int]] = {}

    def take_pairs(self) -> dict[int, I64]:
        """None; see ExpertLoads.take_pairs."""
        return {}

    def swap(self, layer: int, one: int, other: int) -> None:
        """See ExpertLoads.swap."""
        raise _alone(layer, one, other)

    copy = swap


class HeldExperts:
    """The experts that one executor holds. Implements executor.base.ExpertLoads; alone it has nobody to change with."""

    move = False

    def __init__(self, core: _native.Executor, program: Program) -> None:
        self.layers = {layer.layer: layer for layer in program.expert_layers}
        self._core, self.ranks = core, program.plan.expert_ranks
        self._routers = {layer.layer: router for router, layer in enumerate(program.expert_layers)}
        self.placed = {number: placed_at_start(layer) for number, layer in self.layers.items()}

    def take_pairs(self) -> dict[int, I64]:
        """See ExpertLoads.take_pairs."""
        return {
            number: np.array(self._core.take_expert_pairs(router), np.int64)
            for number, router in self._routers.items()
        }

    def swap(self, layer: int, one: int, other: int) -> None:
        """See ExpertLoads.swap."""
        raise _alone(layer, one, other)

    copy = swap

    def holds(self, layer: int, place: int) -> bool:
        """Whether a place is one of this rank's."""
        return 0 <= place - self.layers[layer].first < self.layers[layer].held

    def read(self, layer: int, place: int, into: U8) -> None:
        """Copy out the weights of the expert at a place of this rank."""
        for name, number, address in self._pieces(layer, place, into):
            self._core.read_expert(name, number, address)

    def replace(self, layer: int, place: int, content: U8) -> None:
        """Put other weights at a place of this rank: what `read` gave on another one."""
        for name, number, address in self._pieces(layer, place, content):
            self._core.replace_expert(name, number, address)

    def _pieces(self, layer: int, place: int, content: U8) -> Iterator[tuple[str, int, int]]:
        """Parameters of the expert at a place, its number in each, and the addresses of their parts of a content."""
        at, address = self.layers[layer], content.ctypes.data
        for name in at.params:
            yield name, place - at.first, address
            address += self._core.expert_bytes(name)

    def put(self, layer: int, placed: Sequence[int]) -> None:
        """From the next step on these experts are at the places of a layer, whose weights are there."""
        self._core.place_experts(self._routers[layer], placed)
        self.placed[layer] = [*placed]


def placed_at_start(layer: ExpertLayer) -> list[int]:
    """The expert at each place."""
    return [place % layer.experts for place in range(layer.places)]


def _alone(layer: int, one: int, other: int) -> RuntimeError:
    return RuntimeError(f"places {one} and {other} of layer {layer} are of one rank")


def shared_expert_bytes(programs: Sequence[Program]) -> int:
    """Bytes that ranks of these programs share for what they do with experts."""
    return 2 * _whole(_moved_bytes(programs)) + _pairs_bytes(programs)


def _moved_bytes(programs: Sequence[Program]) -> int:
    """The most bytes of an expert that may change places between ranks of one replica; 0 if none does."""
    plan = programs[0].plan
    return 0 if plan.expert_ranks == 1 or plan.shares_experts else movable_bytes(programs)


def movable_bytes(programs: Sequence[Program]) -> int:
    """The bytes of the largest expert; 0 if it is too large to move."""
    found = [_expert_bytes(program, layer) for program in programs for layer in program.expert_layers]
    return max(found, default=0) if max(found, default=0) <= MOST_BYTES else 0


def _expert_bytes(program: Program, layer: ExpertLayer) -> int:
    params = map(program.param, layer.params)
    return sum(param_bytes(param) // param.experts for param in params)


def counted_layers(programs: Sequence[Program]) -> dict[int, int]:
    """Bytes of the pairs of each layer with experts, in the order in which they lie at the end of the shared memory."""
    return {layer.layer: 8 * layer.places for program in programs for layer in program.expert_layers}


def _pairs_bytes(programs: Sequence[Program]) -> int:
    return sum(counted_layers(programs).values())


def _whole(nbytes: int) -> int:
    return -(-nbytes // 64) * 64


def ways(one: int, other: int, copies: int) -> list[tuple[int, int]]:
    """From which place to which the experts at two of them go; in the order in which they are shown."""
    return [(one, other)] if copies else [(one, other), (other, one)]


class ShownExperts:
    """Where the experts that change places lie in what ranks share, and which hosts they go between."""

    def __init__(self, programs: Sequence[Program], nodes: RankNodes) -> None:
        self._programs, self._nodes = programs, nodes
        self._apart = _whole(_moved_bytes(programs))

    def of(self, layer: int, one: int, other: int, copies: int) -> Iterator[tuple[int, int, int, int]]:
        """Each expert that goes to another host: from which and to which one, where it is shown, and its bytes."""
        for number, (place, to) in enumerate(ways(one, other, copies)):
            sender, nbytes = self._held(layer, place)
            taker, _ = self._held(layer, to)
            if sender != taker:
                yield sender, taker, number * self._apart, nbytes

    def _held(self, layer: int, place: int) -> tuple[int, int]:
        """The host that has a place, and the bytes of an expert there."""
        for rank, program in enumerate(self._programs):
            for each in program.expert_layers:
                if each.layer == layer and each.first <= place < each.first + each.held:
                    return self._nodes.node_of(rank), _expert_bytes(program, each)
        raise ValueError(f"place {place} of layer {layer}")


class SharedExperts:
    """What one rank does with its experts when the leading one asks; `memory` is of shared_expert_bytes.

    It has the two experts that change places, and then the pairs of each layer. `copies`: only the first one goes to
    the place of the other.
    """

    def __init__(
        self, held: HeldExperts | UncountedExperts, programs: Sequence[Program], rank: int, memory: U8
    ) -> None:
        plan = programs[rank].plan
        self.ranks = plan.expert_ranks
        self.move = _moved_bytes(programs) > 0
        self._held = held if isinstance(held, HeldExperts) else None
        self._counts = not plan.tensor_parallel_rank
        pairs = _pairs_bytes(programs)
        split = len(memory) - pairs
        self._experts = memory[:split].reshape(2, -1)
        numbers: I64 = memory[split:].view(np.int64)
        self.pairs: dict[int, I64] = {}
        self.placed: dict[int, list[int]] = {}  # of all stages
        for program in programs:
            for layer in program.expert_layers:
                if layer.layer not in self.pairs:
                    self.pairs[layer.layer], numbers = numbers[: layer.places], numbers[layer.places :]
                    self.placed[layer.layer] = placed_at_start(layer)

    def show(self, layer: int, one: int, other: int, copies: int) -> None:
        """Show those of the experts at two places that are here."""
        for content, (place, _) in zip(self._experts, ways(one, other, copies), strict=False):
            if self._held and layer in self._held.layers and self._held.holds(layer, place):
                self._held.read(layer, place, content)

    def take(self, layer: int, one: int, other: int, copies: int) -> None:
        """Take those of them that come here, once all have shown theirs."""
        placed = [*self.placed[layer]]
        for content, (place, to) in zip(self._experts, ways(one, other, copies), strict=False):
            placed[to] = self.placed[layer][place]
            if self._held and layer in self._held.layers and self._held.holds(layer, to):
                self._held.replace(layer, to, content)
        self.placed[layer] = placed
        if self._held and layer in self._held.layers:
            self._held.put(layer, placed)

    def count(self) -> None:
        """Show the pairs of the layers here; all ranks of a stage have the same."""
        for layer, pairs in (self._held.take_pairs() if self._held else {}).items():
            if self._counts:
                self.pairs[layer][:] = pairs
