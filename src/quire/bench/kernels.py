"""Measure every op of a model at many row counts, and compare with the machine's limits around it.

An op is timed in the native executor on the threads of the engine, over copies that exceed the caches (see
kernel_programs). A round measures limits, every row count, limits; its figures are compared with the mean of the two.
Reported figures are medians of the rounds.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from quire.bench.bounds import Bound, measured_row, op_bound
from quire.bench.environment import largest_cache
from quire.bench.kernel_programs import (
    SMALL_VOCAB,
    Bench,
    Unit,
    blocks_of,
    copies_for,
    distinct_layers,
    one_layer,
    unit_cost,
    units,
    with_copies,
)
from quire.bench.kernel_sampler import measure_sampler
from quire.bench.limits import LimitsProbe, LimitsSample, mean
from quire.cache_kinds import LATE_KV, LATE_TOKENS
from quire.config.schema import OPTIONS, STORED, EngineConfig
from quire.engine.build.opening import Model
from quire.executor.base import Limits
from quire.executor.kinds import native_kind
from quire.program.cost import Cost, Row, peak_of
from quire.program.program import Program
from quire.records import dataclass
from quire.spec import LatentAttention

StepRows = tuple[Row, ...]  # the sequences of a step

CALL_SECONDS = 0.01  # about the time of one native call, so that waking the threads is negligible
SEQUENCES = 64  # more rows than this are the prefill of one sequence, as in an engine
DECODE_BATCHES = (1, 8, 32)
DECODE_TOKENS = 1 << 16  # the most keys of one decode case, all sequences together
PREFILL_CASES = ((128, 0), (512, 0), (512, 1536), (512, 7680))
BLOCK_SIZE = 16
ATTENTION = ("attend", "latent_attend")
CACHED = (
    *ATTENTION,
    "rope_write",
    "compress_k_v",
    "latent_write",
)  # ops that depend on the format of the KV cache
SPILL = 4  # copies of a unit take this many times the largest cache


@dataclass(frozen=True, slots=True)
class Asked:
    """The requested measurements. Empty `formats`, `kv_formats` or `ops` mean all that the engine has."""

    rows: tuple[int, ...]
    contexts: tuple[int, ...]
    formats: tuple[str, ...] = ()
    kv_formats: tuple[str, ...] = ()
    ops: tuple[str, ...] = ()
    rounds: int = 5
    seconds: float = 0.05  # timed per figure and round
    spill: int = 0  # bytes that copies of a unit take together; 0: SPILL times the largest cache


@dataclass(frozen=True, slots=True)
class Case:
    """One unit in one program, at one or more step shapes that share an executor."""

    format: str
    kv: str
    program: Program
    unit: Unit
    steps: tuple[StepRows, ...]


def weight_formats() -> dict[str, dict[str, Any]]:
    """Every weight format of the engine, by name, with its options. int4 has groups of the default size; other sizes
    are in the name, like "int4-128".
    """
    found: dict[str, dict[str, Any]]
    found = {SHORT[name]: {"dtype": name} for name in OPTIONS["dtype"].metadata["choices"] if name in SHORT}
    found |= {
        name: {"dtype": "bfloat16", "quantization": name}
        for name in OPTIONS["quantization"].metadata["choices"]
        if name not in {"auto", "none", *STORED}
    }
    for size in OTHER_GROUPS:
        found[f"int4-{size}"] = found["int4"] | {"quantization_group_size": size}
    return found


OTHER_GROUPS = (64, 128)
KV_LEFT_OUT = (
    "f32",
    "f16",
    "fp8_e4m3",
    "fp8_e5m2",
    "int4",
    "kivi4",
    "kivi2",
    "kvquant3",
)  # measured only on request
LEFT_OUT = ("f32", "f16", *(f"int4-{size}" for size in OTHER_GROUPS))  # measured only on request
SHORT = {
    "float32": "f32",
    "bfloat16": "bf16",
    "float16": "f16",
}  # float formats of the engine, with their names in programs


def kv_formats() -> dict[str, str]:
    """Every format of the KV cache, by name, with its value of --kv-cache-dtype."""
    choices = OPTIONS["kv_cache_dtype"].metadata["choices"]
    return {SHORT.get(name, name): name for name in choices if name != "auto"}


def chosen(asked: Sequence[str], known: Iterable[str], field: str, left_out: Sequence[str] = ()) -> list[str]:
    """Return the requested names, or all known names except `left_out`. Raises ValueError naming an unknown one."""
    known = list(known)
    for name in asked:
        if name not in known:
            raise ValueError(f"{field}: {name!r} is not one of {', '.join(known)}")
    return list(asked) or [name for name in known if name not in left_out]


def cases(model: Model, asked: Asked) -> Iterator[Case]:
    """Yield the cases of a model in measuring order. Raises ValueError for an unknown name."""
    formats, kvs = weight_formats(), kv_formats()
    names = chosen(asked.formats, formats, "formats", LEFT_OUT)
    for name in names:
        for case in _layer_cases(model, EngineConfig(**formats[name]), name, asked):
            if case.unit.kind not in CACHED:
                yield case
        yield from _head_cases(model, EngineConfig(**formats[name]), name, asked)
    latent = any(isinstance(layer.mixer, LatentAttention) for layer in model.facts.spec.layers)
    for kv in chosen(
        asked.kv_formats, kvs, "kv_formats", [kv for kv in kvs if kv != "bf16"] if latent else KV_LEFT_OUT
    ):
        config = EngineConfig(dtype=formats[names[0]]["dtype"], kv_cache_dtype=kvs[kv])
        for case in _layer_cases(model, config, names[0], asked):
            if case.unit.kind in CACHED:
                yield case


def _layer_cases(model: Model, config: EngineConfig, name: str, asked: Asked) -> Iterator[Case]:
    """Units of every kind of layer."""
    kinds = distinct_layers(model)
    for layer in kinds:
        suffix = f" of layer {layer}" if len(kinds) > 1 else ""
        _, program = one_layer(model, config, layer, SMALL_VOCAB)
        body = len(program.body)
        for unit in units(program):
            if unit.kind == "embed" or unit.start >= body or not _wanted(unit, asked):
                continue
            named = replace(unit, name=unit.name + suffix)
            if unit.kind in ATTENTION:
                longest = model.facts.spec.max_positions
                for step in attention_steps(asked.contexts, max(asked.rows), longest):
                    yield Case(name, program.kv_type, program, named, (step,))
            else:
                steps = tuple(step_of(rows) for rows in asked.rows)
                yield Case(name, program.kv_type, program, named, steps)


def _head_cases(model: Model, config: EngineConfig, name: str, asked: Asked) -> Iterator[Case]:
    """The embedding and the head, over the whole vocabulary."""
    _, program = one_layer(model, config, 0, model.facts.spec.vocab)
    for unit in units(program):
        of_head = unit.start >= len(program.body) and unit.kind not in {"norm", "quantize"}  # as a layer's
        if (unit.kind == "embed" or of_head) and _wanted(unit, asked):
            steps = tuple(step_of(rows) for rows in asked.rows)
            yield Case(name, program.kv_type, program, unit, steps)


def _wanted(unit: Unit, asked: Asked) -> bool:
    return not asked.ops or unit.kind in asked.ops


def step_of(rows: int) -> StepRows:
    """A step of `rows` tokens: as many sequences or, for many rows, the first chunk of one sequence."""
    return (Row(1, 0),) * rows if rows <= SEQUENCES else (Row(rows, 0),)


def attention_steps(contexts: Sequence[int], rows: int, longest: int) -> Iterator[StepRows]:
    """Decode steps of each context and a few batch sizes, and prefill chunks of at most `rows` tokens."""
    for context in contexts:
        for batch in DECODE_BATCHES:
            if context <= longest and batch <= rows and (batch == 1 or batch * context <= DECODE_TOKENS):
                yield (Row(1, context - 1),) * batch
    for query, before in PREFILL_CASES:
        if query <= rows and query + before <= min(longest, max(contexts, default=0)):
            yield (Row(query, before),)


class Runner:
    """Measures cases with one probe of the machine's limits."""

    def __init__(self, asked: Asked, *, isa: str = "", threads: int = 0) -> None:
        chosen(asked.formats, weight_formats(), "formats")
        chosen(asked.kv_formats, kv_formats(), "kv_formats")
        self.asked = asked
        self.probe = LimitsProbe(isa, threads)
        self.cache = largest_cache()
        self.spill = asked.spill or SPILL * self.cache

    def model(self, model: Model) -> Iterator[list[dict[str, Any]]]:
        """Yield the figures of every case of a model, and of its sampler, as they are measured."""
        for case in cases(model, self.asked):
            yield self.measure(case)
        if not self.asked.ops or "sample" in self.asked.ops:
            rows = tuple(count for count in self.asked.rows if count <= SEQUENCES)
            vocab, asked = model.facts.spec.vocab, self.asked
            yield measure_sampler(self.probe, vocab, rows, asked.rounds, asked.seconds) if rows else []

    def measure(self, case: Case) -> list[dict[str, Any]]:
        """Measure a case: one row of figures per step."""
        smallest = min(case.steps, key=lambda rows: sum(row.query_len for row in rows))
        copies = copies_for(case.program, case.unit, smallest, self.spill)
        copied = with_copies(case.program, case.unit, copies)
        bench = Bench(copied, _limits(case), native_kind(self.probe.threads, self.probe.isa))
        try:
            timed = self._rounds(bench, case)
        finally:
            bench.close()
        rows: list[dict[str, Any]] = []
        for step, rounds in zip(case.steps, timed, strict=True):
            row = self._row(case, step, rounds)
            alone = rows[0]["seconds"] if rows and rows[0]["rows"] == 1 else None
            row["scaling"] = row["seconds"] / alone if alone else 1.0 if row["rows"] == 1 else None
            rows.append(row | {"copies": copies})
        return rows

    def _rounds(self, bench: Bench, case: Case) -> list[list[tuple[float, LimitsSample]]]:
        """Measure (seconds of a unit, limits around it) for each step, per round."""
        found: list[list[tuple[float, LimitsSample]]] = [[] for _ in case.steps]
        filled: StepRows = ()
        for _ in range(self.asked.rounds):
            before = self.probe.sample()
            seconds = []
            for step in case.steps:
                if step != filled:
                    bench.fill(step)
                    filled = step
                seconds.append(unit_seconds(bench, self.asked.seconds))
            around = mean(before, self.probe.sample())
            for timed, one in zip(found, seconds, strict=True):
                timed.append((one, around))
        return found

    def _row(
        self, case: Case, step: Sequence[Row], rounds: Sequence[tuple[float, LimitsSample]]
    ) -> dict[str, Any]:
        tokens = sum(row.query_len for row in step)
        cost = unit_cost(case.program, case.unit, step, tokens)
        bounds = [self._bound(case, step, cost, limits) for _, limits in rounds]
        return {
            "format": case.format,
            "kv": case.kv,
            "op": case.unit.kind,
            "name": case.unit.name,
            "rows": tokens,
            "sequences": len(step),
            "context": step[0].context_len + step[0].query_len,
            **measured_row(cost, [seconds for seconds, _ in rounds], bounds),
        }

    def _bound(self, case: Case, step: Sequence[Row], cost: Cost, limits: LimitsSample) -> Bound:
        """The bound of a unit: of one op, or of several that compute each at its own peak."""
        unit, program = case.unit, case.program
        if unit.stop - unit.start == 1:
            peak = peak_of(program, program.ops[unit.start])
            return op_bound(cost, peak, limits.bandwidth, limits.compute, self.cache)
        tokens = sum(row.query_len for row in step)
        parts = [
            unit_cost(program, Unit("", "", i, i + 1), step, tokens) for i in range(unit.start, unit.stop)
        ]
        peaks = [peak_of(program, op) for op in program.ops[unit.start : unit.stop]]
        computing = sum(part.flops / limits.compute[peak] for part, peak in zip(parts, peaks, strict=True))
        memory = (cost.weight_bytes + cost.kv_read_bytes + cost.kv_written_bytes) / limits.bandwidth
        return Bound(max(computing, memory), "compute" if computing > memory else "memory", "mixed")


def unit_seconds(bench: Bench, seconds: float, clock: Callable[[], float] = time.perf_counter) -> float:
    """Median seconds of one unit over calls that take about `seconds` together, at least three."""
    copies = bench.copied.copies
    bench.run(0, 1)
    start = clock()
    bench.run(0, min(copies, 4))
    one = max((clock() - start) / min(copies, 4), 1e-9)
    together = max(1, min(copies, round(CALL_SECONDS / one)))
    samples: list[float] = []
    begin, spent = 0, 0.0
    while spent < seconds or len(samples) < 3:
        end = min(copies, begin + together)
        bench.new_tokens()
        start = clock()
        bench.run(begin, end)
        took = clock() - start
        spent += took
        samples.append(took / (end - begin))
        begin = end % copies
    return statistics.median(samples)


def _limits(case: Case) -> Limits:
    """The smallest limits that fit every step of a case."""
    longest = max(row.context_len + row.query_len for step in case.steps for row in step)
    tokens = max(sum(row.query_len for row in step) for step in case.steps)
    behind = min(longest, 512) if any(row.context_len for step in case.steps for row in step) else 1
    size = LATE_TOKENS if case.program.kv_type in LATE_KV else BLOCK_SIZE
    return Limits(
        max_tokens=max(tokens, behind),
        max_rows=max(len(step) for step in case.steps),
        max_logit_rows=tokens if case.unit.start >= len(case.program.body) else 1,
        max_len=-(-longest // size) * size,
        num_blocks=len(case.program.cache_groups) * max(blocks_of(step, size) for step in case.steps),
        block_size=size,
    )
