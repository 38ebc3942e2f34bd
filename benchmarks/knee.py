"""Goodput of a real server at rising rates, at its knee and beyond: Quire's, or that of vLLM's CPU wheel.

    python -m benchmarks.knee quire --rates 10,20,40,80
    python -m benchmarks.knee vllm --python build/peers/venv/vllm/bin/python --rates 10,20,40,80

Requests of a trace in its own pattern, stretched to each rate, the same for both; the client shares the cores with the
server. The model has random weights in the tiny shape of benchmarks.peers. Quire runs with admission by prediction and
the controller, or plainly (`quire-fcfs`); vLLM with its defaults. A refused request counts as missed. Prints a table in
Markdown. With `--cores` a second one says what the two cores did at each rate: CPU seconds a second of the client,
of the API process and of the engine process, and the share of the time that steps took.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
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

from quire.bench.metrics_page import read_page
from quire.bench.random_checkpoint import write_checkpoint, write_tokenizer
from quire.records import dataclass

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
def serving(engine: str, model: Path, port: int, python: str, log: Path) -> Iterator[tuple[str, int]]:
    """A server that answers; its address and process."""
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
            yield address, process.pid
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)


def answers(address: str) -> bool:
    with contextlib.suppress(OSError), urllib.request.urlopen(f"{address}/health", timeout=2):
        return True
    return False


@dataclass(frozen=True, slots=True)
class Use:
    """What was used so far, in seconds: of a clock, and of the cores by each process; seconds in steps, and steps."""

    at: float
    client: float
    server: float
    engine: float
    in_steps: float
    steps: float

    def row(self, before: Use, rate: str) -> str:
        wall = self.at - before.at
        each = [
            getattr(self, name) - getattr(before, name) for name in ("client", "server", "engine", "in_steps")
        ]
        shares = " | ".join(f"{seconds / wall:.2f}" for seconds in each)
        steps = self.steps - before.steps
        return f"| {rate} | {shares} | {1e3 * each[3] / max(1.0, steps):.1f} | {steps / wall:.0f} |"


def used(address: str, pid: int) -> Use:
    """What the processes of a server of Quire, and the clients that have ended, have used."""
    with urllib.request.urlopen(f"{address}/metrics", timeout=10) as reply:
        page = read_page(reply.read().decode())
    seconds, steps = (
        sum(value for _, value in page[name]) for name in ("quire_step_seconds_total", "quire_steps_total")
    )
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return Use(
        time.monotonic(),
        ended.ru_utime + ended.ru_stime,
        cpu_seconds(pid),
        sum(map(cpu_seconds, children)),
        seconds,
        steps,
    )


def cpu_seconds(pid: int | str) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def each_rate(address: str, pid: int, asked: argparse.Namespace) -> dict[str, Any]:
    """The same as one sweep, in a client of its own for each rate; prints what the cores did."""
    found: dict[str, Any] = {"tables": {"loads": []}, "notes": []}
    print("| offered | client | API process | engine | in steps | ms a step | steps a second |")
    print("|--:|--:|--:|--:|--:|--:|--:|")
    for rate in asked.rates.split(","):
        before = used(address, pid)
        one = curve(address, argparse.Namespace(**{**vars(asked), "rates": rate}))
        print(used(address, pid).row(before, rate), flush=True)
        found["tables"]["loads"] += one["tables"]["loads"]
        found["notes"] += one["notes"]
    return found


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
    parser.add_argument("--cores", action="store_true", help="what the cores did (Quire's servers)")
    asked = parser.parse_args()
    asked.traces = asked.traces.resolve()
    with tempfile.TemporaryDirectory() as place:
        model = write_checkpoint(Path(place) / "tiny", TINY)
        write_tokenizer(model, merges=True, size=TINY["vocab_size"])
        for engine in asked.engine:
            log = Path(place) / "server.log"
            with serving(engine, model, asked.port, asked.python, log) as (address, pid):
                show(engine, each_rate(address, pid, asked) if asked.cores else curve(address, asked))


if __name__ == "__main__":
    main()
