"""What rounded KV caches cost by length of the context, and how many users fit in the same memory.

    python -m benchmarks.kv_context MODEL [--context 8192] [--kinds int8 int4 kivi2]
    python -m benchmarks.kv_context --users llama-3-70b --context 4096 --budget 80

The mean KL divergence from a cache in the weights' format, in nats, of predictions of one sequence of the built-in
calibration text, by their position. Quality does not depend on what else runs.
"""

from __future__ import annotations

import argparse
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from quire.cache_kinds import KV_DTYPES
from quire.config.schema import EngineConfig
from quire.core.capacity import peak_blocks
from quire.engine.build.opening import Model, open_model
from quire.executor.base import F32
from quire.loader.kv_codes import write_codes
from quire.offline.divergence import Predictions, compare
from quire.offline.eval_text import text_of, tokenizer_of
from quire.offline.kv_calibration import calibrate_codes
from quire.offline.quantize.calibration import BUILTIN, read_text
from quire.offline.scorer import Passage, Scorer
from quire.planner.shapes import SHAPES
from quire.program.formats import NumberFormats
from quire.program.lower import lower
from quire.program.memory import kv_block_bytes
from quire.spec.config_reader import ConfigReader
from quire.spec.facts import facts_of

BLOCK = 32  # tokens
KINDS = ("bfloat16", "int8", "fp8_e4m3", "fp8_e5m2", "int4", "kivi4", "kivi2", "kvquant3")
CALIBRATED = 512  # tokens of a sequence, as `quire calibrate` takes them


def sequence_bytes(scorer: Scorer, context: int) -> int:
    """Bytes of cache of one sequence."""
    size = scorer.config.asked.cache.block_size
    blocks = int(peak_blocks(scorer.program.cache_groups, context, 1, size))
    return blocks * kv_block_bytes(scorer.program, size)


def users(shape: str, context: int, budget: float) -> None:
    """Print how many sequences of `context` tokens of a shape fit in `budget` GB, by the exact plan of blocks."""
    spec = facts_of(ConfigReader(SHAPES[shape]), None, "").spec
    print(f"| cache | GB of {context:,} tokens | users in {budget:g} GB |")
    print("|---|--:|--:|")
    for kind in KINDS:
        program = lower(spec, NumberFormats("bf16", KV_DTYPES[kind]))
        blocks = int(peak_blocks(program.cache_groups, context, 1, BLOCK))
        size = blocks * kv_block_bytes(program, BLOCK)
        print(f"| {kind} | {size / 1e9:.3f} | {int(budget * 1e9 / size)} |")


def levels(model: Model, asked: EngineConfig, folder: Path) -> str:
    """The file of a kvquant3 cache's levels, on the built-in text that `quire calibrate` takes, another one."""
    tokens, file = tokenizer_of(model).encode(text_of(None)), folder / "levels.safetensors"
    write_codes(file, calibrate_codes(model, asked, tokens, min(CALIBRATED, model.facts.spec.max_positions)))
    return str(file)


def divergence(args: argparse.Namespace) -> None:
    """Print the KL divergence of each cache by position."""
    model, asked = open_model(args.model), EngineConfig(dtype="float32", threads=args.threads)
    context = min(args.context, model.facts.spec.max_positions)
    tokens = tokenizer_of(model).encode(read_text(BUILTIN))[:context]
    context = len(tokens)
    edges = [0, *(edge for edge in (512, 1024, 2048, 4096, 8192, 16384) if edge < context), context]
    plain = Scorer(model, asked, context)
    plain.load(None)
    bfloat16 = sequence_bytes(Scorer(model, asked.replace(kv_cache_dtype="bfloat16"), context), context)
    texts = {"text": [Passage(tuple(tokens))]}
    heads = [f"{begin:,} to {end:,}" for begin, end in pairwise(edges)]
    print(f"| cache | {' | '.join(heads)} | bytes a token | users for each of bfloat16 |")
    print(f"|---|{'--:|' * (len(heads) + 2)}")
    for kind in args.kinds:
        with TemporaryDirectory() as folder:
            scales = levels(model, asked, Path(folder)) if kind == "kvquant3" else None
            changed = asked.replace(kv_cache_dtype=kind, kv_cache_scales=scales)
            other = Scorer(model, changed, context, beside=plain)
        each: dict[str, F32] = {}
        other.load(None)
        compare(Predictions(plain, texts), other, each=each)
        # prediction i is that of token i + 1
        means = [float(np.mean(part)) for part in np.split(each["text"], [edge - 1 for edge in edges[1:-1]])]
        size = sequence_bytes(other, context)
        other.close()
        cells = [f"{mean:.4f}" for mean in means]
        print(f"| {kind} | {' | '.join(cells)} | {size / context:,.0f} | {bfloat16 / size:.2f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", default="quire-mini")
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--kinds", nargs="+", default=KINDS)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--users", metavar="SHAPE", help="only count sequences that fit in --budget GB")
    parser.add_argument("--budget", type=float, default=80)
    args = parser.parse_args()
    if args.users:
        users(args.users, args.context, args.budget)
        return
    divergence(args)


if __name__ == "__main__":
    main()
