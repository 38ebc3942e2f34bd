"""Memory that one model does not use keeps cached blocks of another, and comes back when it is claimed."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers.process import Process, children, gone, resident, running, until

ADMIN = {"authorization": "Bearer for-administrators"}
MEMORY = ["--memory", "1500MiB", "--admin-api-key", "for-administrators"]
BLOCKS = 64  # of the pool of each model: 1,024 tokens


@pytest.fixture(scope="module")
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    """Two models whose own caches are small; most of their shares is nobody's."""
    file = tmp_path_factory.mktemp("models") / "models.toml"
    section = f'path = "{folder}"\nmemory = "600MiB"\nnum-kv-blocks = {BLOCKS}\nmax-model-len = 512\n'
    file.write_text(f"[a]\n{section}\n[b]\n{section}")
    with running(None, *MEMORY, "--models", str(file), "--max-num-seqs", "4") as process:
        yield process


def status(server: Process, model: str) -> int:
    return server.request("POST", "/v1/completions", {"model": model, "prompt": [1], "max_tokens": 1}).status


def ask(server: Process, model: str, number: int) -> Any:
    """The answer to one of many prompts of 400 tokens, all different, and how many of them were cached."""
    prompt = [(7 * number + at * (number + 3)) % 110 + 10 for at in range(400)]
    body = {"model": model, "prompt": prompt, "max_tokens": 4, "temperature": 0, "logprobs": 1, "seed": 1}
    reply = server.request("POST", "/v1/completions", body)
    assert reply.status == 200, reply.text
    usage = reply.json["usage"].get("prompt_tokens_details") or {}
    return reply.json["choices"], usage.get("cached_tokens", 0)


def models(server: Process) -> dict[str, Any]:
    return {each["id"]: each for each in server.request("GET", "/v1/models").json["data"]}


def metric(server: Process, name: str, model: str) -> float:
    lines = server.request("GET", "/metrics").text.splitlines()
    found = [line for line in lines if line.startswith(f"{name}{{") and f'model_name="{model}"' in line]
    return float(found[0].rpartition(" ")[2])


def memory(server: Process) -> Any:
    found = server.request("GET", "/debug/memory").json
    assert found["at_most"] <= found["bound"]
    resident = sum(each["resident"] for each in found["models"].values())
    assert resident <= found["bound"]
    return found


def test_unused_memory_is_lent_and_comes_back(server: Process) -> None:
    first = [ask(server, "a", number)[0] for number in range(12)]  # several times what its own blocks hold
    until(lambda: models(server)["a"]["borrowed"] > 0)
    memory(server)
    for number in range(12):
        ask(server, "a", number)
    again = [ask(server, "a", number) for number in range(12)]
    assert [answer for answer, _ in again] == first
    assert sum(cached for _, cached in again) > 12 * 200
    assert metric(server, "quire_swapped_in_blocks_total", "a") > 0
    assert metric(server, "quire_borrowed_bytes", "a") == models(server)["a"]["borrowed"]
    assert models(server)["b"]["lent"] > 0
    lent = server.request("GET", "/admin/models", headers=ADMIN).json["versions"]["b@1"]["lent"]
    assert lent > 0
    # the other one loads: its share is its own again
    assert ask(server, "b", 0)[0][0]["text"] == first[0][0]["text"]
    memory(server)
    assert [ask(server, "a", number)[0] for number in range(12)] == first
    # a sleeping model has nothing of others
    assert server.request("POST", "/sleep?level=1&model=a", headers=ADMIN).status == 200
    until(lambda: models(server)["a"]["borrowed"] == 0)
    assert server.request("POST", "/wake_up?model=a", headers=ADMIN).status == 200
    assert ask(server, "a", 3)[0] == first[3]


@pytest.mark.parametrize("killed", ["a", "b"])
def test_the_death_of_a_borrower_or_a_lender_gives_the_memory_back(server: Process, killed: str) -> None:
    expected = [ask(server, "b", number)[0] for number in range(2)]
    for number in range(12):
        ask(server, "a", number)
    until(lambda: models(server)["a"]["borrowed"] > 0)
    pid = memory(server)["models"][f"{killed}@1"]["pid"]
    os.kill(pid, signal.SIGKILL)
    if killed == "a":
        until(lambda: models(server)["a"]["borrowed"] == 0)
    until(lambda: gone(pid) and status(server, killed) == 200)
    memory(server)
    assert [ask(server, "b", number)[0] for number in range(2)] == expected
    for number in range(12):
        ask(server, "a", number)
    until(lambda: models(server)["a"]["borrowed"] > 0)
    memory(server)


@pytest.mark.memory
def test_the_sum_of_all_processes_stays_under_the_bound(folder: Path, tmp_path: Path) -> None:
    """Three models that are loaded, lend, borrow, sleep, are killed and get new versions while requests come."""
    file = tmp_path / "models.toml"
    section = f'path = "{folder}"\nmemory = "360MiB"\nmax-model-len = 512\n'
    file.write_text(f"[a]\n{section}num-kv-blocks = 64\n[b]\n{section}num-kv-blocks = 64\n[c]\n{section}")
    bound, most, ended = 1500 * 2**20, [0], threading.Event()

    def watch(pid: int) -> None:
        while not ended.wait(0.01):
            with contextlib.suppress(OSError, IndexError):  # one has just ended
                most[0] = max(most[0], sum(map(resident, [pid, *children(pid, "*")])))

    with running(None, *MEMORY, "--models", str(file), "--max-num-seqs", "4") as server:
        watcher = threading.Thread(target=watch, args=(server.process.pid,))
        watcher.start()
        try:
            expected = {number: ask(server, "a", number)[0] for number in range(40)}
            for turn in range(6):
                for model in "abc"[: 1 + turn % 3]:
                    for number in range(40):
                        if model == "a" or turn < 3:
                            assert ask(server, model, number)[0] == expected[number] or model != "a"
                found = memory(server)
                if turn == 3:
                    os.kill(found["models"]["b@1"]["pid"], signal.SIGKILL)
                    until(lambda: status(server, "b") == 200)
                if turn == 4:
                    reply = server.request("POST", "/sleep?level=2&hold=false&model=c", headers=ADMIN)
                    assert reply.status == 200
                if turn == 5:  # beside the old one, then in place of the one that is drained for it
                    for size, swap in ((200, False), (500, True)):
                        asked = {"name": "b", "path": str(folder), "memory": size * 2**20, "swap": swap}
                        made = server.request("POST", "/admin/models", asked, ADMIN)
                        assert made.status == 200, made.text
                        assert ask(server, "b", 0)[0] == expected[0]
        finally:
            ended.set()
            watcher.join()
    assert 100 * 2**20 < most[0] <= bound
