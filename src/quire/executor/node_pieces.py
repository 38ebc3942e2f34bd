"""What travels between nodes with a command: ranges of the memory that ranks share, which has one layout on all nodes.

With a command goes what the leading rank has changed for it; a command's end brings what ranks of other nodes read.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from quire.executor.base import I32, U8, Limits, StepArrays
from quire.executor.expert_places import ShownExperts, counted_layers, shared_expert_bytes
from quire.executor.ranked import (
    PAIRS,
    MemoryPiece,
    RankAct,
    feature_places,
    handover_bytes,
    handover_place,
    rank_memory,
    residual_place,
)
from quire.program.memory import plan_arena
from quire.program.program import Program
from quire.program.rank_nodes import RankNodes

_HALVES = (1, 5), (5, 9)  # of the numbers of a command to run, behind what it shows: see ranked.running


def elsewhere_bytes(programs: Sequence[Program], limits: Limits, nodes: RankNodes) -> int:
    """The most bytes that ranks of a host hold of those of others: rows that they show, the residual stream, and what a
    draft takes of stages elsewhere."""
    found = handover_bytes(programs, limits) // 2
    memory = rank_memory(programs, limits)
    for rank, program in enumerate(programs):
        if nodes.node_of(rank) and not program.plan.tensor_parallel_rank:
            places = feature_places(programs, limits, memory, rank)
            found += sum(4 * limits.max_tokens * cols for _, _, cols in places)
    if nodes.spans:
        arenas = [plan_arena(each, limits.max_tokens, limits.max_logit_rows).total for each in programs]
        found += (nodes.size - nodes.each) * max(arenas)
    return found


class ChangedPieces:
    """What a command changes in `memory`, in which the step's arrays are; on the leading rank.

    Of block tables and slots of adapters only what has changed since it was sent, of tables in the lines of the step.
    """

    def __init__(
        self, programs: Sequence[Program], limits: Limits, arrays: StepArrays, memory: U8, nodes: RankNodes
    ) -> None:
        self._limits, self._arrays, self._memory = limits, arrays, memory
        self._experts = ShownExperts(programs, nodes)
        self._layout = rank_memory(programs, limits)
        self._sent = [np.zeros_like(table) for table in arrays.block_tables]
        self._adapters = np.zeros_like(arrays.adapters)
        self._embedding_bytes = 0 if programs[0].entry is None else (
            4 * programs[0].buffer(programs[0].entry.buffer).cols
        )  # fmt: skip

    def of(self, act: RankAct, numbers: Sequence[int]) -> list[MemoryPiece]:
        """The pieces of a command with these numbers."""
        match act:
            case RankAct.RUN:
                return self._run(numbers)
            case RankAct.RANGE:
                return self._step(self._arrays, *numbers[:3])
            case RankAct.HEAD:
                both = [each for each in (self._arrays, self._arrays.twin) if each is not None]
                return [self._piece(each.logit_rows[: numbers[0]]) for each in both]
            case RankAct.COPY:
                return self._pairs(numbers[0])
            case RankAct.WRITE:
                at, end = self._layout.blocks[0], self._layout.blocks[-1]
                return [(at, self._memory[at:end])]
            case _:
                return self._experts_taken(numbers[:4]) if act == RankAct.TAKE_EXPERTS else []

    def _experts_taken(self, numbers: Sequence[int]) -> list[MemoryPiece]:
        first = self._layout.experts
        shown = [(first + at, size) for _, to, at, size in self._experts.of(*numbers) if to]
        return [(at, self._memory[at : at + size]) for at, size in shown]

    def _run(self, numbers: Sequence[int]) -> list[MemoryPiece]:
        found: list[MemoryPiece] = []
        if numbers[0]:
            pairs = self._memory[self._layout.pairs :][: 8 * PAIRS].view(np.int32).reshape(2, PAIRS)
            rows = int(pairs[1, : numbers[0]].sum())
            at = self._layout.embeddings
            found += self._pairs(numbers[0])
            found.append((at, self._memory[at : at + rows * self._embedding_bytes]))
        for tokens, rows, logit_rows, twin in {tuple(numbers[at:end]) for at, end in _HALVES}:
            arrays = self._arrays.twin if twin and self._arrays.twin is not None else self._arrays
            found += self._step(arrays, tokens, rows, logit_rows)
        return found

    def _step(self, arrays: StepArrays, tokens: int, rows: int, logit_rows: int) -> list[MemoryPiece]:
        if not tokens:
            return []
        filled: list[I32] = [
            arrays.token_ids[:tokens], arrays.positions[:tokens], arrays.query_start[: rows + 1],
            arrays.slots[:rows], arrays.logit_rows[:logit_rows],
        ]  # fmt: skip
        if not np.array_equal(arrays.adapters, self._adapters):
            filled.append(arrays.adapters)
            self._adapters = arrays.adapters.copy()
        lines, last = arrays.slots[:rows], int(arrays.positions[:tokens].max())
        if len(arrays.mirrors):
            count = int(np.argmax(arrays.mirrors[:, 1] == 0)) if not arrays.mirrors[:, 1].all() else -1
            mirrors = arrays.mirrors[:count] if count >= 0 else arrays.mirrors
            filled.append(arrays.mirrors[: len(mirrors) + 1])
            lines = np.concatenate((lines, mirrors[:, 2]))
            last = max(last, int(mirrors[:, 3].max(initial=0)))
        return [
            *map(self._piece, filled),
            *self._tables(np.unique(lines), last // self._limits.block_size + 1),
        ]

    def _tables(self, lines: I32, blocks: int) -> list[MemoryPiece]:
        found = []
        for table, sent in zip(self._arrays.block_tables, self._sent, strict=True):
            differs = table[lines, :blocks] != sent[lines, :blocks]
            for line, columns in zip(lines.tolist(), differs, strict=True):
                if changed := np.flatnonzero(columns).tolist():
                    span = slice(changed[0], changed[-1] + 1)
                    sent[line, span] = table[line, span]
                    found.append(self._piece(table[line, span]))
        return found

    def _pairs(self, count: int) -> list[MemoryPiece]:
        rows = (self._layout.pairs, self._layout.pairs + 4 * PAIRS)
        return [(at, self._memory[at : at + 4 * count]) for at in rows]

    def _piece(self, array: I32) -> MemoryPiece:
        at = array.ctypes.data - self._memory.ctypes.data
        return at, self._memory[at : at + array.nbytes]


class LeftPieces:
    """What the ranks `here` of one stage and one node leave for other nodes with a command."""

    def __init__(
        self, programs: Sequence[Program], limits: Limits, nodes: RankNodes, here: range, memory: U8
    ) -> None:
        self._programs, self._limits, self._memory = programs, limits, memory
        self._layout, self.here = rank_memory(programs, limits), here
        self._plan = programs[here.start].plan
        following = here.start + nodes.size
        self._own = own = nodes.node_of(here.start)
        self._experts, last = ShownExperts(programs, nodes), self._plan.is_last_stage
        # The node whose ranks take the residual stream of these; the one of the leading rank where nobody does.
        self.node = 0 if last or nodes.node_of(following) == own else nodes.node_of(following)
        self._leaves = not last and nodes.node_of(following) != own

    def of(self, act: RankAct, numbers: Sequence[int]) -> list[MemoryPiece]:
        """The pieces once these ranks are done with a command; of a step first what the next stage takes."""
        if act == RankAct.RUN and self._leaves:
            begin, end = _HALVES[0 if self._plan.in_first_half else 1]
            tokens, _, _, twin = numbers[begin:end]
            return [self._residual(tokens, twin), *self._features(tokens)] if tokens else []
        if act == RankAct.READ:
            at, end = self._layout.blocks[self.here.start], self._layout.blocks[self.here.stop]
            return [(at, self._memory[at:end])]
        if act == RankAct.SHOW_EXPERTS:
            return self._experts_shown(numbers[:4])
        if act == RankAct.COUNT_EXPERTS and not self._plan.tensor_parallel_rank:
            at = self._layout.experts + shared_expert_bytes(self._programs)
            layers = counted_layers(self._programs)
            at -= sum(layers.values())
            found = []
            own = {layer.layer for layer in self._programs[self.here.start].expert_layers}
            for layer, size in layers.items():
                if layer in own:
                    found.append((at, self._memory[at : at + size]))
                at += size
            return found
        return []

    def _experts_shown(self, numbers: Sequence[int]) -> list[MemoryPiece]:
        """Experts that go from here to another host, of ranks of this stage."""
        layer, *_ = numbers
        if all(each.layer != layer for each in self._programs[self.here.start].expert_layers):
            return []
        first = self._layout.experts
        shown = [
            (first + at, size) for sender, _, at, size in self._experts.of(*numbers) if sender == self._own
        ]
        return [(at, self._memory[at : at + size]) for at, size in shown]

    def _features(self, tokens: int) -> list[MemoryPiece]:
        """What a draft takes, which the leading rank reads: it passes on all that is left."""
        if self._plan.tensor_parallel_rank:
            return []
        places = feature_places(self._programs, self._limits, self._layout, self.here.start)
        return [(at, self._memory[at : at + 4 * tokens * cols]) for _, at, cols in places]

    def _residual(self, tokens: int, twin: int) -> MemoryPiece:
        first, plan = self.here.start, self._plan
        at, cols = residual_place(self._programs, self._limits, self._layout, first)
        if plan.pipeline_parallel_rank == plan.pipeline_parallel_size // 2 - 1:
            at = handover_place(self._programs, self._limits, self._layout, twin)
        return at, self._memory[at : at + 4 * tokens * cols]
