"""int8 in rotated groups of each size: time of whole steps, and distance from float32.

python benchmarks/int8.py speed [--layers 4] [--rounds 12] [--threads 1]
python benchmarks/int8.py kl MODEL TEXT [--tokens 10000]

`speed` runs steps of random weights (Qwen3-0.6B's widths, a few layers and the head) in turns in one process, so
that what else the machine does meets all alike; figures are quarter-best CPU times. `kl` runs a text through float32
and through each format, keys and values in float32.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

from quire.bench.shapes import write
from quire.config.schema import EngineConfig
from quire.engine.build.opening import open_model
from quire.executor.base import Limits, StepArrays
from quire.executor.native import NativeExecutor
from quire.loader import RandomWeights, load
from quire.offline.quality import WINDOW, _predictions, _Scorer, _Sums, _windows
from quire.program.formats import Groups, NumberFormats, WeightFormat
from quire.program.lower import lower
from quire.spec import ModelSpec
from quire.spec.facts import read_model

FORMATS = {
    f"groups of {size}": WeightFormat("i8", Groups(size, "bf16", rotated=True)) for size in (128, 64, 32)
}
CONTEXT = 128  # tokens before a decode step


def spec_of(layers: int) -> ModelSpec:
    with tempfile.TemporaryDirectory() as folder:
        spec = read_model(write("qwen3-0.6b", Path(folder))).spec
    return replace(spec, layers=spec.layers[:layers])


class Engine:
    """One format's executor over random weights, ready for decode and prefill steps."""

    def __init__(self, spec: ModelSpec, form: WeightFormat, threads: int) -> None:
        program = lower(spec, NumberFormats("bf16", "bf16", form, form))
        self.executor = NativeExecutor(program, threads=threads)
        load(program.params, RandomWeights(program.params), self.executor)
        limits = Limits(max_tokens=1024, max_rows=32, max_logit_rows=32, max_len=1040, num_blocks=32 * 65)
        self.arrays = StepArrays(limits, len(program.cache_groups))
        for table in self.arrays.block_tables:
            table[:] = np.arange(table.size).reshape(table.shape)
        self.executor.bind(limits, self.arrays)

    def seconds(self, tokens: int, rows: int) -> float:
        """CPU time of a step of `tokens` tokens in `rows` sequences."""
        arrays, each = self.arrays, tokens // rows
        arrays.token_ids[:tokens] = np.arange(tokens) * 37 % 1000
        arrays.positions[:tokens] = np.tile(np.arange(each) + (CONTEXT if each == 1 else 0), rows)
        arrays.slots[:rows], arrays.query_start[: rows + 1] = range(rows), range(0, tokens + 1, each)
        arrays.logit_rows[:rows] = np.arange(rows) * each + each - 1
        start = time.process_time()
        self.executor.run(tokens, rows, rows)
        return time.process_time() - start


def speed(layers: int, rounds: int, threads: int) -> None:
    engines = {name: Engine(spec_of(layers), form, threads) for name, form in FORMATS.items()}
    shapes = {"decode, 1 row": (1, 1), "decode, 8 rows": (8, 8), "decode, 32 rows": (32, 32),
              "prefill of 512": (512, 1), "prefill of 1,024": (1024, 1)}  # fmt: skip
    print("| | " + " | ".join(FORMATS) + " |\n" + "|---" * (len(FORMATS) + 1) + "|")
    for shape, (tokens, rows) in shapes.items():
        times: dict[str, list[float]] = {name: [] for name in FORMATS}
        repeats = 8 if tokens < 64 else 1
        for turn in range(rounds + 1):
            for name, engine in engines.items():
                taken = [engine.seconds(tokens, rows) for _ in range(repeats)]
                times[name] += taken if turn else []  # the first warms caches up
        best = {name: float(np.quantile(found, 0.25)) for name, found in times.items()}
        first = best["groups of 128"]
        cells = (f"{1e3 * each:.2f} ms ({first / each:.3f})" for each in best.values())
        print(f"| {shape} | " + " | ".join(cells) + " |", flush=True)


def kl(model: str, text: Path, tokens: int) -> None:
    opened = open_model(model)
    assert opened.tokenizer is not None
    ids = opened.tokenizer.encode(text.read_text())[:tokens]
    passages = _windows(ids, WINDOW)
    plain = EngineConfig(dtype="float32", quantization="none", weight_cache="off")
    reference = _Scorer(opened, plain, WINDOW)
    reference.load(None)
    for size in (128, 64, 32):
        other = _Scorer(opened, replace(plain, quantization="int8", quantization_group_size=size), WINDOW)
        other.load(None)
        sums = _Sums()
        for p, q, targets in _predictions(reference, other, passages):
            sums.add(p, q, targets)
        found = sums.divergence("", known=True)
        print(
            f"groups of {size}: KL {found.kl_mean:.2e} ± {found.kl_error:.0e}, same top-1 {found.top1_agreement:.2%}"
        )
        other.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    modes = parser.add_subparsers(dest="mode", required=True)
    speeds = modes.add_parser("speed")
    speeds.add_argument("--layers", type=int, default=4)
    speeds.add_argument("--rounds", type=int, default=12)
    speeds.add_argument("--threads", type=int, default=1)
    distances = modes.add_parser("kl")
    distances.add_argument("model")
    distances.add_argument("text", type=Path)
    distances.add_argument("--tokens", type=int, default=10_000)
    args = vars(parser.parse_args())
    {"speed": speed, "kl": kl}[args.pop("mode")](**args)


if __name__ == "__main__":
    main()
