"""Adapters over HTTP: each is a model name of its own, a reload is a new version, and no answer is another's."""

from __future__ import annotations

import json
import os
import random
import shutil
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.adapters import Q, pair, peft_folder
from helpers.naming import naming_adapter, naming_base
from helpers.server import LiveServer, Reply, request_bytes, serving, stream_text
from quire.config import EngineConfig
from quire.config.lora_modules import adapter_paths
from quire.config.serving import ServingConfig
from quire.engine.front.async_engine import AsyncEngine

ADMIN = {"authorization": "Bearer root"}
FIRST = 40  # token of the adapter "a0", and so on
LORA: dict[str, Any] = {"enable_lora": True, "max_loras": 3, "max_lora_rank": 4}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return naming_base(tmp_path_factory.mktemp("base") / "model")


@pytest.fixture(scope="module")
def store(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of adapters: a0 … a15, each with its token."""
    folder = tmp_path_factory.mktemp("adapters")
    for number in range(16):
        naming_adapter(folder / f"a{number}", base, FIRST + number)
    return folder


@pytest.fixture(scope="module")
def server(base: Path, store: Path) -> Iterator[LiveServer]:
    modules = (f"a0={store / 'a0'}", json.dumps({"name": "a1", "path": str(store / "a1")}))
    options = {"lora_modules": modules, "lora_dir": str(store), "admin_api_key": ("root",)}
    with serving(base, LORA, served_model_name=("base",), **options) as live:
        yield live


def ask(server: LiveServer, model: str, **more: Any) -> Reply:
    fields = {"max_tokens": 4, "temperature": 0, "ignore_eos": True, "return_token_ids": True} | more
    return server.complete("Who are you?", model=model, **fields)


def said(reply: Reply) -> set[int]:
    """The tokens of an answer."""
    assert reply.status == 200, reply.text
    return set(reply.json["choices"][0]["token_ids"])


def load(server: LiveServer, name: str, path: str, **more: Any) -> Reply:
    return server.post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": path} | more, ADMIN)


def unload(server: LiveServer, name: str) -> Reply:
    return server.post("/v1/unload_lora_adapter", {"lora_name": name}, ADMIN)


def models(server: LiveServer) -> dict[str, Any]:
    return {one["id"]: one for one in server.get("/v1/models").json["data"]}


def test_an_adapter_is_a_model_of_its_own(server: LiveServer) -> None:
    listed = models(server)
    assert [*listed] == ["base", "a0", "a1"]
    assert [one["parent"] for one in listed.values()] == [None, "base", "base"]
    assert listed["a0"]["root"].endswith("a0")
    assert server.get("/v1/models/a1").json == listed["a1"]
    versions = set()
    for name, token in (("a0", FIRST), ("a1", FIRST + 1)):
        reply = ask(server, name)
        assert said(reply) == {token}
        assert reply.json["model"] == name
        assert reply.json["system_fingerprint"] == listed[name]["version"]
        assert reply.headers["x-quire-model-version"] == listed[name]["version"]
        versions.add(listed[name]["version"])
    own = ask(server, "base")
    assert own.json["system_fingerprint"] == listed["base"]["version"] not in versions
    assert said(own) == said(server.complete("Who are you?", max_tokens=4, temperature=0, ignore_eos=True,
                                             return_token_ids=True))  # fmt: skip
    assert not said(own) & {FIRST, FIRST + 1}
    ask(server, "a9").error(404, "model_not_found", "model")


def _content(reply: Reply) -> Any:
    return reply.json["choices"][0]["message"]["content"]


_CHAT = {"messages": [{"role": "user", "content": "Who?"}]}
_SHORT = {"num_predict": 3, "temperature": 0}
_DIALECTS: list[tuple[str, dict[str, Any], Callable[[Reply], str]]] = [
    ("/v1/chat/completions", {**_CHAT, "max_tokens": 3, "temperature": 0}, _content),
    ("/v1/responses", {"input": "Who?", "max_output_tokens": 3, "temperature": 0},
     lambda r: r.json["output"][-1]["content"][0]["text"]),
    ("/v1/messages", {**_CHAT, "max_tokens": 3, "temperature": 0}, lambda r: r.json["content"][0]["text"]),
    ("/api/chat", {**_CHAT, "stream": False, "options": _SHORT}, lambda r: r.json["message"]["content"]),
    ("/api/generate", {"prompt": "Who?", "stream": False, "options": _SHORT},
     lambda r: r.json["response"]),
    ("/completion", {"prompt": "Who?", "n_predict": 3, "temperature": 0}, lambda r: r.json["content"]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("path", "body", "text"), _DIALECTS, ids=lambda value: value if type(value) is str else ""
)
def test_every_api_takes_its_name(
    server: LiveServer, path: str, body: dict[str, Any], text: Callable[[Reply], str]
) -> None:
    for name in ("a0", "a1"):
        reply = server.post(path, {"model": name} | body)
        assert reply.status == 200, reply.text
        (token,) = server.post("/tokenize", {"content": text(reply)[-1]}).json["tokens"]
        assert token == FIRST + int(name[1:])
        assert reply.headers["x-quire-model-version"] == models(server)[name]["version"]
    assert server.post(path, {"model": "a9"} | body).status == 404


def test_fields_of_tgi_and_sglang_that_name_adapters(server: LiveServer) -> None:
    (letter,) = server.post("/detokenize", {"tokens": [FIRST + 1]}).json["prompt"]
    parameters = {"adapter_id": "a1", "max_new_tokens": 3}
    reply = server.post("/generate", {"inputs": "Who?", "parameters": parameters})
    assert reply.json["generated_text"] == letter * 3
    sampling = {"temperature": 0, "max_new_tokens": 3}
    reply = server.post("/generate", {"text": "Who?", "lora_path": "a1", "sampling_params": sampling})
    assert reply.json["text"] == letter * 3
    for body, told in (
        ({"inputs": "Who?", "parameters": {"adapter_id": "a9"}}, "parameters.adapter_id: 'a9' is not served"),
        ({"text": "Who?", "lora_path": "a9"}, "lora_path: 'a9' is not served"),
    ):
        reply = server.post("/generate", body)
        assert reply.status == 404
        assert told in reply.text


def test_adapters_by_number_with_scales(server: LiveServer) -> None:
    """As llama-server has them: one, one that is scaled, a sum, and a sum whose rank is above the limit."""
    load(server, "a2", "a2")
    listed = server.get("/lora-adapters").json
    assert [(one["id"], one["name"]) for one in listed] == [(0, "a0"), (1, "a1"), (2, "a2")]
    body: dict[str, Any] = {"prompt": "Who?", "n_predict": 3, "temperature": 0, "return_tokens": True}

    def tokens(*lora: tuple[int, float], **more: Any) -> tuple[set[int], str]:
        given = [{"id": number, "scale": scale} for number, scale in lora]
        reply = server.post("/completion", {**body, "lora": given, **more})
        assert reply.status == 200, reply.text
        return set(reply.json["tokens"]), reply.headers["x-quire-model-version"]

    versions = models(server)
    assert tokens((1, 1.0), (0, 0.0)) == ({FIRST + 1}, versions["a1"]["version"])
    assert tokens((1, 0.0))[1] == versions["base"]["version"]
    half = tokens((1, 0.5))
    assert half[0] == {FIRST + 1}
    mixed = tokens((0, 0.01), (1, 1.5))
    assert mixed[0] == {FIRST + 1}
    assert mixed == tokens((1, 1.5), (0, 0.01))
    assert tokens((0, 1.5), (1, 0.01))[0] == {FIRST}
    lora = [{"id": 0, "scale": 0.01}, {"id": 1, "scale": 1.5}]
    whole = ask(server, "base", lora=lora)
    assert (said(whole), whole.json["system_fingerprint"]) == mixed
    chat = {
        "messages": [{"role": "user", "content": "Who?"}],
        "max_tokens": 3,
        "temperature": 0,
        "lora": lora,
    }
    reply = server.post("/v1/chat/completions", chat)
    assert reply.json["system_fingerprint"] == mixed[1]
    assert set(server.post("/tokenize", {"prompt": _content(reply)}).json["tokens"]) == {FIRST + 1}
    ask(server, "a1", lora=lora).error(400, param="lora")
    assert len({half[1], mixed[1], *(one["version"] for one in versions.values())}) == 2 + len(versions)
    for lora, more, told in [
        ([(0, 1.0), (1, 1.0), (2, 1.0)], {}, r"rank 6 is not in [1, 4] (max_lora_rank)"),
        ([(3, 1.0)], {}, "3 is not the number of an adapter; there are 3"),
        ([(-1, 1.0)], {}, "-1 is not the number of an adapter"),
        ([(0, 0.5)], {"model": "a1"}, "the model 'a1' has an adapter already"),
        ([(0, 1e300)], {}, "holds a number that is not finite"),
    ]:
        given = [{"id": number, "scale": scale} for number, scale in lora]
        reply = server.post("/completion", {**body, "lora": given, **more})
        assert reply.status == 400
        assert told in reply.text
    unload(server, "a2")
    server.wait(server.idle)
    named = {version.digest for version in server.engine.adapters.values()}
    server.wait(lambda: set(server.engine._adapters._known) == named)


def test_metrics(server: LiveServer) -> None:
    name = "quire_adapter_{}_total"
    before = server.metric(name.format("generation_tokens"), adapter="a0")
    ask(server, "a0", max_tokens=5)
    ask(server, "base", max_tokens=7)
    server.counted(before + 5, name.format("generation_tokens"), adapter="a0")
    assert server.metric(name.format("loads"), adapter="a0") >= 1
    server.metric(name.format("evictions"), adapter="a0")
    with server.connect() as sock:
        body = {"prompt": "on", "model": "a1", "max_tokens": 190, "ignore_eos": True, "stream": True}
        sock.sendall(request_bytes("/v1/completions", body))
        sock.recv(1)
        assert server.metric("vllm:lora_requests_info", max_lora="3", waiting_lora_adapters="") > 0
    assert server.metric("quire_adapter_requests_waiting", adapter="a1") == 0
    server.wait(server.idle)
    assert server.metric("quire_adapter_requests_running") == 0


def test_a_reload_is_a_new_version_and_streams_end_on_theirs(server: LiveServer) -> None:
    assert load(server, "moving", "a2").status == 200
    before = models(server)["moving"]["version"]
    body = {"prompt": "on", "model": "moving", "max_tokens": 150, "ignore_eos": True, "stream": True,
            "temperature": 0, "return_token_ids": True}  # fmt: skip
    with server.connect() as sock:
        sock.sendall(request_bytes("/v1/completions", body, headers="connection: close\r\n"))
        started = sock.recv(2**16)
        assert load(server, "moving", "a3").headers["x-quire-model-version"] != before
        reply = ask(server, "moving")
        assert said(reply) == {FIRST + 3}
        assert reply.json["system_fingerprint"] == models(server)["moving"]["version"] != before
        assert load(server, "moving", "a4", load_inplace=False).error(400, param="lora_name")
        assert said(ask(server, "moving")) == {FIRST + 3}
        assert unload(server, "moving").status == 200
        ask(server, "moving").error(404, "model_not_found")
        unload(server, "moving").error(404, "model_not_found")
        parts = [started]
        while part := sock.recv(2**16):
            parts.append(part)
    events = [
        json.loads(line[6:])
        for line in b"".join(parts).split(b"\r\n\r\n", 1)[1].split(b"\n")
        if line.startswith(b"data: {")
    ]
    tokens = [
        token for event in events for choice in event["choices"] for token in choice.get("token_ids", ())
    ]
    assert set(tokens) == {FIRST + 2}
    assert len(tokens) == 150
    assert {event["system_fingerprint"] for event in events} == {before}


def test_what_is_broken_or_outside_changes_nothing(server: LiveServer, store: Path, tmp_path: Path) -> None:
    tensors = pair(Q, rank=2)
    broken = {name: array.copy() for name, array in tensors.items()}
    next(iter(broken.values()))[0, 0] = np.nan
    peft_folder(store / "nan", broken, r=2)
    peft_folder(store / "other-base", pair(Q, out=32, rank=2), r=2)
    peft_folder(store / "wide", pair(Q, rank=8), r=8)
    peft_folder(store / "strange", pair("model.layers.9.self_attn.q_proj", rank=2), r=2)
    pickled = shutil.copytree(store / "a2", store / "pickled")
    (pickled / "adapter_model.safetensors").rename(pickled / "adapter_model.bin")
    outside = shutil.copytree(store / "a2", tmp_path / "outside")
    (store / "link").symlink_to(outside)
    half = shutil.copytree(store / "a2", store / "half")
    (half / "adapter_model.safetensors").unlink()
    (half / "adapter_model.safetensors").symlink_to(outside / "adapter_model.safetensors")
    before = models(server)
    for path, told in [
        ("nan", "is NaN or infinite"),
        ("other-base", "another base"),
        ("wide", "rank 8 "),
        ("strange", "model.layers.9"),
        ("pickled", "adapter_model"),
        ("link", "leads out of"),
        ("half", "leads out of"),
        ("../outside", "is not the name of an adapter"),
        (str(outside), "is not the name of an adapter"),
        ("", "is not the name of an adapter"),
        ("a0\0", "is not the name of an adapter"),
        ("missing", "does not exist"),
        (".", "leads out of"),
    ]:
        assert told in load(server, "a0", path).error(400, param="lora_path"), path
    assert "is the model itself" in load(server, "base", "a2").error(400, param="lora_name")
    for name in ("", "a\nb", "x" * 300):
        assert "name of an adapter" in load(server, name, "a2").error(400)
    assert models(server) == before
    assert said(ask(server, "a0")) == {FIRST}
    assert load(server, "whole", str(store / "a2")).status == 200  # a path as a whole, inside
    assert unload(server, "whole").status == 200


def test_it_is_off_without_an_administrator_or_a_folder(base: Path, store: Path) -> None:
    with serving(base, LORA, admin_api_key=("root",)) as live:
        assert "--lora-dir" in load(live, "a0", "a0").error(400, param="lora_path")
    with pytest.raises(ValueError, match="lora_modules: they need enable_lora"):
        AsyncEngine(base, EngineConfig(), ServingConfig(lora_modules=("a0=x",)))
    for wrong in ("=x", "x=", '{"name": "a"}', '{"name": 1, "path": "x"}', '{"nam": "a"}', "{"):
        with pytest.raises(ValueError, match="lora_modules"):
            adapter_paths((wrong,))
    with pytest.raises(ValueError, match="given twice"):
        adapter_paths(("a=x", "a=y"))


@pytest.mark.parametrize("count", [16, pytest.param(100, marks=pytest.mark.models)])
def test_never_the_answer_of_another(server: LiveServer, base: Path, store: Path, count: int) -> None:
    """Adapters in three slots: loads, unloads and reloads, while four clients ask."""
    first, least = (FIRST, 40) if count == 16 else (24, 400)
    for number in range(count):
        if not (store / f"a{first - FIRST + number}").exists():
            naming_adapter(store / f"a{first - FIRST + number}", base, first + number)
    wrong: list[str] = []
    answers = 0
    ended = threading.Event()
    shifts = {f"r{number}": 0 for number in range(count // 2)}

    def client(seed: int) -> None:
        nonlocal answers
        random_ = random.Random(seed)
        while not ended.is_set() or answers < least:
            name = random_.choice([*shifts, "a0", "a1"])
            stream = random_.random() < 0.3
            reply = ask(
                server, name, stream=stream, max_tokens=random_.randint(1, 9), n=random_.randint(1, 2)
            )
            if reply.status == 404:
                continue
            if reply.status != 200:
                wrong.append(reply.text)
                return
            if stream:
                found = {token for event in reply.events[:-1] for choice in event["choices"]
                         for token in choice.get("token_ids", ())}  # fmt: skip
                version = reply.events[0]["system_fingerprint"]
            else:
                found, version = said(reply), reply.json["system_fingerprint"]
            answers += 1
            if found != {tokens[version]}:
                wrong.append(f"{name} {version}: {found}, not {tokens[version]}")

    tokens = {}
    for number in range(count):  # the version of each adapter's files, whatever it is called
        path = f"a{first - FIRST + number}"
        tokens[load(server, "probe", path).headers["x-quire-model-version"]] = first + number
        assert said(ask(server, "probe")) == {first + number}
    unload(server, "probe")
    with ThreadPoolExecutor(4) as clients:
        running = [clients.submit(client, seed) for seed in range(4)]
        random_ = random.Random(9)
        for _ in range(4 * count):
            name = random_.choice([*shifts])
            if random_.random() < 0.2:
                assert unload(server, name).status in {200, 404}
            else:
                shifts[name] = random_.randrange(count) + first - FIRST
                assert load(server, name, f"a{shifts[name]}").status == 200
        ended.set()
        for one in running:
            one.result()
    assert not wrong
    assert answers >= least
    for name in shifts:
        unload(server, name)
    server.wait(server.idle)
    named = {version.digest for version in server.engine.adapters.values()}
    assert set(server.engine._adapters._known) == named, "versions without requests are kept"


def test_two_clients_load_the_same_adapter_at_once(server: LiveServer) -> None:
    with ThreadPoolExecutor(4) as clients:
        replies = list(clients.map(lambda _: load(server, "same", "a5"), range(4)))
    assert {reply.status for reply in replies} == {200}
    assert len({reply.headers["x-quire-model-version"] for reply in replies}) == 1
    assert said(ask(server, "same")) == {FIRST + 5}
    unload(server, "same")


def test_a_client_that_leaves_while_its_adapter_is_loaded(server: LiveServer) -> None:
    """Requests that end while they wait for a slot hold none; a load whose client has left is complete or not there."""
    bodies = [
        {"prompt": "on", "model": name, "max_tokens": 100, "ignore_eos": True}
        for name in ("a0", "a1", "a6", "a7")
    ]
    for name in ("a6", "a7"):
        load(server, name, name)
    for _ in range(3):
        socks = []
        for body in bodies * 2:
            sock = server.connect()
            sock.sendall(request_bytes("/v1/completions", body))
            socks.append(sock)
        sock = server.connect()
        body = {"lora_name": "left", "lora_path": "a8"}
        sock.sendall(
            request_bytes(
                "/v1/load_lora_adapter", body, headers=f"authorization: {ADMIN['authorization']}\r\n"
            )
        )
        for one in (*socks, sock):
            one.shutdown(socket.SHUT_RDWR)
            one.close()
    server.wait(server.idle)
    for name in ("a0", "a1", "a6", "a7"):
        assert said(ask(server, name)) == {FIRST + int(name[1:])}
        if name in {"a6", "a7"}:
            unload(server, name)
    assert load(server, "left", "a8").status == 200
    assert said(ask(server, "left")) == {FIRST + 8}
    unload(server, "left")


def test_structure_holds_with_an_adapter(server: LiveServer) -> None:
    """The grammar leaves no place for the adapter's token; where it leaves one, that is taken."""
    reply = ask(server, "a0", structured_outputs={"choice": ["yes", "no"]}, max_tokens=8, ignore_eos=False)
    assert reply.json["choices"][0]["text"] in {"yes", "no"}
    (letter,) = {server.post("/detokenize", {"tokens": [FIRST]}).json["prompt"]}
    free = ask(
        server, "a0", structured_outputs={"regex": "[A-Za-z0-9 -~]{3}"}, max_tokens=8, ignore_eos=False
    )
    assert free.json["choices"][0]["text"] == letter * 3
    whole = ask(server, "a0", stream=True)
    assert stream_text(whole) == {0: letter * 4}


def test_an_engine_that_is_started_again_knows_them(base: Path, store: Path) -> None:
    """Also one whose name is younger than the engine; its process is killed."""
    import asyncio

    from quire import AsyncLLM, SamplingParams

    async def run() -> None:
        one = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True)
        async with AsyncLLM(
            base, adapters={"a0": store / "a0"}, max_model_len=100, memory="4GiB", **LORA
        ) as llm:
            await llm.load_adapter("late", store / "a3")
            for attempt in range(2):
                for name, number in (("a0", 0), ("late", 3)):
                    (output,) = await llm.generate("Who?", one, adapter=name)
                    assert set(output.outputs[0].token_ids) == {FIRST + number}, attempt
                if attempt == 0:
                    pid = llm._engine.pid
                    assert pid is not None
                    os.kill(pid, 9)
                    while llm._engine.pid in {None, pid} or str(llm._engine.state) != "ready":
                        await asyncio.sleep(0.01)

    asyncio.run(run())
