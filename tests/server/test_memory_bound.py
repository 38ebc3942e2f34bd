"""A server at its memory bound, under mixes made to break it: in a control group of that size where one can be made.

The small mix runs in the suite, the heavy one in `make test-memory`.
"""

from __future__ import annotations

import contextlib
import random
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers.cgroup import MemoryGroup, limited
from helpers.low_rank import random_adapter, write_adapter
from helpers.process import Process, children, gone, resident
from helpers.server import GUARD, read_all, request_bytes
from quire.config.shipped import DEFAULT_MODEL, shipped_models
from quire.server.request_memory import BODY_BYTE
from quire.spec import read_model

MIB = 2**20
ANSWERS = {200, 400, 413, 429, 503, 504}
Ask = tuple[str, dict[str, Any] | bytes]


class Bound:
    """A server in a group of its bound, and the most that its processes held together."""

    def __init__(self, process: Process) -> None:
        self.process, self.peak, self.seen = process, 0, Counter[int]()
        self._ended = threading.Event()
        self._watch = threading.Thread(target=self._look)
        self._watch.start()

    def _look(self) -> None:
        while not self._ended.wait(0.05):
            with contextlib.suppress(OSError, ValueError):
                pid = self.process.process.pid
                self.peak = max(self.peak, sum(map(resident, [pid, *children(pid, "*")])))

    def close(self) -> None:
        self._ended.set()
        self._watch.join()

    def memory(self) -> dict[str, Any]:
        found: dict[str, Any] = self.process.request("GET", "/debug/memory").json
        return found

    def send(self, path: str, body: dict[str, Any] | bytes, version: str = "1.1") -> socket.socket:
        sock = socket.create_connection(("127.0.0.1", self.process.port), timeout=GUARD)
        with contextlib.suppress(OSError):  # refused before it was whole
            sock.sendall(request_bytes(path, body, headers="connection: close\r\n", version=version))
        return sock

    def ask(self, path: str, body: dict[str, Any] | bytes) -> None:
        with contextlib.closing(self.send(path, body)) as sock:
            self.seen[int(read_all(sock)[9:12])] += 1


@contextlib.contextmanager
def bounded(folder: Path | None, bound: int, *options: str) -> Iterator[Bound]:
    """A server whose bound is enforced by the kernel, or, where that is not allowed, watched."""
    with limited(MemoryGroup, bound) as group:
        process = Process(
            folder,
            "--port",
            "0",
            "--memory",
            str(bound),
            "--reader-timeout",
            "3",
            *options,
            before=group and group.join,
        )
        state = Bound(process)
        try:
            yield state
            engine = process.engine
            assert not gone(engine)
            assert process.ready()
            state.close()
            print(f"peak {state.peak / MIB:.1f} MiB of {bound / MIB:.0f}", dict(state.seen))
            assert state.peak <= bound
            assert set(state.seen) <= ANSWERS, state.seen
            assert state.seen[200]
            if group is not None:
                print(f"charged to the group at most {group.peak / MIB:.1f} MiB")
                assert group.kills == 0
        finally:
            state.close()
            process.process.kill()
            process.process.communicate()
            while not all(gone(pid) for pid in {process.process.pid}):
                time.sleep(0.01)
            time.sleep(0.2)  # its engine goes with it


def ids(count: int, chance: random.Random) -> list[int]:
    return chance.choices(range(300, 4000), k=count)


class Mix:
    """Clients that all the time ask for what makes a server hold much, each as much of the answers' memory as chance
    gives it, and read it, or slowly, or not at all, or leave.
    """

    def __init__(self, server: Bound, window: int, seed: int) -> None:
        self.server, self.window = server, window
        self.limits = {name: pool["limit"] for name, pool in self.pools().items()}
        self._ended = threading.Event()
        self._clients = [
            threading.Thread(target=self._run, args=(random.Random(f"{seed} {i}"),)) for i in range(24)
        ]
        self._failed: list[BaseException] = []

    def pools(self) -> dict[str, dict[str, int]]:
        pools: dict[str, dict[str, int]] = self.server.memory()["requests"]
        return pools

    def press(self, seconds: float) -> None:
        """Ask, for so long."""
        for client in self._clients:
            client.start()
        self._ended.wait(seconds)
        self._ended.set()
        for client in self._clients:
            client.join(GUARD)
        assert not self._failed, self._failed

    def _run(self, chance: random.Random) -> None:
        try:
            while not self._ended.is_set():
                with contextlib.suppress(ConnectionError):  # refused while it was still being sent
                    if chance.random() < 0.1:
                        self._headers()
                    else:
                        self._one(chance)
        except BaseException as error:
            self._failed.append(error)
            self._ended.set()

    def _one(self, chance: random.Random) -> None:
        kinds = self.logprobs, self.prompt_logprobs, self.stream, self.many, self.large, self.structured
        path, body = chance.choice(kinds)(chance)
        version = chance.choice(("1.1", "1.1", "1.0"))
        reading = chance.choice(("all", "all", "slowly", "never", "leave"))
        with contextlib.closing(self.server.send(path, body, version=version)) as sock:
            sock.settimeout(0.2)
            answer, left = b"", time.monotonic() + chance.uniform(0.0, 6.0)
            while reading == "all" or time.monotonic() < left:
                if self._ended.is_set():
                    return
                if reading == "never":
                    time.sleep(0.1)
                    continue
                try:
                    part = sock.recv(4096 if reading == "slowly" else 2**18)
                except TimeoutError:
                    continue
                if not part:
                    break
                answer = answer or part
                if reading == "slowly":
                    time.sleep(0.02)
            if answer:
                self.server.seen[int(answer[9:12])] += 1

    def _headers(self) -> None:
        """Many connections in the middle of their headers."""
        with contextlib.ExitStack() as stack:
            for _ in range(40):
                address = ("127.0.0.1", self.server.process.port)
                sock = stack.enter_context(socket.create_connection(address, timeout=GUARD))
                sock.sendall(b"GET / HTTP/1.1\r\na: " + b"x" * 60_000)
            self._ended.wait(1.0)

    # ---- requests

    def logprobs(self, chance: random.Random) -> Ask:
        """Samples with as many logprobs as there are."""
        tokens = self._share(chance) // (66 * 14 + 180)
        n = chance.choice((1, 4, 8))
        longest = max(1, min(tokens // n, self.window - 16))
        return completions(prompt=ids(9, chance), n=n, logprobs=64, max_tokens=longest)

    def prompt_logprobs(self, chance: random.Random) -> Ask:
        """Prompts with as many logprobs as there are; now and then echoed."""
        tokens = self._share(chance) // (66 * 14 + 50)
        length = chance.choice((100, self.window - 4))
        prompts = [ids(length, chance) for _ in range(max(1, min(tokens // (length + 20), 256)))]
        if chance.random() < 0.3:
            return completions(prompt=prompts, echo=True, logprobs=64, max_tokens=1)
        return completions(prompt=prompts, prompt_logprobs=64, max_tokens=1)

    def stream(self, chance: random.Random) -> Ask:
        return completions(
            prompt=ids(9, chance), stream=True, logprobs=chance.choice((None, 64)), n=chance.choice((1, 8)),
            max_tokens=self.window // chance.choice((2, 4, 16)),
        )  # fmt: skip

    def many(self, chance: random.Random) -> Ask:
        """Many small ones in one request, and prompts that no block is known of."""
        if chance.random() < 0.5:
            return completions(prompt="x", n=128, max_tokens=4)
        return completions(prompt=[ids(self.window - 4, chance) for _ in range(3)], max_tokens=2)

    def large(self, chance: random.Random) -> Ask:
        """Bodies of the size that there is room for."""
        size = int(self.limits["bodies"] // BODY_BYTE * chance.choice((0.1, 0.5, 0.9, 1.1)))
        asks: list[Ask] = [
            ("/v1/completions", {"prompt": "a, " * (size // 3), "max_tokens": 1}),
            ("/v1/completions", {"prompt": [[999] * 200] * (size // 1000), "max_tokens": 1}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "é🦊" * (size // 18)}]}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}] * (size // 36)}),
            ("/v1/chat/completions", b'{"messages":[' + b"[]," * (size // 3) + b"[]]}"),
            ("/tokenize", {"prompt": "tokens " * (size // 7)}),
            ("/v1/completions", {"prompt": "x", "max_tokens": 2, "allowed_token_ids": list(range(4000))}),
        ]
        return chance.choice(asks)

    def structured(self, chance: random.Random) -> Ask:
        """Grammars that are large, deep or never compiled in time."""
        forms: list[dict[str, Any]] = [
            {"guided_choice": [f"{chance.random()} number {i}" for i in range(4000)]},
            {
                "guided_json": {
                    "properties": {f"k{chance.random()}": {"enum": [*range(500)]} for _ in range(40)}
                }
            },
            {"guided_regex": f"{chance.random()}" + "(a|a|aa)*" * 60 + "b"},
            {
                "guided_grammar": 'root ::= "(" root ")" | '
                + " ".join(["([ab]*|[bc]*)"] * chance.randrange(100, 400))
            },
        ]
        return completions(prompt=ids(9, chance), max_tokens=30, **chance.choice(forms))

    def _share(self, chance: random.Random) -> int:
        """Bytes of answers."""
        return int(self.limits["answers"] * chance.choice((0.05, 0.1, 0.3)))


def completions(**fields: Any) -> Ask:
    return "/v1/completions", {"temperature": 2.0, "ignore_eos": True} | fields


def attack(server: Bound, window: int) -> None:
    """As much of the answers' memory as one request may have, in prompts' logprobs: all of it is used."""
    answers = Mix(server, window, 0).limits["answers"]
    tokens = int(0.9 * answers) // (66 * 14 + 50 + 10)
    prompts = [ids(window - 2, random.Random(i)) for i in range(tokens // window)]
    server.ask(*completions(prompt=prompts, prompt_logprobs=64, max_tokens=1))


def fill(server: Bound, window: int) -> None:
    """Ask until all of the cache is in memory: half by its use, and the rest ahead of it."""
    chance = random.Random(2)
    while (found := server.memory())["processes"]["engine"]["kv"] < found["planned"]["kv"]:
        server.ask(*completions(prompt=[ids(window - 2, chance) for _ in range(4)], max_tokens=1))
        time.sleep(0.2)


def hold(server: Bound, window: int, seconds: float) -> None:
    """Everything at once, together with idle connections."""
    idle = [socket.create_connection(("127.0.0.1", server.process.port)) for _ in range(200)]
    attack(server, window)
    fill(server, window)
    mix = Mix(server, window, 1)
    mix.press(seconds)
    for sock in idle:
        sock.close()
    pools = mix.pools()
    print({name: f"{pool['peak'] / MIB:.1f} of {pool['limit'] / MIB:.1f}" for name, pool in pools.items()})
    assert pools["answers"]["peak"] > 0.8 * pools["answers"]["limit"]


@pytest.fixture(scope="module")
def model() -> Path:
    return shipped_models()[DEFAULT_MODEL]


def test_a_small_mix_stays_under_the_bound(model: Path) -> None:
    options = ("--max-model-len", "512", "--request-memory", "12MiB", "--max-connections", "500")
    with bounded(model, 172 * MIB, *options) as server:  # some 165 are needed, more or less by the process
        hold(server, 512, 5.0)


@pytest.mark.memory
@pytest.mark.parametrize(("bound", "requests"), [(400, None), (400, "120MiB"), (2048, None)])
def test_a_heavy_mix_stays_under_the_bound(model: Path, bound: int, requests: str | None) -> None:
    options = () if requests is None else ("--request-memory", requests)
    wide = ("--kv-cache-dtype", "float32")  # sooner full
    with bounded(model, bound * MIB, "--max-model-len", "2048", *wide, *options) as server:
        hold(server, 2048, 60.0)


@pytest.mark.memory
def test_versions_that_are_swapped_under_load_stay_at_the_bound(tmp_path: Path) -> None:
    """Two versions at a time, whose caches are full, and the processes that start and end."""
    model, share, swaps = shipped_models()[DEFAULT_MODEL], 160 * MIB, 8
    file = tmp_path / "models.toml"
    file.write_text(f'[chat]\npath = "{model}"\nmemory = {share}\nmax-model-len = 2048\n')
    admin = {"authorization": "Bearer for-administrators"}
    options = ["--models", str(file), "--admin-api-key", "for-administrators", "--max-connections", "256"]
    done = threading.Event()
    with bounded(None, 480 * MIB, *options) as server:

        def load(seed: int) -> None:
            chance = random.Random(seed)
            while not done.is_set():
                server.ask(
                    "/v1/completions", {"prompt": ids(1900, chance), "max_tokens": 30, "ignore_eos": True}
                )

        clients = [threading.Thread(target=load, args=(seed,)) for seed in range(6)]
        for client in clients:
            client.start()
        try:
            for _ in range(swaps):
                time.sleep(4.0)  # the cache of the version that answers fills
                made = server.process.request(
                    "POST", "/admin/models", {"name": "chat", "path": str(model)}, admin
                )
                assert made.status == 200, made.text
        finally:
            done.set()
            for client in clients:
                client.join()
        assert made.json["version"] == swaps + 1
        assert server.peak > 1.5 * share  # it is more than what one version may hold


@pytest.mark.memory
@pytest.mark.parametrize("kept", [0, 2])
def test_adapters_of_all_sizes_that_come_and_go_stay_at_the_bound(tmp_path: Path, kept: int) -> None:
    """Loads, reloads and unloads through a pool of three, while requests for all of them fill the cache."""
    model, chance = shipped_models()[DEFAULT_MODEL], random.Random(5)
    spec, ranks = read_model(model).spec, (4, 16, 64, 256, 32, 8, 128, 256)
    for seed, rank in enumerate(ranks):
        write_adapter(tmp_path / f"a{seed}", random_adapter(spec, seed, rank, scale=0.01))
    admin = {"authorization": "Bearer for-administrators"}
    options = [
        "--enable-lora", "--lora-dir", str(tmp_path), "--max-loras", "3", "--max-lora-rank", "256", "--max-model-len",
        "2048", "--admin-api-key", "for-administrators", "--max-connections", "256", "--max-cpu-loras", str(kept),
    ]  # fmt: skip
    done, names = threading.Event(), [f"n{number}" for number in range(5)]
    with bounded(model, 400 * MIB, *(options if kept else options[:-2])) as server:

        def act(verb: str, **body: str) -> None:
            reply = server.process.request("POST", f"/v1/{verb}_lora_adapter", body, admin)
            assert reply.status == 200, reply.text

        def client(seed: int) -> None:
            random_ = random.Random(seed)
            while not done.is_set():
                prompt = ids(random_.choice((10, 1900)), random_)
                asked = {
                    "model": random_.choice(names),
                    "prompt": prompt,
                    "max_tokens": 30,
                    "ignore_eos": True,
                }
                server.ask("/v1/completions", asked)

        for number, name in enumerate(names):
            act("load", lora_name=name, lora_path=f"a{number}")
        clients = [threading.Thread(target=client, args=(seed,)) for seed in range(6)]
        for each in clients:
            each.start()
        try:
            for _ in range(100):
                act("load", lora_name=chance.choice(names), lora_path=f"a{chance.randrange(len(ranks))}")
                act("load", lora_name="other", lora_path=f"a{chance.randrange(len(ranks))}")
                act("unload", lora_name="other")
        finally:
            done.set()
            for each in clients:
                each.join()
        assert set(server.seen) == {200}
