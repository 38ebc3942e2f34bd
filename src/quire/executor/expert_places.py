"""The experts of a model: how many tokens each has had, and how two of them change places.

Ranks that hold whole experts hold those at a run of places. At the start expert e is at place e. Routers give the
places of the experts that they choose, so the ops behind them know only places (csrc/expert_places.h). Two experts
change places between steps: both their ranks show them in memory that all map, then each takes the other's. A row has
the bits of its expert wherever that is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from quire import _native
from quire.executor.base import I64, U8
from quire.program.memory import param_bytes
from quire.program.program import Program
from quire.program.tensors import ExpertLayer

# An expert that is larger stays where it is: two are copied out and in between two steps, about 50 ms.
MOST_BYTES = 64 << 20


class UncountedExperts:
    """Of an executor that does not count them. Implements executor.base.ExpertLoads."""

    ranks, move = 1, False

    def take_pairs(self) -> dict[int, I64]:
        """None; see ExpertLoads.take_pairs."""
        return {}

    def swap(self, layer: int, one: int, other: int) -> None:
        """See ExpertLoads.swap."""
        raise _alone(layer, one, other)


class HeldExperts:
    """The experts that one executor holds. Implements executor.base.ExpertLoads; alone it has nobody to change with."""

    ranks, move = 1, False

    def __init__(self, core: _native.Executor, program: Program) -> None:
        self.layers = {layer.layer: layer for layer in program.expert_layers}
        self._core = core
        self._routers = {layer.layer: router for router, layer in enumerate(program.expert_layers)}
        self._places = {number: [*range(layer.experts)] for number, layer in self.layers.items()}

    def take_pairs(self) -> dict[int, I64]:
        """See ExpertLoads.take_pairs."""
        return {
            number: np.array(self._core.take_expert_pairs(router), np.int64)
            for number, router in self._routers.items()
        }

    def swap(self, layer: int, one: int, other: int) -> None:
        """See ExpertLoads.swap."""
        raise _alone(layer, one, other)

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

    def renumber(self, layer: int, one: int, other: int) -> None:
        """From the next step on the experts at two places are each at the other's."""
        places = self._places[layer]
        first, second = places.index(one), places.index(other)
        places[first], places[second] = other, one
        self._core.place_experts(self._routers[layer], places)


def _alone(layer: int, one: int, other: int) -> RuntimeError:
    return RuntimeError(f"places {one} and {other} of layer {layer} are of one rank")


def shared_expert_bytes(programs: Sequence[Program]) -> int:
    """Bytes that ranks of these programs share for what they do with experts."""
    return 2 * _whole(_moved_bytes(programs)) + _pairs_bytes(programs)


def _moved_bytes(programs: Sequence[Program]) -> int:
    """The most bytes of an expert that may change places; 0 if none does."""
    plan = programs[0].plan
    if not plan.expert_parallel or plan.tensor_parallel_size == 1:
        return 0
    found = [_expert_bytes(program, layer) for program in programs for layer in program.expert_layers]
    return max(found, default=0) if max(found, default=0) <= MOST_BYTES else 0


def _expert_bytes(program: Program, layer: ExpertLayer) -> int:
    params = map(program.param, layer.params)
    return sum(param_bytes(param) // param.experts for param in params)


def counted_layers(programs: Sequence[Program]) -> dict[int, int]:
    """Bytes of the pairs of each layer with experts, in the order in which they lie at the end of the shared memory."""
    return {layer.layer: 8 * layer.experts for program in programs for layer in program.expert_layers}


def _pairs_bytes(programs: Sequence[Program]) -> int:
    return sum(counted_layers(programs).values())


def _whole(nbytes: int) -> int:
    return -(-nbytes // 64) * 64


class SharedExperts:
    """What one rank does with its experts when the leading one asks; `memory` is of shared_expert_bytes.

    It has the two experts that change places, and then the pairs of each layer.
    """

    def __init__(self, held: HeldExperts, programs: Sequence[Program], rank: int, memory: U8) -> None:
        plan = programs[rank].plan
        self.ranks = plan.tensor_parallel_size if plan.expert_parallel else 1
        self.move = _moved_bytes(programs) > 0
        self._held, self._counts = held, not plan.tensor_parallel_rank
        pairs = _pairs_bytes(programs)
        split = len(memory) - pairs
        self._experts = memory[:split].reshape(2, -1)
        numbers: I64 = memory[split:].view(np.int64)
        self.pairs: dict[int, I64] = {}
        for program in programs:
            for layer in program.expert_layers:
                if layer.layer not in self.pairs:
                    self.pairs[layer.layer], numbers = numbers[: layer.experts], numbers[layer.experts :]

    def show(self, layer: int, one: int, other: int) -> None:
        """Show those of the experts at two places that are here."""
        for content, place in zip(self._experts, (one, other), strict=True):
            if layer in self._held.layers and self._held.holds(layer, place):
                self._held.read(layer, place, content)

    def take(self, layer: int, one: int, other: int) -> None:
        """Take those of them that come here, once all have shown theirs."""
        if layer not in self._held.layers:
            return
        for content, place in zip(self._experts, (other, one), strict=True):
            if self._held.holds(layer, place):
                self._held.replace(layer, place, content)
        self._held.renumber(layer, one, other)

    def count(self) -> None:
        """Show the pairs of the layers here; all ranks of a stage have the same."""
        for layer, pairs in self._held.take_pairs().items():
            if self._counts:
                self.pairs[layer][:] = pairs
