"""What the first promise costs: Quire's kernels beside sums that are cut freely, in one process and in turns.

    PYTHONPATH=src python -m benchmarks.promise [--only decode prefill attention library] [--rounds 9]

Needs g++, and torch for `library`. `fast.cpp` is built with Quire's own kernels, thread pool and attention plan, for
the instruction set of this machine. It runs the linear layers of the Qwen3-0.6B shape and its attention, on weights and
caches that no processor cache holds. What it may do that Quire does not:

    split     the input features of an output are cut in two, each half summed by another thread, the halves added
    sums      two running sums an output instead of one (one row)
    dot       outputs are dot products of rows of weights, four sums of sixteen lanes each (one row)
    N keys    attention's partitions have N keys instead of 1,024, so that threads, sequences and heads may decide

`library` runs the same products and attention through torch, which cuts sums as it sees fit.

Each round runs every way once. A cost is the ratio of Quire's time to that way's, less one: of the fastest run of each,
and the median of the rounds' own ratios with its quartiles. Above zero, cutting freely is faster.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from quire import _native
from quire.bench.limits import LimitsProbe

HERE = Path(__file__).parent
SOURCE, BUILT = HERE.parents[1] / "csrc", HERE.parents[1] / "build/promise"
FLAGS = (
    "-std=c++17 -O3 -ffp-contract=off -fno-math-errno -fno-trapping-math -fPIC -shared -fvisibility=hidden -w"
)
SETS = {
    "baseline": "",
    "avx2": "-mavx2 -mfma -mf16c",
    "avx512": "-mavx2 -mfma -mf16c -mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx512vnni -mavx512bf16 "
    "-mprefer-vector-width=512",
}
THREADS, SHIPPED = 2, 1024
PARTITIONS = (SHIPPED, 256, 4096)
DIM, WIDTH, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 1024, 3072, 16, 8, 128, 151_936
LAYER = ((DIM, (HEADS + 2 * KV_HEADS) * HEAD_DIM), (HEADS * HEAD_DIM, DIM), (DIM, 2 * WIDTH), (WIDTH, DIM))
HEAD = (DIM, VOCAB)
F32, BF16 = 0, 1
BYTES = {F32: 4, BF16: 2}
FIXED, SPLIT, SUMS, DOT = range(4)
Bytes = npt.NDArray[np.uint8]
Ways = Mapping[str, Callable[[], float]]


class Library:
    """fast.cpp, built for a length of partitions."""

    def __init__(self, partition: int) -> None:
        isa = _native.supported_isas()[0]
        built = BUILT / f"fast-{isa}-{partition}.so"
        newest = max(path.stat().st_mtime for path in (HERE / "fast.cpp", *SOURCE.rglob("*.[ch]*")))
        if not built.exists() or built.stat().st_mtime < newest:
            BUILT.mkdir(parents=True, exist_ok=True)
            command = (
                f"g++ {FLAGS} {SETS[isa]} -DQUIRE_ISA={isa} -DQUIRE_PARTITION={partition} -I{SOURCE} -pthread"
            )
            subprocess.run([*command.split(), str(HERE / "fast.cpp"), "-o", str(built)], check=True)
        self._library = ctypes.CDLL(str(built))
        self._library.pool_of.restype = ctypes.c_void_p
        self._library.linears.restype = self._library.attention.restype = ctypes.c_double
        self._pool = ctypes.c_void_p(self._library.pool_of(THREADS))

    def linears(
        self, way: int, dtype: int, rows: int, weights: Sequence[Bytes], shapes: Sequence[tuple[int, int]]
    ) -> float:
        count, widest = len(shapes), max(n for _, n in shapes)
        data = (ctypes.c_void_p * count)(*(w.ctypes.data for w in weights))
        k, n = ((ctypes.c_int * count)(*(shape[i] for shape in shapes)) for i in (0, 1))
        size = 4 if way == DOT else BYTES[dtype]
        x = _numbers(rows * WIDTH * size, size)
        y = np.zeros((2, rows * widest), np.float32)
        seconds: float = self._library.linears(
            self._pool, way, dtype, rows, data, k, n, count, ctypes.c_void_p(x.ctypes.data), ctypes.c_size_t(WIDTH),
            ctypes.c_void_p(y[0].ctypes.data), ctypes.c_void_p(y[1].ctypes.data),
        )  # fmt: skip
        return seconds

    def attention(
        self, rows: int, queries: int, context: int, kv_heads: int, layers: int, cache: Bytes
    ) -> float:
        qkv = np.random.default_rng(0).standard_normal(
            (rows * queries, (HEADS + 2 * kv_heads) * HEAD_DIM), np.float32
        )
        out = np.zeros((rows * queries, HEADS * HEAD_DIM), np.float32)
        seconds: float = self._library.attention(
            self._pool, rows, queries, context, HEADS, kv_heads, HEAD_DIM, layers, ctypes.c_void_p(qkv.ctypes.data),
            ctypes.c_void_p(out.ctypes.data), ctypes.c_void_p(cache.ctypes.data),
            ctypes.c_size_t(cache.nbytes // layers),
        )  # fmt: skip
        return seconds


def _numbers(count: int, size: int) -> Bytes:
    """Bytes of floats near 1, in memory of their own."""
    one = np.float32(1.0625).tobytes()[4 - size :]
    return np.tile(np.frombuffer(one, np.uint8), count // size)


def compare(title: str, ways: Ways, rounds: int, *, work: tuple[float, float]) -> None:
    """Time all ways in turns and print a line of each. `work`: bytes and operations of a run."""
    limits = LimitsProbe(threads=THREADS, formats=("f32",))
    limits.sample()
    for run in ways.values():
        run()
    times: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(rounds):
        names = list(ways)
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            times[name].append(ways[name]())
    limits.sample()
    first, *others = ways
    middle, found = statistics.median(times[first]), limits.limits()
    rates = work[0] / middle, work[1] / middle
    shares = rates[0] / found.bandwidth.median, rates[1] / found.compute["f32"].median
    best = f"{shares[0]:.0%} of reads at {found.bandwidth.median / 1e9:.1f} GB/s"
    if shares[1] > shares[0]:
        best = f"{shares[1]:.0%} of {found.compute['f32'].median / 1e9:.0f} GFLOP/s"
    fastest = min(times[first])
    print(f"| {title} | {first} | {fastest * 1e3:.2f} ms | {middle * 1e3:.2f} ms | | | {best} |")
    for name in others:
        ratios = [mine / theirs - 1 for mine, theirs in zip(times[first], times[name], strict=True)]
        low, mid, high = statistics.quantiles(ratios, n=4)
        least, spent = min(times[name]), statistics.median(times[name])
        cost = f"{fastest / least - 1:+.0%} | {mid:+.0%} ({low:+.0%} to {high:+.0%})"
        print(f"| | {name} | {least * 1e3:.2f} ms | {spent * 1e3:.2f} ms | {cost} | |", flush=True)


def linears(library: Library, rounds: int, dtype: int, rows: int, layers: int, *, head: bool) -> None:
    shapes = [*LAYER * layers, *([HEAD] if head else [])]
    weights = [_numbers(k * n * BYTES[dtype], BYTES[dtype]) for k, n in shapes]
    names = {"quire": FIXED, "split": SPLIT} | ({"sums": SUMS, "dot": DOT} if rows == 1 else {})
    ways = {name: partial(library.linears, way, dtype, rows, weights, shapes) for name, way in names.items()}
    numbers = sum(k * n for k, n in shapes)
    kind = "bf16" if dtype == BF16 else "f32"
    title = f"{rows} row{'s' * (rows > 1)}, {layers} layers{' and the head' * head}, {kind}"
    compare(title, ways, rounds, work=(numbers * BYTES[dtype], 2.0 * numbers * rows))


def attention(
    libraries: dict[int, Library], rounds: int, rows: int, queries: int, context: int, kv_heads: int
) -> None:
    of_layer = rows * -(-context // 16) * kv_heads * 2 * 16 * HEAD_DIM * 2
    layers = max(2, -(-100_000_000 // of_layer))
    layers = min(layers, 24)
    cache = _numbers(of_layer * layers, 2)
    ways = {
        "quire" if partition == SHIPPED else f"{partition:,} keys": partial(
            library.attention, rows, queries, context, kv_heads, layers, cache
        )
        for partition, library in libraries.items()
    }
    seen = queries * (context - (queries - 1) / 2)
    work = cache.nbytes, 4.0 * rows * seen * HEADS * HEAD_DIM * layers
    compare(
        f"{rows} × {queries} queries at {context:,} keys, {kv_heads} heads of keys, bf16",
        ways,
        rounds,
        work=work,
    )


def library_products(library: Library, rounds: int, rows: int, layers: int) -> None:
    import torch

    torch.set_num_threads(THREADS)
    shapes = list(LAYER * layers)
    weights = [_numbers(k * n * 4, 4) for k, n in shapes]
    tensors = [
        torch.from_numpy(w.view(np.float32).reshape(n, k)) for w, (k, n) in zip(weights, shapes, strict=True)
    ]
    inputs = {k: torch.ones(rows, k) for k, _ in shapes}

    def theirs() -> float:
        start = time.perf_counter()
        with torch.inference_mode():
            for w, (k, _) in zip(tensors, shapes, strict=True):
                torch.nn.functional.linear(inputs[k], w)
        return time.perf_counter() - start

    ways: Ways = {"quire": lambda: library.linears(FIXED, F32, rows, weights, shapes), "torch": theirs}
    numbers = sum(k * n for k, n in shapes)
    compare(f"{rows} rows, {layers} layers, f32", ways, rounds, work=(numbers * 4, 2.0 * numbers * rows))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parts = ("decode", "prefill", "attention", "library")
    parser.add_argument("--only", nargs="+", choices=parts, default=parts)
    parser.add_argument("--rounds", type=int, default=9, help="0: only build")
    asked = parser.parse_args()
    libraries = {partition: Library(partition) for partition in PARTITIONS}
    if not asked.rounds:
        return
    print("| work | way | fastest | median | cost, fastest runs | cost, rounds | share of the machine |")
    print("|---|---|--:|--:|--:|--:|---|")
    shipped = libraries[SHIPPED]
    if "decode" in asked.only:
        for dtype, rows in ((BF16, 1), (BF16, 8), (F32, 1)):
            linears(shipped, asked.rounds, dtype, rows, 4, head=dtype == BF16)
    if "prefill" in asked.only:
        for dtype, rows in ((BF16, 128), (BF16, 512), (F32, 128)):
            linears(shipped, asked.rounds, dtype, rows, 2, head=False)
    if "attention" in asked.only:
        for case in ((1, 1, 8192, 8), (1, 1, 900, 8), (1, 1, 900, 1), (8, 1, 512, 8), (1, 512, 512, 8)):
            attention(libraries, asked.rounds, *case)
    if "library" in asked.only:
        for rows in (1, 8, 128, 512):
            library_products(shipped, asked.rounds, rows, 2)


if __name__ == "__main__":
    main()
