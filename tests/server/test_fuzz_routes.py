"""A hundred thousand requests over all routes, made from the OpenAPI document and then spoilt. `make test-fuzz`."""

from __future__ import annotations

import contextlib
import http.client
import json
import random
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers.process import Process, children, descriptors, resident, running, until
from helpers.server import GUARD

REQUESTS, CLIENTS = 100_000, 4
GROWTH = 64 * 2**20  # bytes that the server's process may grow by: its stores of answers and files, buffers
JUNK: tuple[Any, ...] = (
    None, True, -1, 0, 2**31, 2**63, 2**64, -(2**63), 1e308, 0.1, "", "a", "\x00", "é" * 300, "\ud83d", "💥" * 40, [],
    {}, [[]], [None], {"": None}, {"$ref": "#"}, [0] * 300, "a" * 5000, {"type": "object"}, {"type": "function"},
)  # fmt: skip
# Routes for administrators; /sleep is left out, as it takes the model from the neighbours, and PATCH is only tried.
ADMIN = ("/admin/", "/flush_cache", "/get_server_info", "/is_sleeping", "/reset_prefix_cache", "/server_info", "/slots",
         "/start_profile", "/stop_profile", "/v1/load_lora", "/v1/unload_lora", "/wake_up")  # fmt: skip
LEFT_OUT = ("/sleep",)
LIVE: dict[str, tuple[Any, ...]] = {  # what can be changed, which the document does not name
    "max_num_seqs": (1, 2), "max_num_batched_tokens": (1, 64), "scheduling_policy": ("fcfs", "fair+edf"),
    "max_num_queued_reqs": (1, 8), "slo": ([], ["chat:ttft=500ms"]), "cache_shares": ({},), "log_level": ("info",),
}  # fmt: skip
WORDS = (
    "a",
    "Hello",
    "user",
    "system",
    "assistant",
    "tiny",
    "Once upon a time",
    "{{ x }}",
    "<|im_end|>",
    "text",
)
SHORT = (
    "tokens",
    "predict",
    "n",
    "best_of",
    "best",
    "num",
    "count",
    "width",
    "limit",
    "top",
)  # sizes of answers


class Making:
    """Bodies of the document's schemas."""

    def __init__(self, document: Any, draw: random.Random) -> None:
        self.schemas, self.draw = document["components"]["schemas"], draw

    def value(self, schema: Any, name: str = "", depth: int = 0) -> Any:
        """A value of a schema, or of nearly that."""
        draw, schema = self.draw, {} if isinstance(schema, bool) else schema
        if "$ref" in schema:
            schema = self.schemas[schema["$ref"].rpartition("/")[2]]
        if depth > 6 or draw.random() < 0.02:
            return draw.choice(JUNK)
        if "anyOf" in schema:
            return self.value(draw.choice(schema["anyOf"]), name, depth + 1)
        kinds = {"object": self.fields, "array": self.items, "integer": self.number, "number": self.number}
        kind = schema.get("type", "any")
        kind = draw.choice(kind) if isinstance(kind, list) else kind
        if kind in kinds:
            return kinds[kind](schema, name, depth)
        values: dict[str, Any] = {
            "string": WORDS,
            "boolean": (False, True),
            "any": (None, "a", 1, [], {"a": "b"}),
        }
        return draw.choice(schema.get("enum") or values.get(kind, JUNK))

    def items(self, schema: Any, name: str, depth: int) -> list[Any]:
        """Up to five items."""
        count = self.draw.choice((0, 1, 1, 2, 5))
        return [self.value(schema.get("items", {}), name, depth + 1) for _ in range(count)]

    def number(self, schema: Any, name: str, depth: int) -> float:
        """A number, a small one for what makes answers long."""
        draw = self.draw
        short = any(part in name for part in SHORT)
        number = draw.choice((0, 1, 2, 3, 7)) if short else draw.randint(-3, 300)
        return (
            number
            if draw.random() < 0.7 or schema["type"] == "integer"
            else number / draw.choice((1, 2, 3, 300))
        )

    def fields(self, schema: Any, name: str, depth: int) -> dict[str, Any]:
        """What must be there, and a few of the rest."""
        draw, known, wanted = self.draw, schema.get("properties", {}), set(schema.get("required", ()))
        rest = [name for name in known if name not in wanted]
        chosen = [*wanted, *draw.sample(rest, min(len(rest), draw.choice((0, 1, 1, 2, 3, 6))))]
        made = {key: self.value(known[key], key, depth + 1) for key in chosen if draw.random() > 0.01}
        more = schema.get("additionalProperties")
        if isinstance(more, dict) and draw.random() < 0.5:
            made[draw.choice(WORDS)] = self.value(more, "", depth + 1)
        if draw.random() < 0.03:
            made[draw.choice(("unknown", "__proto__", "id", ""))] = draw.choice(JUNK)
        return made

    def body(self, schema: Any) -> bytes:
        """A body; now and then cut, or of other bytes."""
        made = self.fields(self.schemas[schema["$ref"].rpartition("/")[2]], "", 0) if "$ref" in schema else {}
        for name in ("max_tokens", "max_completion_tokens", "max_output_tokens", "n_predict"):
            if name in made or (name == "max_tokens" and self.draw.random() < 0.5):
                made[name] = self.draw.choice((1, 2, 3, 3, 8, made.get(name, 0)))
        data = json.dumps(made).encode()
        spoilt = self.draw.random()
        if spoilt < 0.02:
            return data[: self.draw.randint(0, len(data))]
        return self.draw.randbytes(20) if spoilt < 0.03 else data


def operations(document: Any) -> list[tuple[str, str, Any]]:
    """Method, path and the schema of the body, if it is JSON."""
    found = []
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            if method != "parameters" and path not in LEFT_OUT:
                content = operation.get("requestBody", {}).get("content", {})
                found.append((method.upper(), path, content.get("application/json", {}).get("schema")))
    return found


def sent(server: Process, document: Any, seed: int, requests: int) -> Iterator[tuple[str, int, bytes]]:
    """Path, status and answer of each request on connections that are kept, some of which are left half way."""
    draw = random.Random(seed)
    making, paths = Making(document, draw), operations(document)
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=GUARD)
    for _ in range(requests):
        method, path, schema = draw.choice(paths)
        made = making.body(schema) if schema else None
        where = path.replace("{", "").replace("}", "") + draw.choice(
            ("",) * 20 + ("?a=b", "?limit=-1&order=x", "/")
        )
        if method == "PATCH":
            where = f"{path}?dry_run=true"
            names = draw.sample(sorted(LIVE), draw.choice((0, 1, 1, 2)))
            changes = {name: draw.choice((*LIVE[name], draw.choice(JUNK))) for name in names}
            made = json.dumps(changes).encode()
        key = "a" if path.startswith(ADMIN) and draw.random() < 0.95 else "k"
        headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
        try:
            connection.request(method, where, made, headers)
            if draw.random() < 0.01:
                connection.close()
                continue
            response = connection.getresponse()
            yield f"{method} {path}", response.status, response.read()
        except (http.client.HTTPException, OSError):
            connection.close()
            assert server.process.poll() is None, "the server has ended"
    connection.close()


@pytest.mark.fuzz
def test_no_request_of_any_route_disturbs_others(folder: Path, tmp_path: Path) -> None:
    window = "256"  # of tokens: other servers end no answer by themselves
    options = ("--api-key", "k", "--files-dir", str(tmp_path / "files"), "--max-model-len", window,
               "--admin-api-key", "a", "--profile-dir", str(tmp_path / "profiles"))  # fmt: skip
    with running(folder, *options, files=400) as server:
        key = {"authorization": "Bearer k"}
        body = {"prompt": "Once", "max_tokens": 20, "seed": 3, "temperature": 1.0, "ignore_eos": True}
        expected = server.request("POST", "/v1/completions", body, key).json["choices"]
        document = server.request("GET", "/openapi.json", headers=key).json
        for _ in sent(server, document, 0, 500):
            pass
        engine, held, memory = server.engine, descriptors(server.process.pid), resident(server.process.pid)
        statuses: Counter[tuple[str, int]] = Counter()
        wrong: list[tuple[str, int, bytes]] = []

        def attack(seed: int) -> None:
            for where, status, answer in sent(server, document, seed, REQUESTS // CLIENTS):
                statuses[where, status] += 1
                if status >= 500 and status not in {503, 504}:
                    wrong.append((where, status, answer))

        log: list[str] = []
        assert server.process.stderr is not None
        threading.Thread(target=lambda: log.extend(server.process.stderr or ()), daemon=True).start()
        attackers = [threading.Thread(target=attack, args=(seed,)) for seed in range(1, 1 + CLIENTS)]
        for thread in attackers:
            thread.start()
        while any(thread.is_alive() for thread in attackers):
            assert server.request("POST", "/v1/completions", body, key).json["choices"] == expected
            attackers[0].join(1.0)
        assert not wrong, "\n".join([*map(str, wrong[:9]), *map(str, log[-300:])])
        assert engine in children(server.process.pid)
        assert sum(statuses.values()) > 0.95 * REQUESTS
        answered = {path for path, status in statuses if status < 300}
        assert answered >= {"POST /v1/completions", "GET /health", "PATCH /admin/config", "GET /slots"}
        assert answered >= {"GET /v1/requests", "GET /v1/cache/misses", "GET /learn/api/sims"}
        until(lambda: descriptors(server.process.pid) <= held + 2)
        assert resident(server.process.pid) < memory + GROWTH
        with contextlib.suppress(OSError):
            server.process.terminate()
        assert server.process.wait(GUARD) == 0
        expected_error = "this server has no file of tenants"  # an administrator asks to read it again
        errors = [line for line in log if "Traceback" in line or " error " in line]
        assert not [line for line in errors if expected_error not in line], log[-20:]
