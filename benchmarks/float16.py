"""Steps in bfloat16 and float16 (weights and cache) in turn, on one thread: how their times compare.

    PYTHONPATH=src python benchmarks/float16.py [--rounds 31] [--layers 4] [--isa avx2]

Layers and the head of the Qwen3-0.6B shape with random weights: decode steps over a context of 512 tokens, and whole
prompts. Times are the thread's processor time, so that what else the machine runs counts for little; each round runs
every format once, and the ratio is the median of the rounds' own. Shares are of the float32 peak, the best of many
short loops.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import replace

from quire import _native
from quire.bench import shapes
from quire.executor.base import Limits, StepArrays
from quire.executor.native import NativeExecutor
from quire.loader import RandomWeights, load
from quire.program.cost import Row, step_cost
from quire.program.formats import DType, NumberFormats
from quire.program.lower import lower
from quire.spec.config_reader import ConfigReader
from quire.spec.families import read_spec

CONTEXT = 512
STEPS = ((1, CONTEXT), (2, CONTEXT), (4, CONTEXT), (8, CONTEXT), (16, CONTEXT), (64, 0), (256, 0))
FORMATS: tuple[DType, ...] = ("bf16", "f16", "f32")
LIMITS = Limits(max_tokens=256, max_rows=16, max_logit_rows=16, max_len=CONTEXT + 16, num_blocks=33 * 16)


class Model:
    """The shape in one format, weights and cache."""

    def __init__(self, form: DType, layers: int, isa: str) -> None:
        spec = read_spec(ConfigReader(shapes.config("qwen3-0.6b")))[0]
        self.program = lower(replace(spec, layers=spec.layers[:layers]), NumberFormats(form, form))
        self.executor = NativeExecutor(self.program, threads=1, isa=isa)
        load(self.program.params, RandomWeights(self.program.params), self.executor)
        self.arrays = StepArrays(LIMITS, 1)
        self.executor.bind(LIMITS, self.arrays)
        self.executor.core.fill_cache(0.5)
        for row, table in enumerate(self.arrays.block_tables[0]):
            table[:33] = range(row * 33, row * 33 + 33)
        self.arrays.slots[:] = range(LIMITS.max_rows)
        self.arrays.token_ids[:] = range(LIMITS.max_tokens)

    def seconds(self, rows: int, context: int) -> float:
        """Of a decode step of so many sequences, or of one prompt without a context."""
        arrays, sequences = self.arrays, rows if context else 1
        arrays.positions[:rows] = context or range(rows)
        arrays.query_start[: sequences + 1] = range(sequences + 1) if context else (0, rows)
        arrays.logit_rows[:sequences] = range(sequences)
        start = time.thread_time()
        self.executor.run(rows, sequences, sequences)
        return time.thread_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--isa", default="")
    asked = parser.parse_args()
    models = {form: Model(form, asked.layers, asked.isa) for form in FORMATS}
    core = models["f16"].executor.core
    peak = max(_native.measure_flops(core, _native.DType.f32, 20_000) for _ in range(300))
    print(f"{core.isa}, one thread, float32 {peak / 1e9:.0f} GFLOP/s")
    for rows, context in STEPS:
        times: dict[str, list[float]] = {form: [] for form in FORMATS}
        for form in FORMATS * asked.rounds:
            times[form].append(models[form].seconds(rows, context))
        ratios = [b / h for b, h in zip(times["bf16"], times["f16"], strict=True)]
        low, mid, high = statistics.quantiles(ratios, n=4)
        step = [Row(1, context)] * rows if context else [Row(rows, 0)]
        cost = step_cost(models["f16"].program, step, len(step) if context else 1).total
        each = ", ".join(f"{form} {statistics.median(t) * 1e3:.1f} ms" for form, t in times.items())
        share = cost.flops / statistics.median(times["f16"]) / peak
        what = f"{rows} rows after {context}" if context else f"a prompt of {rows}"
        print(
            f"{what:>18}: {each}; float16's rate {mid:.3f} of bfloat16's ({low:.3f} to {high:.3f}), {share:.0%} of peak"
        )


if __name__ == "__main__":
    main()
