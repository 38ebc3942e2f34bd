"""llama.cpp's own benchmark programs on one GGUF file: llama-bench for one stream, llama-batched-bench for several.

They make their own random tokens. Batched requests are decoded in step from the first to the last.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path

import workloads
from workloads import LONG, OUTPUT, PROMPT

BATCH = ["-b", "2048", "-ub", "512"]


def main() -> None:
    args = workloads.arguments()
    programs = Path(os.environ["LLAMA_CPP_BIN"])
    for work in args.work.split(","):
        try:
            workloads.report(work, run(programs, args.model, work, str(args.threads)))
        except (RuntimeError, ValueError) as error:
            print(json.dumps({"work": work, "error": str(error)[:300]}), flush=True)


def run(programs: Path, model: str, work: str, threads: str) -> float:
    """Tokens per second of one workload, or the seconds of "first". The programs warm up by themselves."""
    if work == "first":
        start = time.perf_counter()
        output(
            [str(programs / "llama-bench"), "-m", model, "-t", threads, "-p", str(PROMPT), "-n", "0", "-r", "1",
             "--no-warmup", "-o", "json"]
        )  # fmt: skip
        return time.perf_counter() - start
    if work in {"decode", "prefill"}:
        decode = work == "decode"
        prompt, made, depth = (0, OUTPUT, PROMPT) if decode else (LONG, 0, 0)
        out = output(
            [str(programs / "llama-bench"), "-m", model, "-t", threads, "-p", str(prompt), "-n", str(made),
             "-d", str(depth), "-r", "1", "-o", "json", *BATCH]
        )  # fmt: skip
        rows = json.loads(out)
        return float(next(r["avg_ts"] for r in rows if (r["n_prompt"], r["n_gen"]) == (prompt, made)))
    count = workloads.requests_of(work)
    out = output(
        [str(programs / "llama-batched-bench"), "-m", model, "-t", threads, "-tb", threads, "-npp", str(PROMPT),
         "-ntg", str(OUTPUT), "-npl", str(count), "-c", str(count * (PROMPT + OUTPUT + 64)),
         "--output-format", "jsonl", *BATCH]
    )  # fmt: skip
    row = [json.loads(line) for line in out.splitlines() if line.startswith("{")][-1]
    return count * OUTPUT / (row["t_pp"] + row["t_tg"])


def output(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{Path(command[0]).name} ended with {done.returncode}: {done.stderr[-200:]}")
    return done.stdout


if __name__ == "__main__":
    main()
