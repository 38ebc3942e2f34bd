"""How much of prompts a router finds cached, by how it knows what servers have: `--prefix-source`, and round robin.

    python -m benchmarks.routing_sources [--sessions 24] [--turns 5] [--share 0.5] [--seeds 3]

Two servers of the default model whose caches together hold a `share` of all conversations at their ends. Conversations
go on in random order, two at a time, each turn with all that was said before. One server with room for all of them
gives the most that can be cached. A run is a seed: its order and texts are the same for every kind of router.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import random
import re
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from threading import Lock
from typing import Any

from benchmarks.quire_process import quire_port

KEY = "the-key-of-an-administrator"
EVENTS = json.dumps({"enable_kv_cache_events": True, "publisher": "null"})
KINDS = {
    "round robin": ["--policy", "round-robin"],
    "predicted": ["--prefix-source", "predicted"],
    "reported": ["--prefix-source", "reported"],
    "hybrid": ["--prefix-source", "hybrid"],
}


def post(port: int, path: str, body: Any, key: str = "") -> bytes:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    with contextlib.closing(connection):
        headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {key}"} if key else {})
        connection.request(
            "POST" if body is not None else "GET", path, json.dumps(body) if body else None, headers
        )
        answer = connection.getresponse()
        data = answer.read()
        assert answer.status == 200, (answer.status, data)
        return data


def talk(port: int, seed: int, sessions: int, turns: int) -> tuple[int, int]:
    """Tokens of all prompts, and how many were cached."""
    rng, lock, sums = random.Random(seed), Lock(), [0, 0]
    ends = ("ing", "ed", "er", "s", "ly")
    words = [a + b for a in ("stone", "river", "cloud", "lamp", "paper", "green", "seven") for b in ends]
    texts = [[" ".join(rng.choices(words, k=80)) for _ in range(turns)] for _ in range(sessions)]
    order = [session for session in range(sessions) for _ in range(turns)]
    rng.shuffle(order)
    said: list[list[dict[str, str]]] = [[] for _ in range(sessions)]
    busy = [Lock() for _ in range(sessions)]

    def turn(session: int) -> None:
        with busy[session]:
            messages = said[session]
            messages.append({"role": "user", "content": texts[session][len(messages) // 2]})
            body = {"messages": messages, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
            answer = json.loads(post(port, "/v1/chat/completions", body))
            messages.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})
        with lock:
            sums[0] += answer["usage"]["prompt_tokens"]
            sums[1] += answer["usage"]["prompt_tokens_details"]["cached_tokens"]

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(turn, order))
    return sums[0], sums[1]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sessions", type=int, default=24)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--share", type=float, default=0.5)
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    threads = [
        "--threads",
        str(max(1, (os.cpu_count() or 2) // 2)),
        "--max-model-len",
        "2048",
        "--memory",
        "700MiB",
    ]
    common = ["serve", *threads, "--port", "0", "--admin-api-key", KEY, "--kv-events-config", EVENTS]
    best = []
    longest = 0
    with quire_port(*common, "--num-kv-blocks", "4000") as port:
        for seed in range(args.seeds):
            tokens, cached = talk(port, seed, args.sessions, args.turns)
            best.append(cached / tokens)
            longest = max(longest, 2 * tokens // (args.sessions * (args.turns + 1)))
            post(port, "/reset_prefix_cache", {}, KEY)
    blocks = max(140, int(args.share * args.sessions * longest / 16 / 2))
    print(f"{args.sessions} conversations of {longest} tokens at their ends; {blocks} blocks a server")
    print(f"the most: {[round(value, 3) for value in best]}")
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        (Path(folder) / "key").write_text(KEY)
        ports = [stack.enter_context(quire_port(*common, "--num-kv-blocks", str(blocks))) for _ in range(2)]
        urls = [f"http://127.0.0.1:{port}" for port in ports]
        for kind, options in KINDS.items():
            found, sure, took = [], [], []
            for seed in range(args.seeds):
                for port in ports:
                    post(port, "/reset_prefix_cache", {}, KEY)
                command = [
                    "router",
                    "--port",
                    "0",
                    "--backend",
                    *urls,
                    "--backend-admin-key-file",
                    f"{folder}/key",
                    *options,
                ]
                with quire_port(*command) as port:
                    began = time.perf_counter()
                    tokens, cached = talk(port, seed, args.sessions, args.turns)
                    took.append(time.perf_counter() - began)
                    page = post(port, "/metrics", None).decode()
                found.append(cached / tokens / best[seed])
                sure.append(
                    float(re.findall(r"^quire_router_routing_confidence (\S+)", page, re.MULTILINE)[0])
                )
            print(
                f"{kind}: {median(found):.3f} of the most ({min(found):.3f} to {max(found):.3f}), "
                f"confidence {median(sure):.2f}, {median(took):.1f} s ({min(took):.1f} to {max(took):.1f})",
                flush=True,
            )


if __name__ == "__main__":
    main()
