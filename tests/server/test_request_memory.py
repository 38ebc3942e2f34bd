"""Memory of requests: what they may come to hold is taken from a budget first, and large answers are never whole."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import json
from array import array
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from helpers.memory import memory_for
from helpers.process import running, until
from helpers.server import LiveServer, plenty, read_all, request_bytes, serving, stream_text
from quire._native import NgramIndex
from quire.engine.api import DeadlineError, GenerateAsk, OverloadedError, StreamDelta
from quire.engine.request_forms import constrained
from quire.logprobs import LogprobTable, TokenLogprob
from quire.server import pieces
from quire.server.errors import ApiError
from quire.server.request_memory import BODY_BYTE, Held, Pool, answer_costs, reading_cost
from quire.server.responses import ChatCompletion, Completion
from quire.types import Grammar, Request, SamplingParams, TokenIds
from quire.util.platform import resident_exactly


def ask(prompt: int = 10, **params: Any) -> GenerateAsk:
    return GenerateAsk(
        request=Request(
            request_id="r", prompt_token_ids=TokenIds([5] * prompt), params=SamplingParams(**params)
        )
    )


def cost(*asks: GenerateAsk, unread: int | None = None) -> dict[str, int]:
    return answer_costs(asks, 1000, unread=unread, held_back=False, recorded=False)


# ---- pools


def test_waiting_requests_are_served_in_order_of_arrival() -> None:
    async def go() -> list[str]:
        pool, order = Pool("p", lambda: 10, 5), []

        async def take(name: str, size: int) -> None:
            await pool.take(size)
            order.append(name)

        assert pool.try_take(8)
        waiting = [asyncio.create_task(take(name, size)) for name, size in (("large", 9), ("small", 1))]
        await asyncio.sleep(0)
        assert not pool.try_take(1)  # there is room, but others came before
        pool.give(8)
        await asyncio.gather(*waiting)
        assert (pool.used, pool.peak, pool.waiting) == (10, 10, 0)
        return order

    assert asyncio.run(go()) == ["large", "small"]


def test_keys_take_turns() -> None:
    """One key's small request passes another's many large ones, later ones come in turns, and none waits for ever."""

    async def go() -> list[str]:
        pool, order = Pool("p", lambda: 10, 100), []

        async def take(name: str, size: int, tenant: str) -> None:
            await pool.take(size, tenant)
            order.append(name)

        def start(*asked: tuple[str, int]) -> list[asyncio.Task[None]]:
            return [asyncio.create_task(take(name, size, name[0])) for name, size in asked]

        await pool.take(6, "a")
        tasks = start(("a1", 8), ("a2", 8), ("a3", 8))
        await asyncio.sleep(0)
        tasks += start(("b1", 1), ("b2", 1), ("c1", 1), ("a4", 1))
        await asyncio.sleep(0)
        assert order == ["b1", "c1"]
        for size, tenant in ((6, "a"), (1, "b"), (1, "c"), (8, "a"), (1, "b"), (8, "a"), (8, "a")):
            pool.give(size, tenant)
            await asyncio.sleep(0)
        await asyncio.gather(*tasks)
        assert (pool.used, pool.waiting) == (1, 0)
        return order

    assert asyncio.run(go()) == ["b1", "c1", "a1", "b2", "a2", "a3", "a4"]


def test_a_key_leaves_places_and_bytes_to_others() -> None:
    async def go() -> None:
        pool = Pool("answers", lambda: 100, 4)
        assert pool.try_take(40, "a")
        assert not pool.try_take(11, "a")
        assert pool.try_take(10, "a")
        assert pool.try_take(50, "b")  # its only one
        waiting = [asyncio.create_task(pool.take(10, "a")) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(OverloadedError, match=r"2 requests with this API key wait for memory \(limit 2;"):
            await pool.take(10, "a")
        waiting.append(asyncio.create_task(pool.take(10, "b")))
        await asyncio.sleep(0)
        assert pool.waiting == 3
        for task in waiting:
            task.cancel()

    asyncio.run(go())


def test_a_request_that_leaves_the_queue_takes_no_bytes() -> None:
    async def go() -> None:
        pool = Pool("p", lambda: 10, 5)
        assert pool.try_take(10)
        first, second = (asyncio.create_task(pool.take(size)) for size in (10, 3))
        await asyncio.sleep(0)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        pool.give(10)
        second.cancel()  # in the moment in which it is served
        await asyncio.gather(second, return_exceptions=True)
        assert (pool.used, pool.waiting) == (0, 0)

    asyncio.run(go())


def test_a_request_cancelled_in_the_same_turn_of_the_loop_takes_no_bytes() -> None:
    """Bytes are given back after its task was cancelled and before that has run: those behind it get them."""

    async def main() -> None:
        pool = Pool("p", lambda: 10, 5)
        await pool.take(10)
        first, second = (asyncio.create_task(pool.take(size)) for size in (4, 5))
        await asyncio.sleep(0)
        first.cancel()
        pool.give(10)
        await second
        assert (pool.used, pool.waiting) == (5, 0)
        with pytest.raises(asyncio.CancelledError):
            await first
        pool.give(5)
        assert (pool.used, pool.waiting) == (0, 0)

    asyncio.run(main())


def test_too_many_that_wait_are_refused_with_the_numbers() -> None:
    async def go() -> None:
        pool = Pool("answers", lambda: 4096, 1)
        assert pool.try_take(4000)
        waiting = asyncio.create_task(pool.take(100))
        await asyncio.sleep(0)
        with pytest.raises(
            OverloadedError, match=r"1 requests wait for memory \(limit 1; answers: 3.91 KiB of 4.00 KiB"
        ):
            await pool.take(100)
        waiting.cancel()

    asyncio.run(go())


def test_a_deadline_passes_while_memory_is_waited_for() -> None:
    async def go() -> None:
        memory, held = plenty(2**20), Held()
        assert memory.answers.try_take(memory.answers.limit)
        late = GenerateAsk(request=ask(1, max_tokens=1).request, queue_deadline=0.0)
        with pytest.raises(DeadlineError, match="waited for memory"):
            await memory.take_answer(held, [late], cost(late))
        held.close()
        assert memory.answers.used == memory.answers.limit

    asyncio.run(go())


def test_the_worst_case_follows_the_fields_of_the_request() -> None:
    one = cost(ask(max_tokens=100))
    assert cost(ask(max_tokens=100), ask(max_tokens=100))["max_tokens"] == 2 * one["max_tokens"]
    assert cost(ask(max_tokens=100, n=4))["max_tokens"] == 4 * one["max_tokens"]
    assert cost(ask())["max_tokens"] == 9.9 * one["max_tokens"]  # up to the window
    assert cost(ask(max_tokens=100, logprobs=64))["logprobs"] > 100 * 65 * 12
    assert cost(ask(900, max_tokens=1, prompt_logprobs=64))["prompt_logprobs"] > 900 * 65 * 12
    assert cost(ask(max_tokens=900), unread=10)["max_tokens"] < cost(ask(max_tokens=900))["max_tokens"] / 2
    assert cost(ask(max_tokens=1, allowed_token_ids=list(range(1000))))["allowed_token_ids"] > 80_000
    field = max(costs := cost(ask(900, max_tokens=1, prompt_logprobs=64)), key=lambda name: costs[name])
    assert field == "prompt_logprobs"


def test_a_grammar_counts_here_and_on_the_way_of_each_prompt() -> None:
    source = "start: " + "a" * 100_000
    plain = ask(max_tokens=1)
    bound = replace(plain, request=constrained(plain.request, Grammar(source, b"")))
    assert cost(plain)["structured_outputs"] == 0
    for prompts in (1, 4):
        costs = cost(*[bound] * prompts)
        assert (
            len(source) * (1 + 2 * prompts)
            <= costs["structured_outputs"]
            < 1.01 * len(source) * (1 + 2 * prompts)
        )
        assert {**costs, "structured_outputs": 0} == cost(*[plain] * prompts)


@pytest.mark.parametrize("tokens", [1, 300, 4097])
def test_a_prediction_costs_what_it_holds_in_the_engine(tokens: int) -> None:
    plain = ask(max_tokens=1, n=3)
    predicted = replace(plain, request=replace(plain.request, prediction=TokenIds(range(tokens))))
    assert cost(plain)["prediction"] == 0
    assert cost(predicted, predicted)["prediction"] == 2 * cost(predicted)["prediction"]
    index = NgramIndex(2, 32, tokens)
    index.append_array(array("i", range(tokens)))
    assert index.memory() + 2 * 4 * tokens <= cost(predicted)["prediction"] < 50 * tokens


def test_the_cost_of_reading_follows_the_contents_of_a_body() -> None:
    text, ids = json.dumps({"a": "x" * 10_000}).encode(), json.dumps({"a": [999] * 2500}).encode()
    deep = b'{"a":[' + b"[]," * 3000 + b"[]]}"
    assert reading_cost(ids, 10) > reading_cost(text, 10) > 10_000
    assert reading_cost(deep, 10) > 3000 * 56
    assert reading_cost(text, 10**6) - reading_cost(text, 10) == 0  # no longer than the body


def test_a_body_without_room_is_refused() -> None:
    memory, held = plenty(2**20), Held()
    with pytest.raises(ApiError, match="over the limit") as never:
        memory.take_body(held, memory.largest_body + 1)
    memory.take_body(held, memory.largest_body // 2)
    with pytest.raises(ApiError, match="try again") as later:
        memory.take_body(Held(), memory.largest_body)
    assert (never.value.status, later.value.status) == (413, 429)
    held.close()
    assert memory.bodies.used == 0
    assert memory.bodies.peak >= BODY_BYTE * (memory.largest_body // 2)


# ---- tables and pieces


def table(positions: int, width: int) -> LogprobTable:
    return LogprobTable.of(
        [TokenLogprob(10 * i, -0.5, 3), *(TokenLogprob(10 * i + k, -1.0 - k, k) for k in range(1, width))]
        for i in range(positions)
    )


def test_a_table_is_a_sequence_of_positions() -> None:
    whole = table(7, 3)
    assert len(whole) == 7
    assert whole[2] == [TokenLogprob(20, -0.5, 3), TokenLogprob(21, -2.0, 1), TokenLogprob(22, -3.0, 2)]
    assert list(whole[2:5]) == [whole[2], whole[3], whole[4]] == list(whole)[2:5]
    assert whole[5:2] == []
    parts = LogprobTable()
    for start in range(0, 7, 2):
        parts.extend(whole[start : start + 2])
    assert parts == whole
    assert whole.ids.itemsize * len(whole.ids) + whole.values.itemsize * len(whole.values) == 7 * 3 * 12


def test_pieces_are_the_same_json() -> None:
    texts = ["", "plain", 'quotes " and \\ and \x00', "ü" * 20_000, "€" * 20_001, "x" + "🦊" * 10_000]
    for text in texts:
        assert msgspec.json.decode(b"".join(pieces.text(text.encode()))) == text
        assert msgspec.json.decode(b"".join(pieces.text(b"a", text.encode()))) == "a" + text
    for ids in ([], [5], list(range(10_000))):
        assert msgspec.json.decode(b"".join(pieces.numbers(array("i", ids)))) == ids
    made = pieces.fields(
        [("a", pieces.value(None)), ("b", pieces.items([pieces.value(1), pieces.value("x")]))]
    )
    assert b"".join(made) == b'{"a":null,"b":[1,"x"]}'
    assert b"".join(pieces.items([])) == b"[]"
    assert max(map(len, pieces.text(("🦊" * 10**6).encode()))) < pieces.PIECE_BYTES
    assert [len(piece) for piece in pieces.gathered([b"x" * 40_000] * 4)] == [80_000, 80_000]


def test_a_delta_that_has_grown_is_cut_and_loses_nothing() -> None:
    for logprobs in (None, table(300, 21)):
        delta = StreamDelta(1, "ab" * 30_000, list(range(300)), logprobs)
        parts = list(pieces.portions(delta))
        assert len(parts) > 1
        assert "".join(part.text for part in parts) == delta.text
        assert [i for part in parts for i in part.token_ids] == delta.token_ids
        if logprobs is not None:
            joined = LogprobTable()
            for part in parts:
                assert part.logprobs is not None
                joined.extend(part.logprobs)
            assert joined == logprobs
    small = StreamDelta(0, "a", [1])
    assert list(pieces.portions(small)) == [small]


# ---- a server with little memory for requests


@pytest.fixture(scope="module")
def tight(folder: Path) -> Iterator[LiveServer]:
    engine = {"max_model_len": 4000, "request_memory": 6 * 2**20, "memory": memory_for(2**30)}
    with serving(folder, engine) as live:
        yield live


def test_a_request_that_never_fits_is_refused_by_field(tight: LiveServer) -> None:
    many = tight.complete([[5] * 900] * 4, prompt_logprobs=64, max_tokens=1)
    message = many.error(400, "invalid_value", "prompt_logprobs")
    assert "over the limit of 3.00 MiB for one request (half of --request-memory)" in message
    tight.complete("a", max_tokens=3000, logprobs=64).error(400, "invalid_value", "logprobs")
    tight.chat(max_tokens=2000, logprobs=True, top_logprobs=20, n=8).error(
        400, "invalid_value", "top_logprobs"
    )
    tight.complete("a", max_tokens=3900, n=8).error(400, "invalid_value", "max_tokens")
    tight.complete(["a"] * 300, n=3, max_tokens=1).error(400, "invalid_value", "n")
    choices = [f"{i} {'x' * 100}" for i in range(150)]
    tight.complete(["a"] * 64, guided_choice=choices, max_tokens=1).error(400, param="structured_outputs")
    tight.post("/v1/completions", {"prompt": [[5] * 3000] * 40}).error(413, "request_too_large")
    assert tight.complete("a", max_tokens=5).status == 200


def test_answers_that_do_not_fit_together_wait_for_each_other(tight: LiveServer) -> None:
    """Each may come to two thirds of what answers have: together they would be over it."""
    fields = {"max_tokens": 1800, "logprobs": 40, "ignore_eos": True, "temperature": 0}
    memory = tight.http.context.memory
    with concurrent.futures.ThreadPoolExecutor(4) as clients:
        replies = list(clients.map(lambda _: tight.complete("go", **fields), range(4)))
    assert [reply.status for reply in replies] == [200] * 4
    assert len({reply.json["choices"][0]["text"] for reply in replies}) == 1
    assert memory.answers.limit // 2 < memory.answers.peak <= memory.answers.limit
    tight.wait(lambda: not memory.answers.used and not memory.bodies.used and not memory.work.used)


def test_large_answers_are_chunked_and_equal_streams(tight: LiveServer) -> None:
    fields = {"max_tokens": 400, "ignore_eos": True, "seed": 3, "return_token_ids": True}
    whole = tight.complete("go", logprobs=20, prompt_logprobs=2, echo=True, **fields)
    assert whole.headers["transfer-encoding"] == "chunked"
    choice = msgspec.json.decode(whole.body, type=Completion).choices[0]
    assert choice.logprobs is not None
    lengths = {len(part) for part in msgspec.structs.astuple(choice.logprobs)}
    assert lengths == {400 + len(choice.prompt_token_ids)}  # type: ignore[arg-type]
    assert "".join(choice.logprobs.tokens[: len(choice.prompt_token_ids)]) == "go"  # type: ignore[arg-type]
    chat = tight.chat(logprobs=True, top_logprobs=20, **fields)
    assert chat.headers["transfer-encoding"] == "chunked"
    answer = msgspec.json.decode(chat.body, type=ChatCompletion).choices[0]
    streamed = tight.chat(logprobs=True, top_logprobs=20, stream=True, **fields)
    assert stream_text(streamed) == {0: answer.message.content}
    assert answer.logprobs is not None
    parts = [event["choices"][0]["logprobs"] for event in streamed.events[:-1]]
    entries = [entry for part in parts if part for entry in part["content"]]
    assert entries == msgspec.to_builtins(answer.logprobs.content)


def test_http_1_0_gets_the_length_of_a_large_answer(tight: LiveServer) -> None:
    body = {"prompt": "go", "max_tokens": 400, "logprobs": 20, "ignore_eos": True, "timings": True}
    with tight.connect() as sock:
        sock.sendall(request_bytes("/v1/completions", body, version="1.0", headers="connection: close\r\n"))
        head, _, content = read_all(sock).partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head.lower()
    assert f"content-length: {len(content)}".encode() in head.lower()
    assert len(json.loads(content)["choices"][0]["logprobs"]["tokens"]) == 400


def test_unread_answers_hold_their_memory_until_they_are_read(tight: LiveServer) -> None:
    memory = tight.http.context.memory
    body = {"prompt": "go", "max_tokens": 1000, "logprobs": 64, "ignore_eos": True}
    with tight.connect() as sock:
        sock.sendall(request_bytes("/v1/completions", body, headers="connection: close\r\n"))
        head = sock.recv(12)
        assert head == b"HTTP/1.1 200"
        assert memory.answers.used > 0
        assert len(read_all(sock)) > 2**20
    tight.wait(lambda: memory.answers.used == 0)


# ---- reports


def test_debug_memory_adds_up(folder: Path) -> None:
    options = ("--memory", "370MiB", "--request-memory", "16MiB", "--grammar-memory", "8MiB")
    with running(folder, *options) as server:
        body = {"prompt": "go", "max_tokens": 20}
        assert server.request("POST", "/v1/completions", body).status == 200
        assert "compiler" not in server.request("GET", "/debug/memory").json["processes"]
        assert server.request("POST", "/v1/completions", body | {"guided_regex": "[a-c]+"}).status == 200
        found: dict[str, Any] = {}

        def adds_up() -> bool:
            """While blocks of the cache are brought into memory, two looks differ."""
            found.update(server.request("GET", "/debug/memory").json)
            pids = {"server": server.process.pid, "engine": server.engine, "compiler": server.compiler}
            held = {name: resident_exactly(pid) for name, pid in pids.items()}
            sums = {name: sum(parts.values()) for name, parts in found["processes"].items()}
            return sums.keys() == held.keys() and all(abs(sums[n] - held[n]) < 0.01 * held[n] for n in held)

        until(adds_up)
    assert found["resident"] == sum(sum(parts.values()) for parts in found["processes"].values())
    assert sum(found["planned"].values()) <= found["bound"] == 370 * 2**20
    assert found["planned"]["requests"] == 16 * 2**20
    assert 2**24 < sum(found["processes"]["compiler"].values()) <= found["planned"]["compiler"]
    assert found["processes"]["engine"]["kv"] > 0
    assert found["requests"]["answers"]["limit"] == 8 * 2**20
    assert found["requests"]["answers"]["taken"] == 0
    assert any("at most, of 370.00 MiB" in line for line in server.lines)


def test_debug_memory_is_for_the_operator(folder: Path) -> None:
    with serving(folder, api_key=("secret",)) as live:
        live.get("/debug/memory").error(401)
        assert live.get("/debug/memory", {"authorization": "Bearer secret"}).status == 200
    with serving(folder) as live, contextlib.closing(live.connect()):
        assert live.get("/debug/memory").status == 200
