"""Time to the first token of a long prompt that is cached but for its end, beside one that is not.

    python -m benchmarks.cached_ttft [--shape qwen3-0.6b] [--length 8000] [--ends 16 64 256] [--rounds 3]
    python -m benchmarks.cached_ttft --simulated [--shape llama-3-70b] [--device h100:8] [--length 100352]

Measured: random weights of a shape, in bfloat16, with a new prompt each round. Simulated: the scheduler on a virtual
clock, whose steps take what the roofline of a device allows and `--overhead-ms` more (quire sim);
lengths are whole multiples of 512 there.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from quire import LLM, SamplingParams
from quire.planner.shapes import SHAPES

Times = dict[int, tuple[list[float], list[float]]]  # seconds by new tokens: computed, cached but for these
_HASHED = 512  # tokens that an id of a trace stands for


def measured(args: argparse.Namespace, folder: Path) -> Times:
    """Prompts of an engine."""
    (folder / "config.json").write_text(json.dumps(SHAPES[args.shape]))
    rng, found = random.Random(1), Times()
    asked = SamplingParams(max_tokens=1, temperature=0)

    def first_token(prompt: list[int]) -> float:
        start = time.perf_counter()
        llm.generate([prompt], asked, use_tqdm=False)
        return time.perf_counter() - start

    with LLM(
        str(folder), load_format="random", dtype="bfloat16", max_num_seqs=1, max_model_len=args.length + 512,
        memory="12GiB", progress=False,
    ) as llm:  # fmt: skip
        first_token([7] * 600)
        for _ in range(args.rounds):
            prompt = [rng.randrange(5, 4000) for _ in range(args.length)]
            computed = first_token(prompt)
            for end in args.ends:
                new = [rng.randrange(5, 4000) for _ in range(end)]
                times = found.setdefault(end, ([], []))
                times[0].append(computed)
                times[1].append(first_token(prompt[: args.length - end] + new))
    return found


def simulated(args: argparse.Namespace, folder: Path) -> Times:
    """The same prompts in `quire sim`, with and without a prefix cache."""
    found, trace = Times(), folder / "trace.jsonl"
    for end in args.ends:
        known = (args.length - end) // _HASHED
        own = args.length // _HASHED - known
        asked = [
            {"timestamp": 600_000 * turn, "input_length": args.length, "output_length": 1,
             "hash_ids": [*range(known), *range(10_000 * turn, 10_000 * turn + own)]}
            for turn in (1, 2)
        ]  # fmt: skip
        trace.write_text("\n".join(map(json.dumps, asked)))
        command = [
            sys.executable, "-m", "quire", "sim", "--trace", str(trace), "--model", args.shape, "--device", args.device,
            "--overhead-ms", str(args.overhead_ms), "--max-model-len", str(args.length + 512), "--json",
            "--num-blocks", str(3 * args.length // 16),
        ]  # fmt: skip
        both = _mean_seconds(command)
        computed = _mean_seconds([*command, "--no-prefix-caching"])
        found[end] = [computed], [2 * both - computed]
    return found


def _mean_seconds(command: list[str]) -> float:
    said = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return float(said["metrics"]["ttft_mean"]) / 1e3


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--simulated", action="store_true")
    parser.add_argument("--shape", choices=SHAPES)
    parser.add_argument("--length", type=int)
    parser.add_argument("--ends", type=int, nargs="+", help="new tokens")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="h100:8")
    parser.add_argument("--overhead-ms", type=float, default=5.0)
    args = parser.parse_args()
    args.shape = args.shape or ("llama-3-70b" if args.simulated else "qwen3-0.6b")
    args.length = args.length or (100_352 if args.simulated else 8_000)
    args.ends = args.ends or ([512, 2048, 8192] if args.simulated else [16, 64, 256])
    with tempfile.TemporaryDirectory() as folder:
        found = (simulated if args.simulated else measured)(args, Path(folder))
    print(
        f"| {args.length:,} tokens, new | computed, ms | cached, ms | computed / cached |\n|--:|--:|--:|--:|"
    )
    for end, (computed, cached) in found.items():
        ratios = [one / other for one, other in zip(computed, cached, strict=True)]
        print(
            f"| {end:,} | {1e3 * median(computed):.0f} | {1e3 * median(cached):.0f} | {median(ratios):.1f} |"
        )


if __name__ == "__main__":
    main()
