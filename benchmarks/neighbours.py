"""First tokens of a client without a grammar, while hostile schemas, regular expressions, grammars and tools arrive.

    python -m benchmarks.neighbours [MODEL] [--rounds 5] [--seconds 10] [--kinds slow,enum]

Starts a server. The client asks one short chat after the other and measures the time to the first token: alone, while
100 plain requests arrive, and while 100 hostile ones do, in turns. They arrive evenly spread; each hostile one is
another one, so none is known from before. A plain request has the prompt of a hostile one and asks for no structure:
between the two is what the structures cost. The tables have the percentiles of the three kinds of rounds and the
answers to the hostile requests.
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

OTHERS = 100  # requests in a round
ROUNDS = ("alone", "plain", "hostile")
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


def asked(kind: str, *, plain: bool) -> bytes:
    """A request of a kind, or a plain one with its prompt. Tools are a part of the prompt."""
    fields = KINDS[kind](next(_number))
    content = json.dumps(fields["tools"]) if plain and "tools" in fields else "hi"
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 1}
    return _request(body if plain else {**body, **fields})


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


async def round_of(
    port: int, seconds: float, requests: list[tuple[str, bytes]], answers: Answers
) -> list[float]:
    """First tokens for so long, and until all other requests have been answered."""
    sending = [
        asyncio.create_task(attack(port, request, i * seconds / OTHERS, answers, kind))
        for i, (kind, request) in enumerate(requests)
    ]
    found, end = [], time.perf_counter() + seconds
    while time.perf_counter() < end or not all(task.done() for task in sending):
        found.append(await first_token(port))
    await asyncio.gather(*sending)
    return found


async def measure(port: int, rounds: int, seconds: float, kinds: list[str]) -> None:
    found: dict[str, list[float]] = {name: [] for name in ROUNDS}
    answers: Answers = {}
    await round_of(port, 2.0, [], {})
    for name in ROUNDS * rounds:
        order = [kinds[i % len(kinds)] for i in range(OTHERS)] if name != "alone" else []
        requests = [(kind, asked(kind, plain=name == "plain")) for kind in order]
        start = time.perf_counter()
        times = await round_of(port, seconds, requests, answers if name == "hostile" else {})
        print(f"{name}: {len(times)} first tokens in {time.perf_counter() - start:.0f} s", file=sys.stderr)
        found[name] += times
    print("| first token | alone | beside 100 plain | beside 100 hostile | of alone | of plain |")
    print("|---|--:|--:|--:|--:|--:|")
    for name, share in (("p50", 50), ("p90", 90), ("p99", 99)):
        alone, plain, hostile = (statistics.quantiles(found[of], n=100)[share - 1] * 1e3 for of in ROUNDS)
        times_of = f"{hostile / alone:.2f} | {hostile / plain:.2f}"
        print(f"| {name} | {alone:.1f} ms | {plain:.1f} ms | {hostile:.1f} ms | {times_of} |")
    print("\n| hostile | status | answers | median | most |\n|---|--:|--:|--:|--:|")
    for (kind, status), waits in sorted(answers.items()):
        print(f"| {kind} | {status} | {len(waits)} | {statistics.median(waits):.2f} s | {max(waits):.2f} s |")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", default="quire-mini")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--kinds", default=",".join(KINDS))
    options = parser.parse_args()
    command = [sys.executable, "-m", "quire", "serve", options.model, "--port", "0"]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert server.stderr is not None
        for line in server.stderr:
            if started := re.search(r"serving .*:(\d+)$", line.rstrip()):
                kinds = options.kinds.split(",")
                asyncio.run(measure(int(started[1]), options.rounds, options.seconds, kinds))
                break
    finally:
        server.terminate()
        server.communicate()


if __name__ == "__main__":
    main()
