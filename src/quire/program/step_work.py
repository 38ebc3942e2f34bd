"""What all steps of an engine compute and move, from counts of what was in them: sums that cost a step nothing.

    FLOP   = tokens · a(tokens) + rows with logits · b + pairs of a query and a key · c
    bytes  = weights(tokens) + weights of the head + keys that are read · d + tokens that are written · e

The factors come from step_cost of a few steps, when they are first asked for. Weights that a step reads depend on its
tokens where experts are chosen: they are found between powers of two. With sliding windows c and d are those of the
window's length. Bytes are those of weights, keys and values: activations stay in caches.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence

from quire.program.cost import Row, peak_of, step_cost
from quire.program.program import Program
from quire.records import dataclass

_CONTEXT = 512  # of the steps that tell what keys cost
_MANY = 256  # tokens of a step of a dense model
_UNCOUNTED = 1024  # steps
_POWERS = tuple(2**i for i in range(12))


@dataclass(frozen=True, slots=True)
class MachinePeaks:
    """What a machine was measured to do in a second: bytes from memory, and operations by number format."""

    bandwidth: float
    flops: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class _Probe:
    flops: Mapping[str, float]  # by the number format in which they are computed
    weights: float
    read: float
    written: float


class StepWork:
    """Sums over steps. `flops` has FLOP by the number format in which they are computed, `moved` bytes."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._peaks = [peak_of(program, op) for op in program.ops]
        self._factors: _Factors | None = None
        self._steps: list[Sequence[float]] = []  # not counted yet
        self.flops: dict[str, float] = dict.fromkeys(sorted(set(self._peaks)), 0.0)
        self.moved = 0.0

    def add(self, features: Sequence[float]) -> None:
        """Take in a step with these features: core.cost_model.FEATURES."""
        self._steps.append(features)
        if len(self._steps) >= _UNCOUNTED:
            self.count()

    def count(self) -> None:
        """Bring the sums up to the latest step."""
        found = self._factors
        if found is None and self._steps:
            chooses = any(op.reads_chosen_experts for op in self._program.body)
            found = self._factors = _Factors(self._probe, chooses=chooses)
        for _, decode, prompt, context, pairs, _, _, drafts in self._steps:
            rows = decode + drafts
            tokens = rows + prompt
            if found is None or not tokens:
                continue
            seen = context + (pairs / prompt + prompt / 2 if prompt else 0.0)  # keys that its rows read
            for name in self.flops:
                a, b, c = found.flops[name]
                self.flops[name] += tokens * a + (rows or 1) * b + (context + pairs) * c
            self.moved += found.weights(tokens) + seen * found.read + tokens * found.written
        self._steps.clear()

    def _probe(self, row: Row, logits: int) -> _Probe:
        cost = step_cost(self._program, [row], logits)
        flops = dict.fromkeys(self.flops, 0.0)
        for peak, each in zip(self._peaks, cost.ops, strict=True):
            flops[peak] += each.flops
        total = cost.total
        return _Probe(flops, total.weight_bytes, total.kv_read_bytes, total.kv_written_bytes)


class _Factors:
    def __init__(self, probe: Callable[[Row, int], _Probe], *, chooses: bool) -> None:
        one, far = probe(Row(1, 0), 0), probe(Row(1, _CONTEXT), 0)
        head = probe(Row(1, 0), 1)
        pair = {name: (far.flops[name] - one.flops[name]) / _CONTEXT for name in one.flops}
        self.flops = {
            name: (one.flops[name] - pair[name], head.flops[name] - one.flops[name], pair[name])
            for name in pair
        }
        self.read, self.written = (far.read - one.read) / _CONTEXT, one.written
        self._sizes = _POWERS if chooses else (1, _MANY)
        self._weights = [probe(Row(size, 0), 1).weights for size in self._sizes]

    def weights(self, tokens: float) -> float:
        """Bytes of the weights that a step with so many tokens reads."""
        at = max(1, min(bisect_right(self._sizes, tokens), len(self._sizes) - 1))
        low, high = self._sizes[at - 1], self._sizes[at]
        share = min(1.0, (tokens - low) / (high - low))
        return float(self._weights[at - 1] + share * (self._weights[at] - self._weights[at - 1]))
