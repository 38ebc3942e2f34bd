"""Quality, time and memory of `quire quantize`: a row for each method, bits and group size of a model.

    python -m benchmarks.quantize MODEL --out rows.jsonl                quality of every method; continues rows.jsonl
    python -m benchmarks.quantize --table rows.jsonl …                  the rows as a table
    python -m benchmarks.quantize --speed gptq,awq --shape qwen3-0.6b   time and peak memory with random weights
                                  --layers 1,2                          the same from the difference of few layers

Quality does not depend on what else runs; time does.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from quire.config.schema import EngineConfig
from quire.engine.build.opening import open_model
from quire.offline.gate import GateOptions, gate

# method, bits, group size (0: one scale per output), more options
RUNS: list[tuple[str, int, int | None, tuple[str, ...]]] = [
    *((method, bits, group, ())
      for bits in (4, 3, 2) for group in (64, 32) for method in ("rtn", "gptq", "awq", "awq-gptq")),
    ("rtn", 8, 64, ()),
    ("gptq", 4, 64, ("--no-symmetric",)),
    ("rtn", 4, 64, ("--no-symmetric",)),
    *((method, 4, 64, ("--target-bits", "4.5")) for method in ("rtn", "gptq", "awq")),
    ("smoothquant", 8, None, ()),
    ("fp8", 8, None, ()),
    ("fp8", 8, None, ("--activations", "static")),
    *(("gguf", 4, None, ("--gguf-type", kind)) for kind in ("Q8_0", "Q6_K", "Q5_K", "Q5_0", "Q4_K", "IQ4_XS", "IQ4_NL",
                                                            "Q4_0", "Q3_K", "Q2_K")),
    ("gguf", 4, None, ("--target-bits", "4.5")),
]  # fmt: skip


def make(
    model: str, out: Path, run: tuple[str, int, int | None, tuple[str, ...]], more: list[str]
) -> dict[str, Any]:
    """Quantize in a process of its own; its time and peak memory."""
    method, bits, group, options = run
    command = [sys.executable, "-m", "quire.cli.main", "quantize", model, "--out", str(out), "--method", method,
               "--no-eval", "--quiet", *options, *more]  # fmt: skip
    if method in {"rtn", "gptq", "awq", "awq-gptq"}:
        command += ["--bits", str(bits)]
    if group is not None:
        command += ["--group-size", str(group)]
    begin = time.perf_counter()
    pid = os.spawnv(os.P_NOWAIT, sys.executable, command)
    _, status, usage = os.wait4(pid, 0)
    if status:
        raise SystemExit(f"{' '.join(command)}: status {status}")
    size = (
        out.stat().st_size
        if out.is_file()
        else sum(path.stat().st_size for path in out.glob("*.safetensors"))
    )
    seconds, cpu = time.perf_counter() - begin, usage.ru_utime + usage.ru_stime
    return {"seconds": seconds, "cpu": cpu, "peak_mib": usage.ru_maxrss / 1024, "bytes": size}


def measure(args: argparse.Namespace) -> None:
    """Append the rows that the file does not have yet."""
    rows = Path(args.out)
    done = {json.loads(line)["run"] for line in rows.read_text().splitlines()} if rows.exists() else set()
    more = [
        "--calibration-samples",
        str(args.samples),
        *(["--threads", str(args.threads)] if args.threads else []),
    ]
    more += ["--calibration", args.calibration] if args.calibration else []
    asked = EngineConfig().replace(threads=args.threads)
    for run in RUNS:
        method, bits, group, options = run
        name = " ".join([method, *([str(bits), f"g{group}"] if group is not None else []), *options])
        if name in done or (args.only and not name.startswith(tuple(args.only.split(",")))):
            continue
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / ("model.gguf" if method == "gguf" else "model")
            row = {"run": name, "model": args.model} | make(args.model, out, run, more)
            report = gate(
                open_model(args.model), open_model(out), asked, GateOptions(eval_file=args.eval, force=True)
            )
        for text, found in zip(report.compared.texts, report.compared.divergences, strict=True):
            row[text.name] = {
                "tokens": text.tokens, "perplexity": text.perplexity, "after": found.perplexity,
                "kl": found.kl_mean, "error": found.kl_error, "p99": found.kl_p99, "same": found.top1_agreement,
            }  # fmt: skip
        with rows.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(json.dumps(row), flush=True)


def table(files: list[str]) -> None:
    """Print the rows as Markdown."""
    for file in files:
        rows = [json.loads(line) for line in Path(file).read_text().splitlines()]
        texts = [key for key, value in rows[0].items() if isinstance(value, dict)]
        print(
            "| | MiB |" + "".join(f" {text}: perplexity | KL mean | KL p99 | same top-1 |" for text in texts)
        )
        print("|---|--:|" + "--:|" * 4 * len(texts))
        for row in rows:
            cells = [f"| {row['run']} | {row['bytes'] / 2**20:.1f} |"]
            for text in texts:
                found = row[text]
                after = "–" if found["after"] is None else f"{found['after']:.3f}"
                cells.append(
                    f" {found['perplexity']:.3f} → {after} | {found['kl']:.4f} ± {found['error']:.4f} | "
                    f"{found['p99']:.3f} | {found['same']:.1%} |"
                )
            print("".join(cells))


def speed(args: argparse.Namespace) -> None:
    """Time and peak memory with random weights of a shape; of fewer layers also the time that the whole shape takes."""
    from quire.bench.random_checkpoint import write_checkpoint
    from quire.planner.shapes import SHAPES

    shape = SHAPES[args.shape]
    whole = int(shape["num_hidden_layers"])
    counts = [int(count) for count in args.layers.split(",")] if args.layers else [whole]
    folder = Path(args.folder or tempfile.mkdtemp())
    models = {count: folder / f"{args.shape}-{count}" for count in counts}
    for count, model in models.items():
        if not model.exists():
            write_checkpoint(model, {**shape, "num_hidden_layers": count})
    if args.write:
        return
    more = ["--calibration", args.calibration] if args.calibration else []
    for method in args.speed.split(","):
        found = {}
        for count, model in models.items():
            found[count] = row = make(str(model), folder / "out", (method, 4, 128, ()), more)
            shutil.rmtree(folder / "out")
            print(
                f"{args.shape} {method}, {count} layers: {row['seconds']:.0f} s, CPU {row['cpu']:.0f} s, "
                f"peak {row['peak_mib']:.0f} MiB", flush=True,
            )  # fmt: skip
        if whole not in found and len(found) > 1:
            (few, least), *_, (most, longest) = sorted(found.items())
            times = {}
            for clock in ("seconds", "cpu"):
                each = (longest[clock] - least[clock]) / (most - few)
                times[clock] = least[clock] + (whole - few) * each
            print(f"{method}, {whole} layers: {times['seconds']:.0f} s, CPU {times['cpu']:.0f} s", flush=True)
    if not args.folder:
        shutil.rmtree(folder)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", default="quire-mini")
    parser.add_argument("--out", default="quantize.jsonl")
    parser.add_argument("--table", nargs="+", metavar="FILE")
    parser.add_argument("--speed", metavar="METHODS")
    parser.add_argument("--shape", default="qwen3-0.6b")
    parser.add_argument("--only", help="runs whose names begin so, divided by commas")
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--calibration", default="")
    parser.add_argument("--eval", help="text to compare on")
    parser.add_argument("--folder", help="where the checkpoints of --speed are written, and stay")
    parser.add_argument(
        "--layers", help="of --speed: so many of the shape's layers, such as 1,2; times of all follow"
    )
    parser.add_argument("--write", action="store_true", help="of --speed: only write the checkpoints")
    args = parser.parse_args()
    if args.table:
        table(args.table)
    elif args.speed:
        speed(args)
    else:
        measure(args)


if __name__ == "__main__":
    main()
