"""Quire's load client and guidellm against one server of known latencies: do they agree?

    PYTHONPATH=src:tests python benchmarks/bench_agreement.py --guidellm VENV/bin/guidellm --tokenizer FOLDER

The server (tests/helpers/fake_llm.py, in a process of its own) answers after a fixed time and then a token at fixed
gaps. Both clients send the same number of requests, one after another, then several at once. guidellm's TPOT has the
first token in it: (TTFT + (n - 1) · TPOT) / n of ours; its ITL is the mean gap of a request, which is our TPOT. Without
--guidellm only Quire's client runs. Prints one table of medians: the server's own figures, each client's, and how far
Quire's are off. A server that paces itself by timers is late by up to a millisecond at every token, so agreement
between the clients says more than agreement with the plan.
"""

from __future__ import annotations

import argparse
import json
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def start_server(port: int, ttft: float, itl: float) -> subprocess.Popen[bytes]:
    words = [sys.executable, "-m", "helpers.fake_llm", str(port), str(ttft), str(itl)]
    process = subprocess.Popen(words)
    for _ in range(400):
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return process
        except OSError:
            time.sleep(0.05)
    process.terminate()
    raise RuntimeError("the server did not start")


def quire(url: str, clients: int, requests: int, tokens: int, folder: Path) -> dict[str, float]:
    """Medians in milliseconds."""
    save = folder / "quire.json"
    words = ["serve", url, "--concurrency", str(clients), "--num-requests", str(requests), "--input-len", "32",
             "--output-len", str(tokens), "--quiet", "--save", str(save)]  # fmt: skip
    subprocess.run(
        [sys.executable, "-m", "quire.cli.main", "bench", *words], check=True, stdout=subprocess.DEVNULL
    )
    metrics = json.loads(save.read_text())["metrics"]
    figures = {name: metrics[f"{name}_p50"]["value"] for name in ("ttft", "itl", "tpot", "e2el")}
    return figures | {"rate": metrics["request_rate"]["value"]}


def guidellm(program: str, folder: Path, url: str, options: argparse.Namespace, clients: int) -> Any:
    """Medians in milliseconds, from guidellm's report."""
    save = folder / "guidellm.json"
    arguments = {
        "backend": f"kind=openai_http,target={url},model=fake-model,request_format=/v1/chat/completions",
        "tokenizer": f"kind=huggingface_auto,model={options.tokenizer}",
        "data": f"kind=synthetic_text,prompt_tokens=32,output_tokens={options.tokens}",
        "profile": f"kind=concurrent,streams={clients}",
        "constraint": f"kind=max_requests,count={options.requests}",
        "output": f"kind=json,path={save}",
    }
    words = [word for name, value in arguments.items() for word in (f"--{name}", value)]
    subprocess.run([program, "run", "--disable-progress", *words], check=True, stdout=subprocess.DEVNULL)
    (run,) = json.loads(save.read_text())["benchmarks"]
    metrics = run["metrics"]

    def median(name: str) -> float:
        return float(metrics[name]["successful"]["median"])

    return {
        "ttft": median("time_to_first_token_ms"),
        "itl": median("inter_token_latency_ms"),
        "tpot": median("time_per_output_token_ms"),
        "e2el": median("request_latency") * 1e3,
        "rate": float(metrics["requests_per_second"]["successful"]["mean"]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--guidellm", help="its program, in a virtual environment of its own")
    parser.add_argument("--tokenizer", default="", help="tokenizer folder for guidellm")
    parser.add_argument("--ttft-ms", type=float, default=100.0)
    parser.add_argument("--itl-ms", type=float, default=20.0)
    parser.add_argument("--tokens", type=int, default=40)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--clients", default="1,8", help="concurrencies")
    asked = parser.parse_args()
    n = asked.tokens
    e2el = asked.ttft_ms + (n - 1) * asked.itl_ms
    port = free_port()
    server = start_server(port, asked.ttft_ms / 1e3, asked.itl_ms / 1e3)
    try:
        print("| clients | figure | planned | quire | off | guidellm | quire to guidellm |")
        print("|---|---|---|---|---|---|---|", flush=True)
        for clients in map(int, asked.clients.split(",")):
            truth = {
                "ttft": asked.ttft_ms, "itl": asked.itl_ms, "tpot": asked.itl_ms, "e2el": e2el,
                "rate": clients * 1e3 / e2el,
            }  # fmt: skip
            with tempfile.TemporaryDirectory() as name:
                folder, url = Path(name), f"http://127.0.0.1:{port}"
                ours = quire(url, clients, asked.requests, n, folder)
                theirs = guidellm(asked.guidellm, folder, url, asked, clients) if asked.guidellm else None
            for figure, planned in truth.items():
                off = 100 * (ours[figure] / planned - 1)
                line = f"| {clients} | {figure} | {planned:.2f} | {ours[figure]:.2f} | {off:+.2f} % |"
                if theirs is not None:
                    # The same definition on both sides: see the top of this file.
                    same = ours["tpot"] if figure == "itl" else ours[figure]
                    if figure == "tpot":
                        same = (ours["ttft"] + (n - 1) * ours["tpot"]) / n
                    line += f" {theirs[figure]:.2f} | {100 * (same / theirs[figure] - 1):+.2f} % |"
                print(line, flush=True)
    finally:
        server.terminate()
        server.wait()


if __name__ == "__main__":
    main()
