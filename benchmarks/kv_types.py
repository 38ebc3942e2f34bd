"""Decode attention by format of the KV cache, beside bfloat16, at several context lengths.

    python -m benchmarks.kv_types [--contexts 8192 32768] [--batch 1] [--rounds 15] [MODEL]
    python -m benchmarks.kv_types --unit layer [--kinds bfloat16 int4 kivi4]      whole layers, their linears with them
    python -m benchmarks.kv_types --unit step --copies 28 [--kinds …]             a step: layers and the head

MODEL is a checkpoint folder, of which only config.json is needed; its weights are random. Formats take turns in every
round, so that what else the machine does meets all of them; a ratio is the median of those of single rounds.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from quire.bench.kernel_programs import (
    SMALL_VOCAB,
    Bench,
    blocks_of,
    one_layer,
    unit_cost,
    units,
    with_copies,
    with_head,
)
from quire.cache_kinds import LATE_TOKENS
from quire.config.schema import EngineConfig
from quire.engine.build.opening import open_model
from quire.executor.base import Limits
from quire.executor.kinds import native_kind
from quire.program.cost import Row
from quire.util.platform import usable_cores

KINDS = ("bfloat16", "int8", "fp8_e4m3", "fp8_e5m2", "int4", "kivi4", "kivi2", "kvquant3")
# Attention of Qwen3-0.6B.
CONFIG = """{"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 1024, "head_dim": 128,
"intermediate_size": 3072, "num_attention_heads": 16, "num_key_value_heads": 8, "num_hidden_layers": 28,
"max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_theta": 1000000, "vocab_size": 151936,
"tie_word_embeddings": true, "torch_dtype": "bfloat16", "hidden_act": "silu"}"""


def bench_of(
    model: str, kind: str, context: int, batch: int, copies: int, threads: int, timed: str
) -> tuple[Bench, int]:
    """One layer's attention, or the layer, `copies` times, with a filled cache, "step": the head after them; and the
    bytes that one copy reads."""
    asked = EngineConfig(dtype="bfloat16", kv_cache_dtype=kind, load_format="random")
    opened = open_model(model, tokenizer=False)
    step = timed == "step"
    _, program = one_layer(opened, asked, 0, opened.facts.spec.vocab if step else SMALL_VOCAB)
    unit = next(unit for unit in units(program) if unit.kind == ("layer" if step else timed))
    rows = (Row(1, context - 1),) * batch
    size = LATE_TOKENS
    blocks = len(program.cache_groups) * blocks_of(rows, size)
    limits = Limits(512, batch, 1, -(-context // size) * size, blocks, size)
    copied = with_copies(program, unit, copies)
    bench = Bench(with_head(copied, program) if step else copied, limits, native_kind(threads))
    bench.fill(rows, units=timed != "attend")
    cost = unit_cost(program, unit, rows, batch)
    return bench, cost.kv_read_bytes + cost.weight_bytes  # without the head


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", help="default: the shape of Qwen3-0.6B")
    parser.add_argument("--contexts", type=int, nargs="+", default=[8192, 32768])
    parser.add_argument("--kinds", nargs="+", default=KINDS)
    parser.add_argument("--unit", choices=("attend", "layer", "step"), default="attend", help="what is timed")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument(
        "--copies", type=int, default=4, help="layers; together they should exceed the caches"
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=usable_cores())
    args = parser.parse_args()
    with TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(CONFIG)
        for context in args.contexts:
            compare(args.model or folder, context, args)


def compare(model: str, context: int, args: argparse.Namespace) -> None:
    """Print a line for each format: time, and the ratio's median, least and most."""
    benches = {
        kind: bench_of(model, kind, context, args.batch, args.copies, args.threads, args.unit)
        for kind in args.kinds
    }
    parts, unit = (1, "step") if args.unit == "step" else (args.copies, "layer")
    seconds: dict[str, list[float]] = {kind: [] for kind in benches}
    for _ in range(args.rounds):
        for kind, (bench, _) in benches.items():
            start = time.perf_counter()
            if args.unit == "step":
                bench.run_all()
            else:
                bench.run(0, args.copies)
            seconds[kind].append((time.perf_counter() - start) / parts)
    print(f"context {context}, {args.batch} sequences, {args.threads} threads")
    for kind, (bench, size) in benches.items():
        middle = statistics.median(seconds[kind])
        found = sorted(a / b for a, b in zip(seconds[args.kinds[0]], seconds[kind], strict=True))
        print(
            f"  {kind:<10} {middle * 1e3:8.3f} ms a {unit}  {size * args.copies / parts / middle / 1e9:6.1f} GB/s  "
            f"{statistics.median(found):5.2f} x {args.kinds[0]} ({found[0]:.2f} to {found[-1]:.2f})", flush=True,
        )  # fmt: skip
        bench.close()


if __name__ == "__main__":
    main()
