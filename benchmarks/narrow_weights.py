"""One linear by the format of its weights, beside 4 bits and the bytes that each reads.

    python -m benchmarks.narrow_weights [--rows 1 4 16 256] [--rounds 25] [--threads 1] [--inputs 2048] [--outputs 8192]

Weights are random, in groups of 128 with float16 scales and whole zero points as GPTQ's are. Formats take turns in
every round, so that what else the machine does meets all of them; the figure is the best single run.
"""

from __future__ import annotations

import argparse
import time

import numpy as np

from quire.bench.kernel_programs import Unit, unit_cost, with_copies
from quire.executor.base import Limits, StepArrays
from quire.executor.native import NativeExecutor
from quire.program.cost import Row
from quire.program.formats import CODE_BITS, Groups, NumberFormats, WeightFormat
from quire.program.lower import lower
from quire.program.ops.linear import Linear
from quire.program.tensors import Param
from quire.quant import GroupCodes
from quire.spec import MLP, Attention, Layer, ModelSpec, NormSpec, Rope

GROUPS = Groups(128, "f16", "u8")
FORMATS = {
    "bf16": None,
    "bf16_24": WeightFormat("bf16_24"),
    **{name: WeightFormat(name, GROUPS) for name in CODE_BITS},
}


class Timed:
    """The same linear several times, with weights that no cache holds together."""

    def __init__(self, form: WeightFormat | None, args: argparse.Namespace) -> None:
        attention = Attention(4, 2, 16, Rope(1e4, 16), 0.25)
        spec = ModelSpec(
            64, args.inputs, (Layer(attention, MLP(args.outputs // 2)),), norm=NormSpec(), max_positions=64
        )
        program = lower(spec, NumberFormats("bf16", "bf16", form))
        at, op = next(
            (i, op) for i, op in enumerate(program.ops) if isinstance(op, Linear) and "gate_up" in op.weight
        )
        unit = Unit("linear", "gate_up", at, at + 1)
        self.size = program.param(op.weight)
        self.bytes = unit_cost(program, unit, [Row(1, 0)], 1).weight_bytes
        self.copies = args.copies
        self._copied = with_copies(program, unit, args.copies)
        self._executor = NativeExecutor(self._copied.program, threads=args.threads, isa=args.isa)
        made: dict[tuple[int, int], GroupCodes] = {}
        for param in self._copied.program.params:
            self._put(param, made)
        rows = max(args.rows)
        limits = Limits(rows, rows, 1, 64, rows)
        self._arrays = StepArrays(limits, len(program.cache_groups))
        self._executor.bind(limits, self._arrays)

    def _put(self, param: Param, made: dict[tuple[int, int], GroupCodes]) -> None:
        random = np.random.default_rng(0)
        if param.groups is None:
            offset = 0
            for part in param.parts:
                weight = random.standard_normal(part.shape, np.float32)
                if param.kind == "linear":  # two of four, which every format but bf16_24 holds as zeros
                    weight.reshape(-1, 4)[:, ::2] = 0
                self._executor.put(param, offset, weight, "F32")
                offset += part.rows
            return
        shape = param.rows, param.cols
        if shape not in made:
            numbers = (param.rows, param.groups.count(param.cols))
            codes = random.integers(0, 1 << param.code_bits, shape, np.uint8)
            scales = random.standard_normal(numbers).astype(np.float16)
            made[shape] = GroupCodes(codes, scales, np.full(numbers, 1 << (param.code_bits - 1), np.uint8))
        self._executor.put_codes(param, 0, made[shape])

    def prepare(self, rows: int) -> None:
        arrays = self._arrays
        arrays.token_ids[:rows], arrays.positions[:rows], arrays.slots[:rows] = 1, 0, range(rows)
        arrays.query_start[: rows + 1] = range(rows + 1)
        for table in arrays.block_tables:
            table[:rows, 0] = range(rows)
        self._run(rows, 0, self._copied.first)

    def seconds(self, rows: int) -> float:
        """The best of one pass over all copies."""
        best = float("inf")
        for at in range(self._copied.first, self._copied.first + self.copies):
            start = time.perf_counter()
            self._run(rows, at, at + 1)
            best = min(best, time.perf_counter() - start)
        return best

    def _run(self, rows: int, begin: int, end: int) -> None:
        self._executor.run_range(rows, rows, 0, begin, end)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 16, 256])
    parser.add_argument("--formats", nargs="+", default=list(FORMATS), choices=FORMATS)
    parser.add_argument("--inputs", type=int, default=2048)
    parser.add_argument("--outputs", type=int, default=8192)
    parser.add_argument("--copies", type=int, default=16, help="together they should exceed the caches")
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--isa", default="", help="instruction set; default: the best of this machine")
    args = parser.parse_args()
    timed = {name: Timed(FORMATS[name], args) for name in args.formats}
    for rows in args.rows:
        best = dict.fromkeys(timed, float("inf"))
        for one in timed.values():
            one.prepare(rows)
        for _ in range(args.rounds):
            for name, one in timed.items():
                best[name] = min(best[name], one.seconds(rows))
        print(f"{rows} rows, {args.threads} threads")
        base = timed.get("i4")
        for name, one in timed.items():
            against = ""
            if base is not None:
                against = (
                    f"  {best['i4'] / best[name]:5.2f} x i4; by bytes alone {base.bytes / one.bytes:5.2f} x"
                )
            print(
                f"  {name:<5} {one.bytes / 1e6:7.2f} MB {best[name] * 1e6:9.1f} us "
                f"{one.bytes / best[name] / 1e9:6.1f} GB/s{against}"
            )


if __name__ == "__main__":
    main()
