"""Streams that go on with another server behind the ids of their output: the text is that of one server, and nobody but
who has the key learns ids or gives them."""

from __future__ import annotations

import concurrent.futures
import json
import random
import threading
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers.scripted import scripted_folder
from helpers.server import LiveServer, Reply, request_bytes
from helpers.tool_chats import CITY, FLAG, fold
from quire.config.serving import ServingConfig
from quire.engine.api import StreamDelta
from quire.engine.front.output import OutputBuilder
from quire.router.resuming import DeliveredStream, ResumedStream
from quire.routing.continued import STREAM, OutputIds, ids_event, packed, resume_code, stream_proof, unpacked
from quire.server.access import router_key
from quire.types import Request

KEY = b"a key that all of them have"
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
NAME = "request"
SAMPLED: dict[str, Any] = {
    "max_tokens": 40,
    "temperature": 1.0,
    "seed": 5,
    "ignore_eos": True,
    "stream": True,
}


def chat(**fields: Any) -> dict[str, Any]:
    return SAMPLED | {"messages": [{"role": "user", "content": "Tell me a story"}]} | fields


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LiveServer, LiveServer]]:
    folder = tmp_path_factory.mktemp("continuing")
    (folder / "router.key").write_bytes(KEY)
    options = {
        "router": f"key={folder}/router.key", "tool_call_parser": "hermes", "reasoning_parser": "qwen3"
    }  # fmt: skip
    model = scripted_folder(folder / "model")
    made = [LiveServer(model, {"max_model_len": 1024}, options) for _ in range(2)]
    yield made[0], made[1]
    for server in made:
        server.close()


def asked(server: LiveServer, path: str, body: dict[str, Any], key: bytes = KEY) -> Reply:
    """A request as a router sends it."""
    return server.post(path, body, {"x-request-id": NAME, STREAM: stream_proof(key, NAME)})


def blocks(reply: Reply) -> list[bytes]:
    """The events and comments of a stream."""
    assert reply.status == 200, reply.text
    return [block + b"\n\n" for block in reply.body.split(b"\n\n") if block]


def events(data: bytes) -> list[dict[str, Any]]:
    found = [line[6:] for line in data.decode().split("\n\n") if line]
    return [json.loads(event) for event in found if event != "[DONE]"]


def folded(data: bytes) -> list[Any]:
    """What the events add up to, but for the ids of calls, which are drawn."""
    if b'"delta"' not in data:
        found = events(data)
        texts = "".join(choice["text"] for event in found for choice in event["choices"])
        reasons = [
            c.get("finish_reason") for event in found for c in event["choices"] if c.get("finish_reason")
        ]
        return [texts, reasons]
    choices = fold([event for event in events(data) if event.get("choices")])
    for choice in choices:
        for call in choice["message"].get("tool_calls", ()):
            assert call.pop("id")
    return choices


def take_ids(data: bytes, ids: array[int]) -> bytes:
    """The stream of one sample without its ids, which are put behind `ids`."""
    found = OutputIds()
    data = found.take(data)
    assert found.keys() <= {0}
    ids.extend(found.get(0, []))
    return data


def resumed_output(mark: str, *ids: array[int], key: bytes = KEY, name: str = NAME) -> dict[str, str]:
    text = packed(ids)
    return {"ids": text, "mark": mark, "code": resume_code(key, name, mark, text)}


def goes_on(second: LiveServer, path: str, body: dict[str, Any], mark: str, sent: bytes) -> bytes:
    """All that a client gets whose first server was lost after `sent`."""
    ids = array("i")
    had = take_ids(sent, ids)
    reply = asked(second, path, body | {"resumed_output": resumed_output(mark, ids[:-1])})
    assert reply.status == 200, reply.text
    follow = ResumedStream(DeliveredStream(had), [len(ids) - 1])
    rest = follow.feed(reply.body)
    follow.end()
    assert follow.ids[0][: len(ids)] == ids, "the second server names them all"
    return had + rest


REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "greedy": (CHAT, chat(temperature=0.0)),
    "sampled": (CHAT, chat()),
    "completion": (TEXT, SAMPLED | {"prompt": "Once upon a time"}),
    "penalties": (
        TEXT,
        SAMPLED
        | {"prompt": "Once", "frequency_penalty": 0.8, "presence_penalty": 0.4, "repetition_penalty": 1.3,
           "dry_multiplier": 0.8, "repeat_last_n": 24, "min_tokens": 40},
    ),
    "xtc": (TEXT, SAMPLED | {"prompt": "Once", "xtc_probability": 0.5, "top_p": 0.9, "bad_words": ["the"]}),
    "grammar": (CHAT, chat(structured_outputs={"regex": "(the [a-z]{3,9} said [0-9]{2}, ){3}end"})),
    "schema": (
        CHAT,
        chat(
            max_tokens=120,
            response_format={
                "type": "json_schema",
                "json_schema": {
                    "name": "x", "strict": True,
                    "schema": {
                        "type": "object", "required": ["first_name", "kind"], "additionalProperties": False,
                        "properties": {"first_name": {"type": "string", "maxLength": 12},
                                       "kind": {"enum": ["one of them", "one of those"]}},
                    },
                },
            },
        ),
    ),
    "calls": (CHAT, chat(max_tokens=300, tools=[CITY, FLAG], tool_choice="required", ignore_eos=False)),
    "thinking": (
        CHAT,
        chat(
            max_tokens=200, chat_template_kwargs={"thinking": True}, thinking_token_budget=9,
            structured_outputs={"regex": "(yes|no), [0-9]{2}"}, ignore_eos=False,
        ),
    ),
    "usage": (CHAT, chat(stream_options={"include_usage": True, "continuous_usage_stats": True})),
}  # fmt: skip


@pytest.mark.parametrize("name", REQUESTS)
def test_the_text_is_that_of_one_server(two: tuple[LiveServer, LiveServer], name: str) -> None:
    """Behind any number of tokens, whatever the client has of their text: nothing is other, and only the rest is
    computed."""
    (path, body), (first, second) = REQUESTS[name], two
    reply, ids = asked(first, path, body), array("i")
    alone, mark = blocks(reply), reply.headers[STREAM]
    whole = folded(take_ids(b"".join(alone), ids))
    generator = random.Random(name)
    for count in {1, len(ids) - 2, *(generator.randrange(1, len(ids) - 1) for _ in range(3))}:
        given = resumed_output(mark, ids[:count])
        answer = asked(second, path, body | {"resumed_output": given})
        assert folded(take_ids(answer.body, array("i"))) == whole
        assert answer.headers[STREAM] == mark
        at_once = array("i")
        take_ids(next(block for block in blocks(answer) if block.startswith(b": ids")), at_once)
        assert at_once[:count] == ids[:count], "they are not computed one after the other"
    for cut in range(1, len(alone), max(1, len(alone) // 3)):
        sent, had = b"".join(alone[:cut]), array("i")
        take_ids(sent, had)
        if len(had) > 1 and b'"finish_reason":"' not in sent:
            assert folded(goes_on(second, path, body, mark, sent)) == whole
    second.wait(second.idle)


def test_stop_strings_across_the_cut(two: tuple[LiveServer, LiveServer]) -> None:
    """A stop string whose beginning one server has made, and its end another: it is found, and not sent."""
    first, second = two
    body = SAMPLED | {"prompt": "Once upon a time", "temperature": 0.0}
    text = folded(take_ids(asked(first, TEXT, body).body, array("i")))[0]
    stop = text[12:18]
    body |= {"stop": [stop]}
    reply = asked(first, TEXT, body)
    alone, whole = blocks(reply), folded(take_ids(reply.body, array("i")))
    assert whole[0] == text[: text.index(stop)]
    assert whole[1] == ["stop"]
    for cut in range(1, len(alone) - 1):
        sent, ids = b"".join(alone[:cut]), array("i")
        take_ids(sent, ids)
        if len(ids) > 1 and b'"finish_reason":"stop"' not in sent:
            assert folded(goes_on(second, TEXT, body, reply.headers[STREAM], sent)) == whole


SEVERAL: dict[str, tuple[str, dict[str, Any]]] = {
    "samples": (CHAT, chat(n=3, max_tokens=16)),
    "scored": (CHAT, chat(max_tokens=16, logprobs=True, top_logprobs=2)),
    "scored samples": (
        TEXT, SAMPLED | {"prompt": "Once", "n": 2, "max_tokens": 16, "logprobs": 2, "frequency_penalty": 0.7},
    ),
    "ends": (TEXT, SAMPLED | {"prompt": "Once", "n": 3, "max_tokens": 16, "logprobs": 0, "stop": ["e"]}),
}  # fmt: skip


def samples_of(data: bytes) -> dict[int, list[Any]]:
    """Text, log-probabilities and reasons of each sample."""
    found: dict[int, list[Any]] = {}
    for event in events(data):
        for choice in event["choices"]:
            sample = found.setdefault(choice["index"], ["", [], []])
            sample[0] += choice.get("text") or choice.get("delta", {}).get("content") or ""
            said = choice.get("logprobs") or {}
            lists = [part for part in said.values() if part]
            sample[1] += zip(*lists, strict=True)
            sample[2] += [choice["finish_reason"]] if choice.get("finish_reason") else []
    return found


@pytest.mark.parametrize("name", SEVERAL)
def test_samples_and_log_probabilities_go_on(two: tuple[LiveServer, LiveServer], name: str) -> None:
    """Behind any event: all samples go on, also those that had ended, and each token has one log-probability."""
    (path, body), (first, second) = SEVERAL[name], two
    reply, count = asked(first, path, body), body.get("n", 1)
    alone, mark = blocks(reply), reply.headers[STREAM]
    every = OutputIds()
    whole = samples_of(every.take(reply.body))
    assert len(whole) == count
    for most in (1, 5, 14):
        given = [every[sample][:-1][: most + sample] for sample in range(count)]
        answer = asked(second, path, body | {"resumed_output": resumed_output(mark, *given)})
        behind = samples_of(OutputIds().take(answer.body))
        for sample, (text, scores, reasons) in whole.items():
            assert behind[sample] == [text, scores[len(given[sample]) :], reasons]
    assert all(bool(scores) == ("logprobs" in body) for _, scores, _ in whole.values())
    again = asked(second, path, body).body
    for cut in range(1, len(alone), 1 + len(alone) // 9):
        ids = OutputIds()
        had = ids.take(b"".join(alone[:cut]))
        given = ids.given(count)
        if b"[DONE]" in had:
            continue
        if any(given):
            answer = asked(second, path, body | {"resumed_output": resumed_output(mark, *given)})
            follow = ResumedStream(DeliveredStream(had), [*map(len, given)])
            assert samples_of(had + follow.feed(answer.body)) == whole
            follow.end()
            assert {
                sample: found[: len(ids[sample])] for sample, found in follow.ids.items() if sample in ids
            } == ids
        follow = ResumedStream(DeliveredStream(had))
        assert samples_of(had + follow.feed(again)) == whole
        follow.end()
    second.wait(second.idle)


def test_others_are_answered_while_given_ids_become_text(
    two: tuple[LiveServer, LiveServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """That is done in a thread; a client that leaves meanwhile leaves nothing behind."""
    first, second = two
    reply, ids = asked(first, CHAT, chat()), array("i")
    whole, reading, go = folded(take_ids(reply.body, ids)), threading.Event(), threading.Event()
    body = chat(resumed_output=resumed_output(reply.headers[STREAM], ids[:20]))
    given = OutputBuilder.given

    def slow(following: OutputBuilder, request: Request) -> list[StreamDelta]:
        reading.set()
        assert go.wait(60)
        return given(following, request)

    monkeypatch.setattr(OutputBuilder, "given", slow)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        answer = pool.submit(asked, second, CHAT, body)
        assert reading.wait(60)
        assert second.post(TEXT, {"prompt": "Once", "max_tokens": 3}).status == 200
        assert not answer.done()
        go.set()
        assert folded(take_ids(answer.result().body, array("i"))) == whole
        reading.clear()
        go.clear()
        with second.connect() as leaves:
            shown = f"x-request-id: {NAME}\r\n{STREAM}: {stream_proof(KEY, NAME)}\r\n"
            leaves.sendall(request_bytes(CHAT, body, headers=shown))
            assert reading.wait(60)
        go.set()
    second.wait(second.idle)


def test_nobody_else_learns_ids(two: tuple[LiveServer, LiveServer]) -> None:
    first, _ = two
    for reply in (
        first.post(CHAT, chat()),
        asked(first, CHAT, chat(), b"another key, and not the same"),
        first.post(CHAT, chat(), {"x-request-id": "other", STREAM: stream_proof(KEY, NAME)}),
        first.post(CHAT, chat(), {"x-request-id": NAME, STREAM: "\xe9"}),
    ):
        assert reply.status == 200
        assert STREAM not in reply.headers
        assert b": ids" not in reply.body


def test_an_output_is_taken_from_who_has_the_key(two: tuple[LiveServer, LiveServer]) -> None:
    """And with its own code, from the same engine, for the same request; others are refused before anything runs."""
    first, second = two
    reply = asked(first, CHAT, chat())
    mark, ids = reply.headers[STREAM], array("i")
    take_ids(reply.body, ids)
    right = resumed_output(mark, ids[:5])
    other = resumed_output(mark, ids[:5], key=b"another key, and not the same")
    for given in (
        other, right | {"ids": packed([ids[:6]])}, right | {"mark": "0" * 32},
        resumed_output(mark, ids[:5], name="another request"), resumed_output(mark, array("i")),
        resumed_output(mark, ids[:5], ids[:5]), resumed_output(mark),
        right | {"ids": "no base64!", "code": resume_code(KEY, NAME, mark, "no base64!")},
    ):  # fmt: skip
        asked(second, CHAT, chat(resumed_output=given)).error(400, "unsupported_parameter", "resumed_output")
    second.post(CHAT, chat(resumed_output=right)).error(400, "unsupported_parameter", "resumed_output")
    second.post(CHAT, chat(resumed_output=right | {"more": 1})).error(400)
    for changed in ({"temperature": 0.5}, {"seed": 6}, {"messages": [{"role": "user", "content": "Other"}]}):
        asked(second, CHAT, chat(resumed_output=right, **changed)).error(
            409, "other_engine", "resumed_output"
        )
    for changed in ({"n": 2}, {"prompt_logprobs": 1}, {"mirostat": 2}):
        asked(second, CHAT, chat(resumed_output=right, **changed)).error(400, None, "resumed_output")
    asked(second, CHAT, chat(resumed_output=right, stream=False)).error(400, None, "resumed_output")
    wrong = resumed_output(mark, array("i", [10**6]))
    assert asked(second, CHAT, chat(resumed_output=wrong)).status == 400, "no token of the vocabulary"
    full = resumed_output(mark, ids)
    assert asked(second, CHAT, chat(resumed_output=full)).status == 400, "it has ended"
    second.wait(second.idle)


def test_another_model_takes_nothing_and_a_copy_does(
    two: tuple[LiveServer, LiveServer], tmp_path: Path
) -> None:
    first, _ = two
    (tmp_path / "router.key").write_bytes(KEY)
    reply = asked(first, CHAT, chat())
    ids = array("i")
    take_ids(reply.body, ids)
    given = chat(resumed_output=resumed_output(reply.headers[STREAM], ids[:5]))
    same, changed = scripted_folder(tmp_path / "same"), scripted_folder(tmp_path / "changed")
    weights = bytearray((changed / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (changed / "model.safetensors").write_bytes(weights)
    for model, options in (
        (same, {"kv_cache_dtype": "int8"}),
        (same, {"dtype": "bfloat16"}),
        (changed, {}),
        (same, {}),
    ):
        parsers = {"tool_call_parser": "hermes", "reasoning_parser": "qwen3"}
        serving = {"router": f"key={tmp_path}/router.key"} | parsers
        server = LiveServer(model, {"max_model_len": 1024, **options}, serving)
        try:
            answer = asked(server, CHAT, given)
            if model is same and not options:
                assert folded(take_ids(answer.body, array("i"))) == folded(take_ids(reply.body, array("i")))
            else:
                answer.error(409, "other_engine", "resumed_output")
        finally:
            server.close()


def test_a_server_does_not_start_without_its_key(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="router: key: "):
        router_key(ServingConfig(router=f"key={tmp_path}/none"))


def test_ids_as_text() -> None:
    for ids in ([[]], [[0]], [[1, 2**31 - 1, 7]], [[5], [], [6, 7]]):
        assert unpacked(packed(ids)) == ids
    for wrong in ("=", "AAA=", "AAAAA", "é", "AAAAAA==,="):
        assert unpacked(wrong) is None


@pytest.mark.parametrize("seed", range(50))
def test_ids_are_taken_out_of_events_and_nothing_else(seed: int) -> None:
    """A text may look like such a comment: in JSON a line break is escaped."""
    generator, data, plain = random.Random(seed), b"", b""
    said: dict[int, list[int]] = {}
    for _ in range(20):
        kind = generator.randrange(3)
        if kind == 0:
            ids = [generator.randrange(2**29) for _ in range(generator.randrange(1, 4))]
            sample = generator.randrange(3)
            data += ids_event(ids, sample)
            said.setdefault(sample, []).extend(ids)
        else:
            text = generator.choice(["\n\n: ids 3\n\n", ": ids 5", "ids\n: ids 7\n\n"])
            event = b"data: " + json.dumps({"text": text}).encode() + b"\n\n" if kind == 1 else b": ping\n\n"
            data, plain = data + event, plain + event
    found = OutputIds()
    assert found.take(data) == plain
    assert {sample: ids.tolist() for sample, ids in found.items()} == said
