"""First tokens of a client without a grammar, while hostile schemas, regular expressions, grammars and tools arrive.

    python -m benchmarks.neighbours [MODEL] [--rounds 5] [--seconds 10] [--kinds slow,enum]

Starts a server. The client asks one short chat after the other and measures the time to the first token. In every
second round 100 hostile requests arrive meanwhile, evenly spread; each is another one, so none is known from before.
The table has the percentiles of both kinds of rounds and the answers to the hostile requests.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

HOSTILE = 100
ANSWER = 8  # tokens
Answers = dict[
    tuple[str, str], list[float]
]  # seconds until hostile requests were answered, by kind and status
_number = iter(range(10**9))


def _doubling(i: int) -> str:
    return (
        f'root ::= "{i}(" root ")" | a0\n'
        + "".join(f"a{k} ::= a{k + 1} a{k + 1}\n" for k in range(60))
        + 'a60 ::= "a"?'
    )


def _wide(i: int, count: int) -> dict[str, Any]:
    return {"properties": {f"k{i}_{k}": {"type": "string"} for k in range(count)}}


def _nested(i: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"const": i}
    for k in range(20):
        schema = {"anyOf": [schema, {"type": "object", "properties": {f"p{i}_{k}": schema}}]}
        if len(json.dumps(schema)) > 400_000:
            break
    return schema


def _tools(i: int) -> list[dict[str, Any]]:
    return [
        {
            "type": "function",
            "function": {"name": f"f{i}_{k}", "parameters": {**_wide(i, 5), "type": "object"}},
        }
        for k in range(12)
    ]


# What takes time, memory or room, and what cannot be enforced at all. Each is made with a number of its own.
KINDS: dict[str, Callable[[int], dict[str, Any]]] = {
    "slow": lambda i: {"grammar": _doubling(i)},
    "large": lambda i: {"grammar": f'root ::= "{i}(" root ")" | ' + " ".join(["([ab]*|[bc]*)"] * 300)},
    "regex": lambda i: {"guided_regex": f"{i}" + "(a|a|aa|aaa)*" * 60 + "c"},
    "repeated": lambda i: {"guided_regex": f"(({i}a{{1,999}}){{1,999}}){{1,999}}"},
    "escape": lambda i: {"json_schema": {"type": "string", "pattern": f"{i}\\q"}},
    "depth": lambda i: {"json_schema": json.dumps({"const": i})[:-1] + ',"allOf":[' + '{"allOf":[' * 800},
    "recursion": lambda i: {"json_schema": {"title": str(i), "$ref": "#"}},
    "remote": lambda i: {"json_schema": {"$ref": f"http://127.0.0.1:9/{i}"}},
    "counts": lambda i: {"json_schema": {"type": "array", "minItems": 10**9 + i, "maxItems": 10**15}},
    "enum": lambda i: {"json_schema": {"enum": [f"value {i} {k}" for k in range(40_000)]}},
    "choice": lambda i: {"guided_choice": [f"{i} {k} number" for k in range(16_000)]},
    "wide": lambda i: {"json_schema": _wide(i, 3000)},
    "nested": lambda i: {"json_schema": _nested(i)},
    "tools": lambda i: {"tools": _tools(i), "tool_choice": "required"},
}


def hostile(kind: str) -> bytes:
    fields = KINDS[kind](next(_number))
    return _request({"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1, **fields})


def _request(body: dict[str, Any]) -> bytes:
    data = json.dumps(body).encode()
    head = "host: localhost\r\ncontent-type: application/json\r\nconnection: close\r\n"
    line = "POST /v1/chat/completions HTTP/1.1\r\n"
    return f"{line}{head}content-length: {len(data)}\r\n\r\n".encode() + data


async def first_token(port: int) -> float:
    """Seconds to the first token of an answer, which is read to its end."""
    content = f"{next(_number)}: what is the capital of France?"
    body = {
        "messages": [{"role": "user", "content": content}],
        "max_tokens": ANSWER,
        "stream": True,
        "ignore_eos": True,
    }
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    start = time.perf_counter()
    writer.write(_request({**body, "seed": 1}))
    await reader.readuntil(b'{"content":"')
    seconds = time.perf_counter() - start
    await reader.read(-1)
    writer.close()
    return seconds


async def attack(port: int, request: bytes, delay: float, answers: Answers, kind: str) -> None:
    await asyncio.sleep(delay)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    start = time.perf_counter()
    writer.write(request)
    status = (await reader.read(-1))[9:12].decode()
    answers.setdefault((kind, status), []).append(time.perf_counter() - start)
    writer.close()


async def round_of(port: int, seconds: float, kinds: list[str], answers: Answers) -> list[float]:
    """First tokens for so long, and until all hostile requests have been answered."""
    asked = [kinds[i % len(kinds)] for i in range(HOSTILE)] if kinds else []
    requests = [hostile(kind) for kind in asked]
    sending = [
        asyncio.create_task(attack(port, request, i * seconds / HOSTILE, answers, kind))
        for i, (kind, request) in enumerate(zip(asked, requests, strict=True))
    ]
    found, end = [], time.perf_counter() + seconds
    while time.perf_counter() < end or not all(task.done() for task in sending):
        found.append(await first_token(port))
    await asyncio.gather(*sending)
    return found


async def measure(port: int, rounds: int, seconds: float, kinds: list[str]) -> None:
    found: dict[bool, list[float]] = {False: [], True: []}
    answers: Answers = {}
    for number in range(2 * rounds + 1):
        attacked, start = number % 2 == 1, time.perf_counter()
        times = await round_of(port, seconds if number else 2.0, kinds if attacked else [], answers)
        print(f"{len(times)} first tokens in {time.perf_counter() - start:.0f} s", file=sys.stderr)
        if number:
            found[attacked] += times
    print("| first token | without | beside 100 hostile requests | ratio |\n|---|--:|--:|--:|")
    for name, share in (("p50", 50), ("p90", 90), ("p99", 99)):
        quiet, attacked_ms = (statistics.quantiles(found[on], n=100)[share - 1] * 1e3 for on in (False, True))
        print(f"| {name} | {quiet:.1f} ms | {attacked_ms:.1f} ms | {attacked_ms / quiet:.2f} |")
    print("\n| hostile | status | answers | median | most |\n|---|--:|--:|--:|--:|")
    for (kind, status), times in sorted(answers.items()):
        print(f"| {kind} | {status} | {len(times)} | {statistics.median(times):.2f} s | {max(times):.2f} s |")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", default="quire-mini")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--kinds", default=",".join(KINDS))
    asked = parser.parse_args()
    command = [sys.executable, "-m", "quire", "serve", asked.model, "--port", "0"]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert server.stderr is not None
        for line in server.stderr:
            if started := re.search(r"serving .*:(\d+)$", line.rstrip()):
                kinds = [kind for kind in asked.kinds.split(",") if kind]
                asyncio.run(measure(int(started[1]), asked.rounds, asked.seconds, kinds))
                break
    finally:
        server.terminate()
        server.communicate()


if __name__ == "__main__":
    main()
