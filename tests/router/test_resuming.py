"""Streams that go on with another server: their text is that of an undisturbed stream, or they end with an error."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import random
import signal
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from helpers.fake_llm import Behaviour
from helpers.process import Process, until
from helpers.raw_server import RawServer
from helpers.raw_server import stream as raw_stream
from helpers.routed import routed
from quire.config.shipped import shipped_models
from quire.router.resuming import (
    CannotResumeError,
    DeliveredStream,
    ResumedStream,
    events_of,
    is_resumable,
    with_seed,
)
from quire.router.routed_request import AskedOfServers, with_field
from quire.routing.router_policies import ANSWER_TOKEN
from quire.util.http_client import body_size

REASONING, TEXT = "let me think about it", "The answer is 42, and it stays 42 wherever it comes from. "


def stream(pieces: list[tuple[str, str]], name: str = "one", fingerprint: str = "fp_1") -> list[bytes]:
    """Events of a chat: the role, texts by field, the reason of the end, usage."""

    def event(choices: list[dict[str, Any]], **more: Any) -> bytes:
        body = {
            "id": name,
            "created": len(name),
            "system_fingerprint": fingerprint,
            "choices": choices,
            **more,
        }
        return b"data: " + json.dumps(body).encode() + b"\n\n"

    said = [event([{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}])]
    said += [event([{"index": 0, "delta": {field: text}, "finish_reason": None}]) for field, text in pieces]
    said.append(event([{"index": 0, "delta": {}, "finish_reason": "stop"}]))
    return [*said, event([], usage={"completion_tokens": 9}), b"data: [DONE]\n\n"]


def cut(generator: random.Random) -> list[tuple[str, str]]:
    """The texts in pieces of random length: servers put together what a slow reader has not read."""
    pieces = []
    for field, text in (("reasoning_content", REASONING), ("content", TEXT * 3)):
        at = 0
        while at < len(text):
            size = generator.randrange(1, 12)
            pieces.append((field, text[at : at + size]))
            at += size
    return pieces


def samples(data: bytes) -> dict[int, str]:
    """The text of each sample of a stream that is complete."""
    assert data.endswith(b"data: [DONE]\n\n")
    found: dict[int, str] = {}
    for payload in events_of(data):
        for choice in () if payload == b"[DONE]" else json.loads(payload)["choices"]:
            found[choice["index"]] = found.get(choice["index"], "") + (choice["delta"].get("content") or "")
    return found


def texts(data: bytes) -> dict[str, str]:
    found: dict[str, str] = {}
    for line in data.split(b"\n\n"):
        if not line or line == b"data: [DONE]":
            continue
        for choice in json.loads(line.removeprefix(b"data: "))["choices"]:
            for field, text in choice["delta"].items():
                found[field] = found.get(field, "") + text
    return found


@pytest.mark.parametrize("seed", range(200))
def test_what_follows_completes_what_was_sent(seed: int) -> None:
    """Cut after any event, pieces of any length on both servers, bytes in any portions."""
    generator = random.Random(seed)
    first, second = stream(cut(generator)), b"".join(stream(cut(generator), "another"))
    sent = b"".join(first[: generator.randrange(0, len(first))])
    resumed, rest, at = ResumedStream(DeliveredStream(sent)), b"", 0
    while at < len(second):
        size = generator.randrange(1, 400)
        rest += resumed.feed(second[at : at + size])
        at += size
    resumed.end()
    whole = sent + rest
    assert texts(whole) == {"role": "assistant", "reasoning_content": REASONING, "content": TEXT * 3}
    assert whole.count(b'"stop"') == 1
    assert whole.count(b"usage") >= 1
    assert whole.endswith(b"data: [DONE]\n\n")
    if sent:
        ids = {json.loads(line[6:])["id"] for line in whole.split(b"\n\n") if line and b"[DONE]" not in line}
        assert ids == {"one"}


def test_a_stream_that_has_ended_with_an_error_does_not_go_on() -> None:
    """Such as one that came from another router, which has lost its server: the client knows that it has ended."""
    said = stream([("content", "The ")])[:2]
    DeliveredStream(b"".join(said))
    with pytest.raises(CannotResumeError, match="ended with an error"):
        DeliveredStream(b"".join(said) + b'data: {"error":{"code":"backend_lost"}}\n\n')


@pytest.mark.parametrize(
    ("other", "why"),
    [
        (stream([("content", "Something else entirely")]), "differs"),
        (stream([("content", "The")]), "parts|shorter"),
        (stream([("content", TEXT * 3)], fingerprint="fp_2"), "other weights"),
    ],
)
def test_another_text_is_never_glued_on(other: list[bytes], why: str) -> None:
    sent = b"".join(stream([("content", TEXT)])[:2])
    resumed = ResumedStream(DeliveredStream(sent))

    def follow() -> None:
        resumed.feed(b"".join(other))
        resumed.end()

    with pytest.raises(CannotResumeError, match=why):
        follow()


def test_unknown_forms_and_complete_streams_do_not_go_on() -> None:
    lists = {"tokens": ["x"], "token_logprobs": []}
    for said in ({"unknown": [1]}, {"tokens": ["x", "y"], "token_logprobs": [-1.0]}):
        scored = {"id": "a", "choices": [{"index": 0, "delta": {"content": "x"}, "logprobs": lists | said}]}
        with pytest.raises(CannotResumeError, match="form"):
            DeliveredStream(b"data: " + json.dumps(scored).encode() + b"\n\n")
    with pytest.raises(CannotResumeError):
        DeliveredStream(b"".join(stream([("content", "x")])))


def follow(resumed: ResumedStream, data: bytes) -> bytes:
    rest = resumed.feed(data)
    resumed.end()
    return rest


def scored_events(generator: random.Random, name: str, samples: int, before: list[int]) -> list[bytes]:
    """Events of several samples, in any order, each token with its log-probability but for the first ones `before`."""
    left = {sample: list(enumerate(f"{word} " for word in TEXT.split())) for sample in range(samples)}
    made = []
    while left:
        sample = generator.choice(sorted(left))
        count = before[sample] or generator.randrange(1, 4)
        some, left[sample] = left[sample][:count], left[sample][count:]
        scores = [{"token": text, "logprob": -at / 7 - sample} for at, text in some]
        body: dict[str, Any] = {"index": sample, "delta": {"content": "".join(text for _, text in some)}}
        body["logprobs"] = None if before[sample] else {"content": scores, "refusal": None}
        before[sample] = 0
        if not left[sample]:
            del left[sample]
            body["finish_reason"] = "length"
        made.append({"id": name, "created": 1, "system_fingerprint": "fp_1", "choices": [body]})
    return [b"data: " + json.dumps(event).encode() + b"\n\n" for event in made]


def scored_choices(data: bytes) -> dict[int, tuple[str, list[Any], list[str]]]:
    found: dict[int, tuple[str, list[Any], list[str]]] = {}
    for line in data.split(b"\n\n"):
        for choice in json.loads(line[6:])["choices"] if line else ():
            text, scores, reasons = found.get(choice["index"], ("", [], []))
            scores = scores + (choice.get("logprobs") or {"content": []})["content"]
            reason = choice.get("finish_reason")
            found[choice["index"]] = (
                text + choice["delta"]["content"],
                scores,
                reasons + [reason] * bool(reason),
            )
    return found


@pytest.mark.parametrize("seed", range(100))
def test_samples_and_log_probabilities_go_on(seed: int) -> None:
    """Cut anywhere: each token has its log-probability once, whether the other server begins behind some of them, which
    it does not score, or computes all of them again."""
    generator = random.Random(seed)
    first = scored_events(generator, "one", 3, [0, 0, 0])
    whole, sent = scored_choices(b"".join(first)), b"".join(first[: generator.randrange(1, len(first))])
    had = scored_choices(sent)
    given = [max(0, len(had[i][1]) - 1) if i in had and seed % 2 else 0 for i in range(3)]
    second = b"".join(scored_events(generator, "two", 3, [*given]))
    rest = follow(ResumedStream(DeliveredStream(sent), given), second)
    assert scored_choices(sent + rest) == whole
    changed = second.replace(b'"logprob": -0.0', b'"logprob": -0.5')
    if changed != second and had.get(0, ("", []))[1] and not given[0]:
        with pytest.raises(CannotResumeError, match="log-prob"):
            ResumedStream(DeliveredStream(sent), given).feed(changed)
    if any(given):  # who takes the numbers of scored tokens for those of all loses some, and is found out
        with pytest.raises(CannotResumeError):
            follow(ResumedStream(DeliveredStream(sent)), second)


def test_log_probabilities_may_follow_the_text_of_their_tokens() -> None:
    """As they do where a reader was slow, and what was given comes together with what is new."""

    def event(text: str, *scores: float) -> bytes:
        said = {"content": [{"token": "x", "logprob": score} for score in scores]} if scores else None
        choice = {"index": 0, "delta": {"content": text}, "logprobs": said, "finish_reason": None}
        body = {"id": "a", "created": 1, "system_fingerprint": "fp_1", "choices": [choice]}
        return b"data: " + json.dumps(body).encode() + b"\n\n"

    sent = event("one ", -1.0) + event("two ", -2.0)
    rest = follow(ResumedStream(DeliveredStream(sent), [1]), event("one two three ") + event("", -2.0, -3.0))
    assert scored_choices(sent + rest)[0][0] == "one two three "
    assert [score["logprob"] for score in scored_choices(sent + rest)[0][1]] == [-1.0, -2.0, -3.0]
    # Lost between a text of two tokens and its log-probabilities, which come a token at a time from the other server.
    sent, second = event("one two "), event("one ") + event("", -1.0) + event("two ") + event("", -2.0)
    rest = follow(ResumedStream(DeliveredStream(sent)), second)
    assert scored_choices(sent + rest)[0][0] == "one two "
    assert [score["logprob"] for score in scored_choices(sent + rest)[0][1]] == [-1.0, -2.0]


CALLS = [("add", '{"a": 1, "b": "two"}'), ("subtract", "{}"), ("add", '{"a": 3}')]


def calling(generator: random.Random, name: str) -> list[bytes]:
    """Events of a chat that says something and calls functions, whose ids are drawn; arguments in pieces."""
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": None}, {"content": "Let me see."}]
    for number, (function, arguments) in enumerate(CALLS):
        first = {"name": function, "arguments": ""}
        call = {"index": number, "id": f"{name}-{number}", "type": "function", "function": first}
        deltas.append({"tool_calls": [call]})
        at = 0
        while at < len(arguments):
            size = generator.randrange(1, 9)
            part = {"index": number, "function": {"arguments": arguments[at : at + size]}}
            deltas.append({"tool_calls": [part]})
            at += size
    events = [{"index": 0, "delta": delta, "finish_reason": None} for delta in deltas]
    events.append({"index": 0, "delta": {}, "finish_reason": "tool_calls"})
    made = [{"id": name, "created": 1, "system_fingerprint": "fp_1", "choices": [event]} for event in events]
    return [b"data: " + json.dumps(event).encode() + b"\n\n" for event in made] + [b"data: [DONE]\n\n"]


def called(data: bytes) -> list[list[str]]:
    """The calls of a stream: the id, the name and the arguments of each."""
    found: list[list[str]] = []
    for line in data.split(b"\n\n"):
        if not line or line == b"data: [DONE]":
            continue
        for call in json.loads(line[6:])["choices"][0]["delta"].get("tool_calls", ()):
            if call["index"] == len(found):
                found.append([call["id"], call["function"]["name"], ""])
            else:
                assert "id" not in call, "a call has one id"
            found[call["index"]][2] += call["function"].get("arguments", "")
    return found


@pytest.mark.parametrize("seed", range(100))
def test_calls_go_on_where_they_were(seed: int) -> None:
    """Cut anywhere in a call: its id stays what the client knows, and its arguments are completed."""
    generator = random.Random(seed)
    first, second = calling(generator, "one"), b"".join(calling(generator, "another"))
    sent = b"".join(first[: generator.randrange(1, len(first) - 1)])
    resumed = ResumedStream(DeliveredStream(sent))
    rest = resumed.feed(second)
    resumed.end()
    found = called(sent + rest)
    assert [(name, arguments) for _, name, arguments in found] == CALLS
    assert [each[0] for each in found[: len(called(sent))]] == [each[0] for each in called(sent)]
    assert rest.endswith(b"data: [DONE]\n\n")
    other = second.replace(b"subtract", b"multiply")
    if len(called(sent)) > 1:
        with pytest.raises(CannotResumeError):
            ResumedStream(DeliveredStream(sent)).feed(other)


def test_what_can_go_on() -> None:
    path = "/v1/chat/completions"
    assert is_resumable(path, AskedOfServers(stream=True))
    assert not is_resumable(path, AskedOfServers(stream=False))
    assert is_resumable(path, AskedOfServers(stream=True, n=2, logprobs=True))
    assert is_resumable("/v1/completions", AskedOfServers(stream=True, n=2, best_of=2))
    assert not is_resumable("/v1/completions", AskedOfServers(stream=True, n=2, best_of=3))
    assert not is_resumable(path, AskedOfServers(stream=True, return_token_ids=True))
    assert not is_resumable("/v1/responses", AskedOfServers(stream=True))


def test_seeds() -> None:
    assert with_seed(b'{"seed": 3}', AskedOfServers(seed=3)) == b'{"seed": 3}'
    given = b'{"prompt": "}"} '
    made = with_seed(given, AskedOfServers())
    assert isinstance(made, tuple)
    assert memoryview(made[0]).obj is given, "nothing is copied"
    both = with_field(made, "other", b"[1]", replaces=False)
    assert isinstance(both, tuple)
    assert json.loads(b"".join(both)).keys() == {"prompt", "seed", "other"}
    assert len(b"".join(both)) == body_size(both)
    made = with_seed(b' {"seed": null, "stream": true} ', AskedOfServers(seed=None))
    assert isinstance(made, bytes)
    assert made.count(b"seed") == 1, "servers refuse repeated fields"
    drawn = json.loads(made)
    assert drawn["stream"] is True
    assert 0 <= drawn["seed"] < 2**31


def test_events_may_end_with_either_end_of_lines() -> None:
    """A stream of some servers has CRLF: it is passed on as it is, and goes on elsewhere."""
    behaviour = Behaviour(ttft=0.0, itl=0.0, crlf=True)
    lost = Behaviour(ttft=0.0, itl=0.0, crlf=True, cut={1})
    with routed(lost, behaviour, policy="round-robin") as router:
        whole = router.chat("hello", stream=True, tokens=6).text
        assert (whole.count(" word"), whole.endswith("data: [DONE]\r\n\r\n")) == (6, True)
        assert router.chat("hello", stream=True).text.count(" word") == 4
        assert router.chat("hello", stream=True, tokens=6).text.count(" word") == 6
        until(lambda: router.service.context.metrics.resumed == 1)
    said = b"data: {}\n\n", b"data: [DONE]\n"
    with (
        contextlib.closing(RawServer(raw_stream(*said))) as server,
        routed(urls=[server.url, "http://127.0.0.1:9"]) as router,
    ):
        assert router.chat("hello", stream=True).body == b"".join(said), (
            "nothing is left, though no end of it came"
        )


@pytest.mark.parametrize("begins", [True, False])
def test_a_prompt_that_is_sent_again_is_work_until_its_answer_begins(begins: bool) -> None:
    """Afterwards the answer is what is left to do, as with any request."""
    second = Behaviour(ttft=0.0 if begins else 600.0, itl=0.01)
    with routed(Behaviour(ttft=0.0, itl=0.0, cut={0}), second, policy="round-robin") as router:
        body = {"messages": [{"role": "user", "content": "x" * 4000}], "max_tokens": 10**5, "stream": True}
        text, other, left = json.dumps(body).encode(), router.backends.all[1], ANSWER_TOKEN * 128.0
        with socket.create_connection(("127.0.0.1", router.port)) as client, client.makefile("rb") as answer:
            head = (
                b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            )
            client.sendall(b"%bcontent-length: %d\r\n\r\n%b" % (head, len(text), text))
            for _ in range(4 if begins else 2):  # two come from the first server
                while b" word" not in answer.readline():
                    pass
            if begins:
                assert router.do(lambda: (other.waiting, other.work)) == (0.0, left)
            else:
                until(lambda: router.do(lambda: other.waiting) > 1000.0)
                assert router.do(lambda: other.work - other.waiting) == left
        until(lambda: other.requests == 0)
        assert router.do(lambda: (other.waiting, other.work)) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("temperature", "by_ids"),
    [
        (1.0, True),
        pytest.param(0.0, True, marks=pytest.mark.chaos),
        pytest.param(1.0, False, marks=pytest.mark.chaos),
    ],
)
def test_a_server_is_killed_under_streams(temperature: float, by_ids: bool, tmp_path: Path) -> None:
    """kill -9 of one of two servers: every stream has the text of an undisturbed one, and none ends with an error. Half
    of them are of two samples."""
    folder = shipped_models()["quire-mini"]
    key = tmp_path / "router.key"
    key.write_text("a key that all of them have")
    options, routing = (("--router", f"key={key}"), {"kv_key_file": str(key)}) if by_ids else ((), {})
    with concurrent.futures.ThreadPoolExecutor(2) as starts:
        started = [
            starts.submit(Process, folder, "--port", "0", "--max-model-len", "2048", *options)
            for _ in range(2)
        ]
    servers = [each.result() for each in started]
    try:
        urls = [f"http://127.0.0.1:{server.port}" for server in servers]
        with routed(urls=urls, policy="round-robin", **routing) as router:
            asked = {
                "ignore_eos": True,
                "temperature": temperature,
                "seed": 11,
                "stream": True,
            }
            numbers = [1, 2] * 3
            quiet = {
                n: samples(router.chat("Tell me a story", tokens=200, n=n, **asked).body) for n in (1, 2)
            }
            assert [*quiet[2]] == [0, 1]
            with concurrent.futures.ThreadPoolExecutor(len(numbers)) as clients:
                waiting = [
                    clients.submit(router.chat, "Tell me a story", tokens=200, n=n, **asked) for n in numbers
                ]
                while not (
                    all(each.requests for each in router.backends.all) and router.service.context.kept > 2**15
                ):
                    assert not all(each.done() for each in waiting)
                    time.sleep(0.001)
                servers[0].process.send_signal(signal.SIGKILL)
                replies = [each.result() for each in waiting]
            assert [samples(each.body) for each in replies] == [quiet[n] for n in numbers]
            metrics = router.service.context.metrics
            assert metrics.resumed > 0
            assert (metrics.resumed_by_ids > 0) is by_ids
            assert all(b": ids" not in each.body for each in replies)
            until(lambda: router.service.context.kept == 0)
    finally:
        for server in servers:
            server.process.kill()
            server.process.wait()
