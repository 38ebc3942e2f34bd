"""What pruning costs a model and what it brings: a row for each way, and pruning before INT4.

    python -m benchmarks.pruning MODEL --rows rows.jsonl [--kept FOLDER]    quality and bytes; continues rows.jsonl
    python -m benchmarks.pruning --rows rows.jsonl --speed                  decode speed of kept ones: on a quiet one
    python -m benchmarks.pruning --table rows.jsonl                         the rows as a table

Quality and bytes do not depend on what else runs; speed does.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from quire import LLM, SamplingParams
from quire.config.schema import EngineConfig
from quire.engine.build.opening import open_model
from quire.offline.gate import GateOptions, gate
from quire.offline.prune.prune_run import prune_structure
from quire.offline.quantize.quantize_model import quantize
from quire.offline.quantize.recipe import Recipe

SPEED_TOKENS = 128
# Steps of each row, one after the other; "int4": GPTQ, 4 bits, the largest group that fits.
WAYS: dict[str, list[dict[str, Any]]] = {
    "original": [],
    **{f"{method} {share:.0%}": [{"method": method, "sparsity": share}]
       for share in (0.25, 0.5) for method in ("magnitude", "wanda", "sparsegpt")},
    **{f"{method} 2:4": [{"method": method, "pattern": "2:4"}] for method in ("magnitude", "wanda", "sparsegpt")},
    **{f"{share:.0%} of {part}": [{"method": "structured", "structure": part, "sparsity": share}]
       for share in (0.125, 0.25, 0.5) for part in ("heads", "channels", "layers")},
    "int4": [{"method": "gptq"}],
    "sparsegpt 2:4, int4": [{"method": "sparsegpt", "pattern": "2:4"}, {"method": "gptq"}],
    "50% of layers, int4": [{"method": "structured", "structure": "layers"}, {"method": "gptq"}],
    "50% of heads and channels, int4": [{"method": "structured", "structure": "heads"},
                                        {"method": "structured", "structure": "channels"}, {"method": "gptq"}],
}  # fmt: skip


def make(
    model: str, way: list[dict[str, Any]], folder: Path, asked: EngineConfig, text: dict[str, Any]
) -> Path:
    """The checkpoint after all steps."""
    for number, step in enumerate(way):
        out, recipe = folder / str(number), Recipe(**step, **text)
        run = prune_structure if recipe.structure else quantize
        run(model, out, recipe, asked)
        model = str(out)
    return Path(model)


def stored_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def decode_rate(folder: Path, asked: EngineConfig) -> float:
    """Tokens per second of one sequence, the middle of three answers."""
    params = SamplingParams(max_tokens=SPEED_TOKENS, temperature=0.0, ignore_eos=True)
    with LLM(folder, progress=False, threads=asked.execution.threads, max_model_len=512) as llm:
        llm.generate([[1]], params, use_tqdm=False)
        found = []
        for _ in range(3):
            begin = time.perf_counter()
            llm.generate([[1]], params, use_tqdm=False)
            found.append(SPEED_TOKENS / (time.perf_counter() - begin))
    return statistics.median(found)


def measure(args: argparse.Namespace) -> None:
    """Append the rows that the file does not have yet."""
    rows = Path(args.rows)
    done = {json.loads(line)["way"] for line in rows.read_text().splitlines()} if rows.exists() else set()
    asked = EngineConfig(threads=args.threads)
    exact = asked.replace(dtype="float32")
    text = {"samples": args.calibration_samples, "length": args.calibration_length}
    original = open_model(args.model)
    for way, steps in WAYS.items():
        if way in done or (args.ways and way not in args.ways.split("; ")):
            continue
        with tempfile.TemporaryDirectory(dir=args.work) as name:
            begin = time.perf_counter()
            try:
                made = make(str(original.folder), steps, Path(name), asked, text)
            except ValueError as error:  # the share of so few heads would be none
                print(f"{way}: {error}", file=sys.stderr)
                continue
            seconds = time.perf_counter() - begin
            if args.kept and steps:
                made = Path(shutil.move(made, Path(args.kept) / slug(way)))
            report = gate(original, open_model(made), exact, GateOptions(eval_file=args.eval, max_kl=1e9))
            (found, *_), (known, *_) = (
                zip(*[(d, t) for d, t in zip(report.compared.divergences, report.compared.texts, strict=True)
                      if t.known], strict=True)
            )  # fmt: skip
            row = {
                "way": way, "model": original.folder.name, "bytes": stored_bytes(made), "seconds": seconds,
                "memory": report.candidate.weight_bytes, "text": found.text, "tokens": found.tokens,
                "original_perplexity": known.perplexity, "perplexity": found.perplexity, "kl_mean": found.kl_mean,
                "kl_p99": found.kl_p99, "top1": found.top1_agreement,
                "folder": str(made) if args.kept else None, "decode": None,
            }  # fmt: skip
            shutil.rmtree(name, ignore_errors=True)
        with rows.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(json.dumps(row), file=sys.stderr, flush=True)


def slug(way: str) -> str:
    """A way as the name of a folder."""
    return re.sub(r"[^a-z0-9]+", "-", way)


def time_rows(args: argparse.Namespace) -> None:
    """Add the decode speed to the rows whose checkpoints were kept: in turns, one for each round."""
    path = Path(args.rows)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    timed = [row for row in rows if row["folder"] and (not args.ways or row["way"] in args.ways.split("; "))]
    for row in timed:
        row["decode"] = []
    for _ in range(args.rounds):
        for row in timed:
            row["decode"].append(decode_rate(Path(row["folder"]), EngineConfig(threads=args.threads)))
            print(row["way"], row["decode"][-1], file=sys.stderr, flush=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def speed_up(row: dict[str, Any], plain: dict[str, Any]) -> str:
    """How many times as fast as the original of the same round: the middle, the least and the most."""
    found = [mine / other for mine, other in zip(row["decode"], plain["decode"], strict=True)]
    return f"{statistics.median(found):.2f} × ({min(found):.2f} to {max(found):.2f})"


def table(path: Path) -> str:
    """The rows in Markdown."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    plain = next(row for row in rows if row["way"] == "original")
    speed = any(row["decode"] for row in rows)
    head = ["pruning", "stored MB", "of the original", "perplexity", "KL mean", "KL p99", "same top-1"]
    lines = [f"| {' | '.join(head + ['decode'] * speed)} |", f"|---{'|--:' * (len(head) - 1 + speed)}|"]
    for row in rows:
        cells = [
            row["way"], f"{row['bytes'] / 1e6:.1f}", f"{plain['bytes'] / row['bytes']:.2f} × less",
            f"{row['perplexity']:.2f}", f"{row['kl_mean']:.3f}", f"{row['kl_p99']:.2f}", f"{row['top1']:.1%}",
        ]  # fmt: skip
        if speed:
            cells.append(speed_up(row, plain) if row["decode"] else "–")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", help="a checkpoint folder")
    parser.add_argument("--rows", help="the file of rows")
    parser.add_argument("--table", type=Path, help="print the rows of this file")
    parser.add_argument("--eval", metavar="FILE", help="a text to compare on (default: the built-in ones)")
    parser.add_argument("--ways", help="only these, separated by '; '")
    parser.add_argument("--speed", action="store_true", help="with --ways, name the original among them")
    parser.add_argument("--rounds", type=int, default=3, help="of --speed")
    parser.add_argument("--kept", metavar="FOLDER", help="where checkpoints stay")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--work", help="folder for checkpoints (default: the system's for temporary files)")
    parser.add_argument("--calibration-samples", type=int, default=64)
    parser.add_argument("--calibration-length", type=int, default=256)
    args = parser.parse_args()
    if args.table:
        print(table(args.table))
    elif args.speed:
        time_rows(args)
    else:
        measure(args)


if __name__ == "__main__":
    main()
