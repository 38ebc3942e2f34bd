"""The load generator, its client and its figures against a server of known latencies, on a virtual clock."""

from __future__ import annotations

from typing import Any

import pytest

from helpers.fake_llm import Behaviour, FakeLLM
from helpers.virtual_time import VirtualLoop, run
from quire.bench.arrivals import arrivals
from quire.bench.endpoints import Endpoint, RequestOptions, endpoint
from quire.bench.load_generator import LoadRun
from quire.bench.request_metrics import Summary, summarize
from quire.bench.sender import HttpSender
from quire.bench.timeline import RequestRecord
from quire.bench.workloads import Piece, Session, Speller, Turn

from .virtual import MemoryClient

WAYS = [
    ("openai", "chat"), ("vllm", "completions"), ("quire", "chat"), ("llama-server", "native"),
    ("sglang", "native"), ("tgi", "native"), ("ollama", "native"), ("ollama", "native-chat"),
]  # fmt: skip


def sessions(
    count: int, tokens: int = 5, words: int = 12, turns: int = 1, think: float = 0.0
) -> list[Session]:
    return [
        Session(
            tuple(
                Turn((Piece(f"{i} {turn}", words),), output_tokens=tokens, think=think if turn else 0.0)
                for turn in range(turns)
            )
        )
        for i in range(count)
    ]


class Bench:
    """A fake server, the real client over memory, and a virtual clock."""

    def __init__(
        self,
        loop: VirtualLoop,
        behaviour: Behaviour,
        way: tuple[str, str] = ("openai", "chat"),
        **options: Any,
    ) -> None:
        self.loop, self.server = loop, FakeLLM(behaviour)
        self.endpoint: Endpoint = endpoint(*way)
        self.client = MemoryClient(self.server, loop, options.pop("pieces", 0))
        limits = {name: options.pop(name) for name in ("timeout", "max_in_flight") if name in options}
        speller = Speller(ids=options.pop("ids", None))
        self.sender = HttpSender(self.client, self.endpoint, RequestOptions(model="m", **options), speller)
        self.load = LoadRun(self.sender, loop.time, **limits)

    async def open(self, work: list[Session], times: list[float]) -> list[RequestRecord]:
        await self.load.open(work, times)
        return sorted(self.load.records, key=lambda one: one.index)


def ms(summary: Summary, name: str, percent: float = 50.0) -> float:
    return summary.distributions[name].points[percent].value


@pytest.mark.parametrize("pieces", [0, 1, 7])
@pytest.mark.parametrize("way", WAYS)
def test_every_api_gives_the_servers_own_latencies(way: tuple[str, str], pieces: int) -> None:
    """TTFT and ITL exactly as the server has them, however its bytes are cut."""

    async def work(loop: VirtualLoop) -> list[RequestRecord]:
        bench = Bench(loop, Behaviour(ttft=0.25, itl=0.03), way, pieces=pieces)
        return await bench.open(sessions(3), [0.0, 1.0, 1.1])

    records = run(work)
    assert [one.error for one in records] == [""] * 3
    found = summarize(records)
    assert (ms(found, "ttft"), ms(found, "itl")) == pytest.approx((250, 30))
    assert (ms(found, "tpot"), ms(found, "e2el")) == pytest.approx((30, 250 + 4 * 30))
    assert {(one.output_tokens, one.output_source) for one in records} == {(5, "server")}
    assert {one.input_source for one in records} == {"server"}
    assert {one.input_tokens for one in records} == {16 if "chat" in way[1] else 12}
    assert records[0].finish_reason in {"length", "limit"}


def test_a_stalled_server_is_a_late_first_token_not_a_lower_rate() -> None:
    """The negative control of coordinated omission: requests behind a stall keep their own due times."""

    async def work(loop: VirtualLoop, limit: int | None) -> Summary:
        behaviour = Behaviour(ttft=0.1, itl=0.0, stall={3: 5.0})
        bench = Bench(loop, behaviour, max_in_flight=limit)
        return summarize(await bench.open(sessions(20), arrivals("constant", 2.0, 20)))

    # Without a bound only the stalled one is late.
    free = run(lambda loop: work(loop, None))
    assert free.offered_rate == pytest.approx(2.0)
    assert free.distributions["ttft"].high == pytest.approx(5100)
    assert ms(free, "ttft") == pytest.approx(100)
    # With one place everything behind it waits here, and that wait is in TTFT: they were due.
    one = run(lambda loop: work(loop, 1))
    assert one.offered_rate == pytest.approx(2.0)
    late = [one.points[p].value for one in [one.distributions["ttft"]] for p in (50.0, 90.0)]
    assert late[0] > 1000
    assert one.distributions["ttft"].high == pytest.approx(5100)
    assert one.distributions["send_lag"].high == pytest.approx(4600)


def test_a_closed_loop_hides_the_stall() -> None:
    """Why open loops: with clients that wait for their answer the same stall touches one request alone."""

    async def work(loop: VirtualLoop) -> Summary:
        bench = Bench(loop, Behaviour(ttft=0.1, itl=0.0, stall={3: 5.0}))
        await bench.load.closed(sessions(20), 1)
        return summarize(bench.load.records)

    found = run(work)
    assert ms(found, "ttft", 90.0) == pytest.approx(100)
    assert found.metrics()["request_rate"].value == pytest.approx(20 / (20 * 0.1 + 5.0))


def test_closed_loop_keeps_its_clients_busy() -> None:
    async def work(loop: VirtualLoop) -> tuple[Summary, int]:
        bench = Bench(loop, Behaviour(ttft=0.2, itl=0.1))
        await bench.load.closed(sessions(12, tokens=3), 4)
        return summarize(bench.load.records), bench.client.opened

    found, opened = run(work)
    assert found.seconds == pytest.approx(3 * 0.4)
    assert found.concurrency == pytest.approx(4.0)
    assert opened == 4  # kept alive and used again


def test_several_tokens_a_chunk() -> None:
    async def work(loop: VirtualLoop, way: tuple[str, str], told: bool) -> Summary:
        bench = Bench(loop, Behaviour(ttft=0.2, itl=0.1, per_chunk=4), way, count_tokens=told)
        return summarize(await bench.open(sessions(2, tokens=9), [0.0, 0.5]))

    for way, told in ((("llama-server", "native"), False), (("vllm", "completions"), True)):
        found = run(lambda loop, way=way, told=told: work(loop, way, told))
        assert ms(found, "icl") == pytest.approx(100)
        assert found.distributions["itl"].count == 2 * 8
        assert ms(found, "itl") == 0.0
        assert found.distributions["itl"].mean == pytest.approx(200 / 8) == pytest.approx(ms(found, "tpot"))
    silent = run(lambda loop: work(loop, ("openai", "chat"), False))
    assert ms(silent, "tpot") == pytest.approx(200 / 8)  # the total is known even so
    assert ms(silent, "itl") == pytest.approx(100)
    assert any("between chunks" in note for note in silent.notes)


def test_an_end_mark_and_missing_counts() -> None:
    async def work(loop: VirtualLoop, **act: Any) -> list[RequestRecord]:
        bench = Bench(loop, Behaviour(ttft=0.2, itl=0.1, **act))
        return await bench.open(sessions(1), [0.0])

    ended = run(lambda loop: work(loop, eos=True))[0]
    assert (len(ended.times), ended.output_tokens) == (4, 5)
    assert ended.finished == pytest.approx(0.6)
    assert ms(summarize([ended]), "tpot") == pytest.approx(100)
    silent = run(lambda loop: work(loop, usage=False))[0]
    assert (silent.output_tokens, silent.output_source, silent.input_tokens) == (5, "chunks", None)
    assert any("chunks, one token each: an estimate" in note for note in summarize([silent]).notes)
    lines = run(lambda loop: work(loop, crlf=True))[0]
    assert len(lines.times) == 5


def test_failures_are_kept_and_named() -> None:
    async def work(loop: VirtualLoop) -> tuple[list[RequestRecord], dict[str, str]]:
        behaviour = Behaviour(ttft=0.1, itl=0.1, refuse={1}, cut={2}, stall={3: 99.0})
        bench = Bench(loop, behaviour, timeout=10.0)
        return await bench.open(sessions(5), [0.0, 1.0, 2.0, 3.0, 4.0]), bench.sender.sample_errors

    records, errors = run(work)
    assert [one.error for one in records] == ["", "HTTP 429", "answer cut off", "timeout", ""]
    assert errors["HTTP 429"] == "HTTP 429: queue full"
    assert records[3].closed == pytest.approx(13.0)
    found = summarize(records)
    assert (found.completed, found.failed) == (2, 3)
    assert found.metrics()["request_rate"].value == pytest.approx(2 / 13)


def test_answers_that_are_not_streamed() -> None:
    async def work(loop: VirtualLoop) -> list[RequestRecord]:
        bench = Bench(loop, Behaviour(ttft=0.1, itl=0.1), stream=False)
        return await bench.open(sessions(1), [0.0])

    (one,) = run(work)
    found = summarize([one])
    assert set(found.distributions) == {"e2el", "send_lag"}
    assert ms(found, "e2el") == pytest.approx(500)
    assert one.output_tokens == 5
    assert any("not streamed" in note for note in found.notes)


def test_conversations_contain_earlier_answers_and_wait_for_them() -> None:
    async def work(loop: VirtualLoop) -> tuple[list[RequestRecord], FakeLLM]:
        bench = Bench(loop, Behaviour(ttft=0.1, itl=0.1))
        return await bench.open(sessions(1, tokens=2, turns=3, think=1.5), [0.0]), bench.server

    records, server = run(work)
    assert [one.scheduled for one in records] == pytest.approx([0.0, 1.7, 3.4])
    assert {one.session for one in records} == {0}
    asked = [body["messages"] for _, body in server.seen]
    assert [len(messages) for messages in asked] == [1, 3, 5]
    assert asked[2][:2] == asked[1][:2]
    assert asked[1][1] == {"role": "assistant", "content": " word word"}
    assert [message["role"] for message in asked[2]] == ["user", "assistant"] * 2 + ["user"]


def test_prompts_as_token_ids() -> None:
    async def work(loop: VirtualLoop) -> FakeLLM:
        bench = Bench(loop, Behaviour(), ("quire", "completions"), ids=range(50, 60))
        await bench.open(sessions(2, words=7), [0.0, 0.0])
        return bench.server

    server = run(work)
    prompts = [body["prompt"] for _, body in server.seen]
    assert [len(ids) for ids in prompts] == [7, 7]
    assert all(50 <= token < 60 for ids in prompts for token in ids)
    with pytest.raises(ValueError, match="takes no token ids"):
        HttpSender(None, endpoint("openai", "chat"), RequestOptions(), Speller(ids=range(9)))  # type: ignore[arg-type]


def test_requests_in_the_dialect_of_each_server() -> None:
    """Options have the right names in every dialect, and only servers that know ignore_eos get it."""

    async def work(loop: VirtualLoop, way: tuple[str, str]) -> dict[str, Any]:
        bench = Bench(loop, Behaviour(), way, seed=5, temperature=0.5, extra={"more": 1})
        await bench.open(sessions(1, tokens=6), [0.0])
        return bench.server.seen[0][1]

    asked = {way: run(lambda loop, way=way: work(loop, way)) for way in WAYS}
    assert all(body["more"] == 1 for body in asked.values())
    assert "ignore_eos" not in asked["openai", "chat"]
    assert asked["vllm", "completions"]["ignore_eos"] is True
    assert asked["openai", "chat"]["stream_options"] == {"include_usage": True}
    assert asked["llama-server", "native"]["n_predict"] == 6
    assert asked["sglang", "native"]["sampling_params"] == {
        "ignore_eos": True, "max_new_tokens": 6, "temperature": 0.5,
    }  # fmt: skip
    assert asked["tgi", "native"]["parameters"]["max_new_tokens"] == 6
    assert asked["ollama", "native"]["options"] == {"temperature": 0.5, "seed": 5, "num_predict": 6}
