"""Goodput of a real server at rising rates, at its knee and beyond: Quire's, or that of vLLM's CPU wheel.

    python -m benchmarks.knee quire --rates 10,20,40,80
    python -m benchmarks.knee vllm --python build/peers/venv/vllm/bin/python --rates 10,20,40,80

Requests of a trace in its own pattern, stretched to each rate, the same for both; the client shares the cores with the
server. The model has random weights in the tiny shape of benchmarks.peers. Quire runs with admission by prediction and
the controller, or plainly (`quire-fcfs`); vLLM with its defaults. A refused request counts as missed. Prints a table in
Markdown.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.peers.__main__ import TINY

from quire.bench.random_checkpoint import write_checkpoint, write_tokenizer

TRACE = "azure_llm_2023_conv.csv"
OBJECTIVES = ("ttft:500", "tpot:100")
LEVEL = ("--slo", "chat:ttft=500ms,tpot=100ms", "--scheduling-policy", "edf")
SEQUENCES = "64"
START_SECONDS = 240


def command(engine: str, model: Path, port: int, python: str) -> tuple[list[str], dict[str, str]]:
    """How a server starts, and its environment."""
    if engine != "vllm":
        words = [
            sys.executable,
            "-m",
            "quire",
            "serve",
            str(model),
            "--port",
            str(port),
            "--memory",
            "1500MiB",
        ]
        words += ["--dtype", "bfloat16", "--max-num-seqs", SEQUENCES, *(LEVEL if engine == "quire" else ())]
        return words, {}
    library = Path(python).parent.parent / "lib" / "libiomp5.so"
    environment = {
        "LD_PRELOAD": str(library), "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "0-1",
        "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1",
    }  # fmt: skip
    script = Path(__file__).parent / "peers" / "serve_vllm.py"
    words = [python, str(script), str(model), "--port", str(port), "--dtype", "bfloat16"]
    return [*words, "--max-model-len", "4096", "--max-num-seqs", SEQUENCES], environment


@contextlib.contextmanager
def serving(engine: str, model: Path, port: int, python: str, log: Path) -> Iterator[str]:
    """A server that answers; its address."""
    words, environment = command(engine, model, port, python)
    address = f"http://127.0.0.1:{port}"
    with log.open("w") as said:
        process = subprocess.Popen(
            words, env={**os.environ, **environment}, stdout=said, stderr=subprocess.STDOUT, cwd=log.parent
        )
        try:
            end = time.monotonic() + START_SECONDS
            while not answers(address):
                if process.poll() is not None or time.monotonic() > end:
                    raise SystemExit(f"{engine} does not answer: {log.read_text()[-2000:]}")
                time.sleep(0.3)
            yield address
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)


def answers(address: str) -> bool:
    with contextlib.suppress(OSError), urllib.request.urlopen(f"{address}/health", timeout=2):
        return True
    return False


def curve(address: str, asked: argparse.Namespace) -> dict[str, Any]:
    """The result of a sweep over the rates."""
    words = [
        sys.executable,
        "-m",
        "quire",
        "bench",
        "sweep",
        address,
        "--no-server-metrics",
        "--quiet",
        "--json",
    ]
    words += ["--api", "completions", "--prompt-ids", "270-2000", "--warmup", "16", "--goodput", *OBJECTIVES]
    words += ["--trace", str(asked.traces / TRACE), "--arrival", "trace", "--length-scale", str(asked.scale)]
    words += ["--max-input-len", "3000", "--rates", asked.rates, "--duration", str(asked.seconds)]
    done = subprocess.run(words, check=True, stdout=subprocess.PIPE)
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def show(engine: str, found: dict[str, Any]) -> None:
    rows = found["tables"]["loads"]
    best = max(row["goodput"] for row in rows)
    print(
        "| server | offered | goodput | level kept | of its best | failed | TTFT p50, p99, ms | TPOT p99, ms |"
    )
    print("|---|--:|--:|--:|--:|--:|--:|--:|")
    for row in rows:
        ttft = ", ".join(
            "–" if row[name] is None else f"{row[name]:,.0f}" for name in ("ttft_p50", "ttft_p99")
        )
        tpot = "–" if row["tpot_p99"] is None else f"{row['tpot_p99']:.1f}"
        print(
            f"| {engine} | {row['rate']:g} | {row['goodput']:.1f} | {row['share']:.0%} | {row['goodput'] / best:.0%} |"
            f" {row['failure_rate']:.0%} | {ttft} | {tpot} |",
            flush=True,
        )
    for note in found["notes"]:
        print(f"note: {note}", file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("engine", choices=("quire", "quire-fcfs", "vllm"), nargs="+")
    parser.add_argument("--python", default="build/peers/venv/vllm/bin/python", help="that of vLLM")
    parser.add_argument("--rates", default="10,20,40,80")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each rate")
    parser.add_argument("--scale", type=float, default=0.25, help="of the lengths of the trace")
    parser.add_argument("--traces", type=Path, default=Path("../shared/data/traces"))
    parser.add_argument("--port", type=int, default=8127)
    asked = parser.parse_args()
    asked.traces = asked.traces.resolve()
    with tempfile.TemporaryDirectory() as place:
        model = write_checkpoint(Path(place) / "tiny", TINY)
        write_tokenizer(model, merges=True, size=TINY["vocab_size"])
        for engine in asked.engine:
            with serving(engine, model, asked.port, asked.python, Path(place) / "server.log") as address:
                show(engine, curve(address, asked))


if __name__ == "__main__":
    main()
