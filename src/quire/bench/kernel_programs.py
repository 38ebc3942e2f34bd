"""Small programs around one op: the ops before it once, then copies of it that exceed the caches.

A program is lowered from a spec of one layer by the engine's own code, so every op gets real inputs from the ops
before it, in every format of the engine. The timed unit (one op, or the ops of a layer) follows `copies` times, each
with its own parameters and KV layer:

    body   embed · norm · linear qkv      gate_up#0 · gate_up#1 · … · gate_up#21
           └ run once: `before` ops ┘     └ timed, some at a time: `copies` units of `length` ops ┘
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from quire.config.schema import EngineConfig, ResolvedConfig
from quire.core.cache_groups import kv_group
from quire.engine.build.assemble import choose, machine_facts
from quire.engine.build.opening import Model
from quire.executor.base import ExecutorKind, Limits, StepArrays
from quire.loader import RandomWeights, load
from quire.loader.source import Array, TensorInfo
from quire.program.cost import Cost, Row, step_cost
from quire.program.memory import param_bytes
from quire.program.op import Op, param_names, reads, writes
from quire.program.program import Program
from quire.program.tensors import KVLayer, Param
from quire.records import dataclass
from quire.types import MemoryBudgetError
from quire.util.platform import available_memory
from quire.util.sizes import format_size

SMALL_VOCAB = 4096  # rows of the embedding if the timed op does not need them all
SMALL_OP_COPIES = 16  # of an op with almost no weights
MAX_COPIES = 512
NOTHING = 64 << 10  # bytes of weights and KV below which an op does not stream


@dataclass(frozen=True, slots=True)
class Unit:
    """A timed unit: ops [start, stop) of Program.ops of a one-layer program, and its name."""

    kind: str
    name: str
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Copied:
    """A program whose ops [first, first + copies · length) are copies of a unit, after the ops that feed it."""

    program: Program
    first: int
    copies: int
    length: int


def one_layer(model: Model, asked: EngineConfig, layer: int, vocab: int) -> tuple[ResolvedConfig, Program]:
    """Lower a model cut to one layer and `vocab` tokens; return the config and the program."""
    facts = model.facts
    spec = replace(facts.spec, layers=(facts.spec.layers[layer],), vocab=min(vocab, facts.spec.vocab))
    return choose(replace(model, facts=replace(facts, spec=spec)), asked, machine_facts())


def distinct_layers(model: Model) -> list[int]:
    """Return the first layer of each kind."""
    seen: dict[Any, int] = {}
    for index, layer in enumerate(model.facts.spec.layers):
        seen.setdefault(layer, index)
    return sorted(seen.values())


def units(program: Program) -> list[Unit]:
    """Return the different ops of a one-layer program, and the whole layer."""
    found: list[Unit] = []
    seen = set()
    for index, op in enumerate(program.ops):
        signature = _signature(program, op)
        if signature not in seen:
            seen.add(signature)
            found.append(Unit(kind_of(op), name_of(program, op), index, index + 1))
    return [*found, Unit("layer", "layer", 1, len(program.body))]


def kind_of(op: Op) -> str:
    """The name of an op as options spell it: "rope_write"."""
    return "".join(f"_{c.lower()}" if c.isupper() else c for c in type(op).__name__).lstrip("_")


def name_of(program: Program, op: Op) -> str:
    """The weight of an op ("gate_up"), else its kind and the width of its output."""
    weights = [name for name in param_names(op) if program.param(name).kind != "vector"]
    if weights and hasattr(op, "x"):  # an embedding only reads a few rows of a weight
        return weights[0].rpartition(".")[2]
    out = next((value for field in ("out", "qkv") if (value := getattr(op, field, None))), None)
    added = "+add" if getattr(op, "delta", None) else ""
    if out is None:
        return kind_of(op)
    rounded = "+quantize" if program.buffer(out).dtype == "i8" and kind_of(op) != "quantize" else ""
    return f"{kind_of(op)}{added}{rounded} {program.buffer(out).cols}"


def _signature(program: Program, op: Op) -> tuple[Any, ...]:
    """Equal for ops that do the same work: kind, shapes and formats of operands, and settings."""
    params = {p.name: (p.kind, p.rows, p.cols, p.dtype) for p in program.params}
    buffers = {b.name: (b.cols, b.dtype, b.rows, b.per) for b in program.buffers}
    values = [getattr(op, f.name) for f in dataclasses.fields(op)]
    return (
        type(op),
        *(params.get(v) or buffers.get(v) or v if isinstance(v, str) else v for v in values),
    )


def unit_cost(program: Program, unit: Unit, rows: Sequence[Row], logit_rows: int) -> Cost:
    """FLOPs and bytes of a unit in a step."""
    return sum(step_cost(program, rows, logit_rows).ops[unit.start : unit.stop], Cost())


def copies_for(program: Program, unit: Unit, rows: Sequence[Row], spill: int) -> int:
    """The number of copies that have at least `spill` bytes of weights and KV."""
    cost = unit_cost(program, unit, rows, sum(row.query_len for row in rows))
    ops = program.ops[unit.start : unit.stop]
    touched = {name for op in ops if op.reads_chosen_experts for name in param_names(op)}
    names = {name for op in ops for name in param_names(op)} - touched
    held = sum(param_bytes(program.param(name)) for name in names)
    if touched:  # the experts of a step, not all experts
        held = max(held, cost.weight_bytes)
    held += cost.kv_read_bytes + cost.kv_written_bytes
    if held < NOTHING:
        return SMALL_OP_COPIES
    return max(1, min(MAX_COPIES, math.ceil(spill / held)))


def with_copies(program: Program, unit: Unit, copies: int) -> Copied:
    """The program up to a unit, and then the unit `copies` times."""
    timed = program.ops[unit.start : unit.stop]
    cached = any(hasattr(op, "layer") for op in timed)
    layers = range(copies if cached else 1)
    body, head = len(program.body), unit.start >= len(program.body)
    before: list[Op] = []
    for op in program.ops[: unit.start]:
        before.append(op)
        if hasattr(op, "layer") and not head:
            before += _for_other_layers(before, op, copies if cached else 1, len(program.kv_layers))
    first = len(before)
    params = {name: program.param(name) for op in program.ops[: unit.start] for name in param_names(op)}
    ops: list[Op] = []
    for k in range(copies):
        for op in timed:
            names = {name: f"{name}#{k}" for name in param_names(op)}
            for name, copy in names.items():
                params[copy] = replace(program.param(name), name=copy)
            ops.append(_renamed(op, names, k * len(program.kv_layers) if cached else 0))
    split = body if head else len(before) + len(ops)
    everything = (*before, *ops)
    copied = replace(
        program,
        params=tuple(params.values()),
        body=everything[:split],
        head=everything[split:],
        kv_layers=_kv_layers(program.kv_layers, len(layers)),
        cache_groups=tuple(kv_group(tuple(layers), group.window) for group in program.cache_groups),
        layers_per_group=len(layers),
    )
    return Copied(copied, first, copies, len(timed))


def with_head(copied: Copied, program: Program) -> Copied:
    """The same with the head of a program after the units."""
    names = {name for op in program.head for name in param_names(op)}
    known = {param.name for param in copied.program.params}
    params = (*copied.program.params, *(program.param(name) for name in sorted(names - known)))
    return replace(copied, program=replace(copied.program, params=params, head=program.head))


def _for_other_layers(before: Sequence[Op], op: Op, layers: int, caches: int) -> list[Op]:
    """Ops that fill the caches of layers 1 … as `op` fills those of layer 0, which has `caches`. Inputs are recomputed
    each time, because the op rotates in place."""
    makers = [
        next(made for made in reversed(before[:-1]) if name in writes(made))
        for name in dict.fromkeys(reads(op))
    ]
    return [step for k in range(1, layers) for step in (*makers, _renamed(op, {}, k * caches))]


def _renamed(op: Op, names: dict[str, str], caches: int) -> Op:
    """The op over parameters of other names, and over caches that come so many later."""
    changes: dict[str, Any] = {
        f.name: names[value]
        for f in dataclasses.fields(op)
        if isinstance(value := getattr(op, f.name), str) and value in names
    }
    changes |= {
        f.name: value + caches
        for f in dataclasses.fields(op)
        if f.name in {"layer", "recent"} and (value := getattr(op, f.name)) is not None
    }
    return replace(op, **changes)


def _kv_layers(of_one: Sequence[KVLayer], count: int) -> tuple[KVLayer, ...]:
    return tuple(replace(kv, layer=k, index_in_group=k) for k in range(count) for kv in of_one)


def blocks_of(rows: Sequence[Row], block_size: int) -> int:
    """KV blocks of the sequences of a step."""
    return sum(-(-(row.context_len + row.query_len) // block_size) for row in rows)


class _Remembered:
    """Random weights that are kept during loading, because copies of a parameter read the same tensors."""

    def __init__(self, params: Sequence[Param]) -> None:
        self._source = RandomWeights(params)
        self._blocks: dict[tuple[str, int, int | None], Array] = {}

    def names(self) -> Sequence[str]:
        return list(self._source.names())

    def info(self, name: str) -> TensorInfo:
        return self._source.info(name)

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Array:
        key = (name, start, stop)
        if key not in self._blocks:
            self._blocks[key] = self._source.read(name, start, stop)
        return self._blocks[key]

    def release(self, name: str) -> None:
        """Blocks are kept until loading ends."""


class Bench:
    """A program with copies in an executor, with loaded weights and the arrays of its steps."""

    def __init__(self, copied: Copied, limits: Limits, kind: ExecutorKind) -> None:
        self.copied, self.limits = copied, limits
        _check_memory(copied.program, limits, kind)
        self.executor = kind.make(copied.program)
        load(copied.program.params, _Remembered(copied.program.params), self.executor)
        self.arrays = StepArrays(limits, len(copied.program.cache_groups))
        self.executor.bind(limits, self.arrays)
        self._random = np.random.default_rng(0)
        self._blocks = self._random.permutation(limits.num_blocks).astype(np.int32)
        self._tokens = self._rows = 0

    def fill(self, rows: Sequence[Row], *, units: bool = False) -> None:
        """Prepare a step: row b continues sequence b. Earlier keys and values are computed first; `units`: those of
        caches that the units write themselves, too, from inputs in which nothing was attended to: a long context
        takes seconds then.
        """
        taken = 0
        for slot, row in enumerate(rows):
            count = blocks_of([row], self.limits.block_size)
            for table in self.arrays.block_tables:
                table[slot, :count] = self._blocks[taken : taken + count]
                taken += count
            for start in range(0, row.context_len, self.limits.max_tokens):
                stop = min(row.context_len, start + self.limits.max_tokens)
                self._describe([Row(stop - start, start)], [slot])
                self._prepare()
                if units:
                    self._write_caches()
        self._describe(rows, range(len(rows)))
        self._prepare()

    def _write_caches(self) -> None:
        """Run the ops of the units that come before their attention."""
        copied = self.copied
        ops = copied.program.ops[copied.first : copied.first + copied.length]
        count = next((index for index, op in enumerate(ops) if kind_of(op) == "attend"), len(ops))
        for start in range(copied.first, copied.first + copied.copies * copied.length, copied.length):
            self._run(start, start + count)

    def _describe(self, rows: Sequence[Row], slots: Sequence[int]) -> None:
        arrays, token = self.arrays, 0
        for index, (row, slot) in enumerate(zip(rows, slots, strict=True)):
            stop = token + row.query_len
            arrays.positions[token:stop] = np.arange(row.context_len, row.context_len + row.query_len)
            arrays.slots[index] = slot
            arrays.query_start[index : index + 2] = token, stop
            token = stop
        wanted = min(token, self.limits.max_logit_rows)
        arrays.logit_rows[:wanted] = np.arange(wanted)
        self._tokens, self._rows = token, len(rows)
        self.new_tokens()

    def new_tokens(self) -> None:
        """Draw new token ids for the same step, so that rows of the embedding are not cached."""
        vocab = self.copied.program.vocab
        self.arrays.token_ids[: self._tokens] = self._random.integers(0, vocab, self._tokens)

    def _prepare(self) -> None:
        self._run(0, self.copied.first)

    def run(self, begin: int, end: int) -> None:
        """Run units [begin, end) in one native call."""
        first, length = self.copied.first, self.copied.length
        self._run(first + begin * length, first + end * length)

    def run_all(self) -> None:
        """Run the units and what follows them."""
        self._run(self.copied.first, len(self.copied.program.ops))

    def _run(self, begin: int, end: int) -> None:
        logits = min(self._tokens, self.limits.max_logit_rows) if self.copied.program.head else 0
        self.executor.run_range(self._tokens, self._rows, logits, begin, end)

    def close(self) -> None:
        self.executor.close()


def _check_memory(program: Program, limits: Limits, kind: ExecutorKind) -> None:
    need, have = sum(kind.planned_bytes(program, limits).values()), available_memory()
    if need > 0.8 * have:
        raise MemoryBudgetError(
            f"this benchmark needs {format_size(need)} for copies of weights and KV; {format_size(have)} is available"
        )
