"""The shipped model through every interface: whatever way it is asked, it says the same, and what it says is sound."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tools.default_model.grading import parse_calls
from tools.default_model.handwritten import load, unsound

from helpers.backends import NATIVE
from helpers.memory import memory_for
from helpers.server import LiveServer, serving, stream_text
from helpers.specs import F32
from helpers.stepper import Stepper
from quire import LLM, AsyncLLM, SamplingParams
from quire.cli.main import main
from quire.executor.base import Limits
from quire.loader import DEFAULT_MODEL, resolve_model
from quire.offline.scorer import log_softmax

ASKED = (
    "hi",
    "what is ttft",
    "What is 27 + 58?",
    "HELLO",
    "Sort these words: pear, apple, fig",
    "Write a short story about a fox.",
)
RAW = ("Once upon a time", "What is TTFT?", "hi")
MOST = 40
GREEDY = SamplingParams(temperature=0.0, max_tokens=MOST)
FIELDS: dict[str, Any] = {"temperature": 0, "max_tokens": MOST}
FOLDER = resolve_model(DEFAULT_MODEL)


def asks(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(progress=False, max_num_seqs=8, memory=memory_for(2**30)) as made:
        yield made


@pytest.fixture(scope="module")
def said(llm: LLM) -> dict[str, str]:
    """What `LLM.chat` answers, by question."""
    outputs = llm.chat([asks(text) for text in ASKED], GREEDY)
    return {text: output.outputs[0].text for text, output in zip(ASKED, outputs, strict=True)}


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with serving(FOLDER, {"max_model_len": 1024, "memory": memory_for(2**29)}) as live:
        yield live


# ---- the server


def test_chat_completions(server: LiveServer, said: dict[str, str]) -> None:
    for text, expected in said.items():
        (choice,) = server.chat(text, **FIELDS).json["choices"]
        assert choice["message"]["content"] == expected
        assert choice["finish_reason"] in {"stop", "length"}
        streamed = server.chat(text, stream=True, **FIELDS)
        assert streamed.events[-1] == "[DONE]"
        assert stream_text(streamed)[0] == expected
        parts = server.chat([{"type": "text", "text": text}], response_format={"type": "text"}, **FIELDS)
        assert parts.json["choices"][0]["message"]["content"] == expected


def test_completions_of_a_rendered_chat(server: LiveServer, said: dict[str, str]) -> None:
    """The prompt as text and as ids, which are those of `/tokenize`; and whole or streamed."""
    text, expected = ASKED[1], said[ASKED[1]]
    rendered = server.post("/v1/chat/completions/render", {"messages": asks(text)}).json
    tokens = server.post("/tokenize", {"messages": asks(text)}).json
    assert tokens["tokens"] == rendered["token_ids"]
    assert server.post("/detokenize", {"tokens": tokens["tokens"]}).json["prompt"] == rendered["prompt"]
    for prompt in (rendered["prompt"], rendered["token_ids"]):
        assert server.complete(prompt, **FIELDS).json["choices"][0]["text"] == expected
        assert stream_text(server.complete(prompt, stream=True, **FIELDS))[0] == expected


def test_completions_of_raw_text(server: LiveServer, llm: LLM) -> None:
    outputs = llm.generate(list(RAW), GREEDY)
    choices = server.complete(list(RAW), **FIELDS).json["choices"]
    assert [c["text"] for c in choices] == [o.outputs[0].text for o in outputs]


def test_a_conversation(server: LiveServer, llm: LLM) -> None:
    """A system message and earlier turns, and the end of the answer given beforehand."""
    chat = [
        {"role": "system", "content": "Be brief."}, *asks("My name is Ada."),
        {"role": "assistant", "content": "Nice to meet you, Ada!"}, *asks("whats my name"),
    ]  # fmt: skip
    expected = llm.chat(chat, GREEDY)[0].outputs[0].text
    reply = server.post("/v1/chat/completions", {"messages": chat, **FIELDS})
    assert reply.json["choices"][0]["message"]["content"] == expected
    begun = [*chat, {"role": "assistant", "content": "Your name is"}]
    body = {"messages": begun, "continue_final_message": True, "add_generation_prompt": False, **FIELDS}
    assert server.post("/v1/chat/completions", body).json["choices"][0]["message"]["content"].strip()


PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["kind", "tall", "new"]}, "maxItems": 2},
        "address": {
            "type": "object",
            "properties": {
                "street": {"type": "string", "maxLength": 16},
                "number": {"enum": [None, 1, 22]},
            },
            "required": ["street"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
SUBJECTS = (
    "Ada", "Bob from Rome", "a fox", "the sun", "my aunt", "What is TTFT?", "27 + 58", "HELLO", "", "nobody", "a poem",
    "two cats", "a list of words", "JSON", "{", '"', "a river", "an engine", "the colour red", "yesterday",
)  # fmt: skip


def is_person(found: Any) -> bool:
    """Whether a value is one of PERSON."""
    place = found.pop("address", {"street": ""})
    return (
        list(found) == ["name", "age", "tags"]
        and isinstance(found["name"], str)
        and 1 <= len(found["name"]) <= 20
        and type(found["age"]) is int
        and 0 <= found["age"] <= 150
        and isinstance(found["tags"], list)
        and len(found["tags"]) <= 2
        and {"kind", "tall", "new"}.issuperset(found["tags"])
        and {"street", "number"}.issuperset(place)
        and len(place["street"]) <= 16
        and place.get("number") in {None, 1, 22}
    )


def test_answers_under_a_schema_are_valid(server: LiveServer) -> None:
    """Twenty prompts, asked at once and sampled as the model likes: each answer is JSON that fits."""
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}

    def ask(text: str) -> dict[str, Any]:
        reply = server.chat(f"Describe {text} as JSON.", response_format=form, max_tokens=400, seed=1)
        return reply.json["choices"][0]  # type: ignore[no-any-return]

    with ThreadPoolExecutor(8) as pool:
        choices = list(pool.map(ask, SUBJECTS))
    assert {choice["finish_reason"] for choice in choices} == {"stop"}
    assert all(is_person(json.loads(choice["message"]["content"])) for choice in choices)


def test_the_apis_of_others(server: LiveServer, said: dict[str, str]) -> None:
    """The same text in Anthropic's, Ollama's and OpenAI's newer form; vectors are not what the model is for."""
    text, expected = next(iter(said.items()))
    length = GREEDY.max_tokens
    message = server.post(
        "/v1/messages", {"messages": asks(text), "max_tokens": length, "temperature": 0}
    ).json
    assert message["content"] == [{"type": "text", "text": expected}]
    options = {"temperature": 0, "num_predict": length}
    told = server.post("/api/chat", {"messages": asks(text), "stream": False, "options": options}).json
    assert told["message"]["content"] == expected
    answer = server.post("/v1/responses", {"input": text, "max_output_tokens": length, "temperature": 0}).json
    assert answer["output"][-1]["content"][0]["text"] == expected
    assert "embed" in server.post("/v1/embeddings", {"input": text}).error(400)


# ---- Python


def test_streams(llm: LLM, said: dict[str, str]) -> None:
    for text, expected in said.items():
        assert "".join(delta.text for delta in llm.stream_chat(asks(text), GREEDY)) == expected


def test_async(said: dict[str, str]) -> None:
    async def ask() -> tuple[list[str], str]:
        async with AsyncLLM(max_num_seqs=8, memory=memory_for(2**29)) as llm:
            answers = await asyncio.gather(*(llm.chat(asks(text), GREEDY) for text in ASKED))
            deltas = [delta.text async for delta in llm.stream_chat(asks(ASKED[0]), GREEDY)]
            return [answer.outputs[0].text for (answer,) in answers], "".join(deltas)

    answers, streamed = asyncio.run(ask())
    assert answers == list(said.values())
    assert streamed == said[ASKED[0]]


def load_tools() -> list[dict[str, Any]]:
    """One function of the prompts written by hand each."""
    found = {tool["function"]["name"]: tool for item in load() for tool in item.tools}
    return [found[name] for name in sorted(found)]


def test_tools_through_the_template(llm: LLM) -> None:
    """Asked for what a function does, the model calls one in the template's form, mostly the right one."""
    items = [item for item in load() if item.checks and item.checks[0][0] == "call"]
    prompts = [
        llm.encode_chat([turn.message() for turn in item.turns], tools=list(item.tools)) for item in items
    ]
    outputs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=80))
    named = 0
    for item, output in zip(items, outputs, strict=True):
        calls = parse_calls(output.outputs[0].text)
        wanted = json.loads(item.checks[0][1])["name"]
        named += len(calls) == 1 and isinstance(calls[0], dict) and calls[0].get("name") == wanted
    assert named > len(items) / 2


def call_items() -> list[Any]:
    """Prompts written by hand to which the answer is a call."""
    return [item for item in load() if item.checks and item.checks[0][0] == "call"][:6]


def test_tool_calls_through_every_interface(
    server: LiveServer,
    llm: LLM,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The same calls whole and streamed, over HTTP, from Python and in the chat; each fits the schema it was given."""
    asked = 0
    for item in call_items():
        chat, tools = [turn.message() for turn in item.turns], list(item.tools)
        params = SamplingParams(temperature=0.0, max_tokens=120)
        (output,) = llm.chat(chat, params, tools=tools)
        found = [(call.name, json.loads(call.arguments)) for call in output.outputs[0].tool_calls]
        if not found:  # the card says how often
            continue
        asked += 1
        body = {"messages": chat, "tools": tools, **FIELDS, "max_tokens": 120}
        (choice,) = server.post("/v1/chat/completions", body).json["choices"]
        called = [
            (call["function"]["name"], json.loads(call["function"]["arguments"]))
            for call in choice["message"]["tool_calls"]
        ]
        schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in tools}
        for name, arguments in called:
            assert set(schemas[name].get("required", ())) <= set(arguments)
        assert choice["finish_reason"] == "tool_calls"
        assert found == called
        kept = chat, tools, called
    assert asked >= 2
    chat, tools, called = kept
    stream = llm.stream_chat(chat, params, tools=tools)
    parts = [part for delta in stream for part in delta.parts or ()]
    assert [part.text for part in parts if part.kind == "call"] == [
        call.name for call in stream.output.outputs[0].tool_calls
    ]
    path = tmp_path / "tools.json"
    path.write_text(json.dumps(tools))
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{chat[-1]['content']}\nresult\n"))
    assert (
        main(["chat", "--no-history", "--temperature", "0", "--max-tokens", "120", "--tools", str(path)]) == 0
    )
    assert f"→ {called[0][0]}(" in capsys.readouterr().err


def test_async_tool_calls(llm: LLM) -> None:
    item = call_items()[0]
    chat, tools = [turn.message() for turn in item.turns], list(item.tools)
    params = SamplingParams(temperature=0.0, max_tokens=120)
    (output,) = llm.chat(chat, params, tools=tools)

    async def ask() -> tuple[Any, list[Any]]:
        async with AsyncLLM(max_num_seqs=8, memory=memory_for(2**29)) as model:
            (whole,) = await model.chat(chat, params, tools=tools)
            return whole, [delta async for delta in model.stream_chat(chat, params, tools=tools)]

    whole, deltas = asyncio.run(ask())
    expected = [(call.name, call.arguments) for call in output.outputs[0].tool_calls]
    assert [(call.name, call.arguments) for call in whole.outputs[0].tool_calls] == expected
    parts = [part for delta in deltas for part in delta.parts or ()]
    assert "".join(p.text for p in parts if p.kind == "arguments") == "".join(text for _, text in expected)


def test_samples_differ_and_are_sound(llm: LLM) -> None:
    """At temperature 0.8 a story comes out another each time, and none is garbage in form."""
    params = SamplingParams(temperature=0.8, seed=1, n=5, max_tokens=200)
    (output,) = llm.chat(asks("Tell me a short story."), params)
    texts = [sample.text for sample in output.outputs]
    assert len(set(texts)) == 5
    for text in texts:
        assert not unsound(text), text
        assert len(text.split()) > 15


# ---- the command line


@pytest.mark.parametrize("text", RAW)
def test_generate(text: str, llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    expected = llm.generate([text], GREEDY)[0].outputs[0].text
    command = ["generate", "--prompt", text, "--temperature", "0", "--max-tokens", str(MOST), "--quiet"]
    assert main(command) == 0
    assert capsys.readouterr().out == expected + "\n"


def test_generate_chat(said: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    command = ["generate", "--chat", "--prompt", ASKED[1], "--max-tokens", str(MOST), "--json", "--quiet"]
    assert main([*command, "--temperature", "0"]) == 0
    assert json.loads(capsys.readouterr().out)["outputs"][0]["text"] == said[ASKED[1]]


def test_chat_command(llm: LLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Two turns from standard input; the second answer follows from both."""
    monkeypatch.setattr("sys.stdin", io.StringIO("hi\nwhat is ttft\n"))
    command = ["chat", "--quiet", "--no-history", "--temperature", "0", "--max-tokens", str(MOST)]
    assert main(command) == 0
    chat: list[dict[str, Any]] = []
    expected = ""
    for text in ("hi", "what is ttft"):
        chat += asks(text)
        answer = llm.chat(chat, GREEDY)[0].outputs[0].text
        chat.append({"role": "assistant", "content": answer})
        expected += answer + "\n"
    assert capsys.readouterr().out == expected


# ---- executors, transformers, GGUF


def test_greedy_text_of_both_executors() -> None:
    """Equal in float32. Bits of logits differ between the executors, so only a tie could make a text differ."""
    found = []
    for executor in ("native", "torch"):
        with LLM(executor=executor, dtype="float32", progress=False, memory=memory_for(2**28)) as llm:
            outputs = llm.chat([asks(text) for text in ASKED], GREEDY)
            found.append([output.outputs[0].text for output in outputs])
    assert found[0] == found[1]


def test_distance_from_transformers(llm: LLM) -> None:
    """KL and agreement of the first choice in float32, over prompts written by hand and the model's answers.

    Measured with seven million parameters and 1,529 positions: mean 7e-12 nats, largest 5e-10, all first choices equal.
    """
    model = transformers.AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)
    items = [item for item in load() if item.turns][::12]
    prompts = [llm.encode_chat([t.message() for t in i.turns], tools=list(i.tools) or None) for i in items]
    outputs = llm.generate(prompts, GREEDY)
    texts = [p + list(o.outputs[0].token_ids) for p, o in zip(prompts, outputs, strict=True)]
    longest = max(map(len, texts))
    limits = Limits(longest, len(texts), longest, longest, len(texts) * (longest // 16 + 1))
    executor = NATIVE.load(FOLDER, F32)
    stepper = Stepper(executor.program, limits)
    executor.bind(limits, stepper.arrays)
    kl: list[float] = []
    agreed: list[bool] = []
    for ids in texts:
        number = stepper.add(ids)
        log_q = log_softmax(stepper.step(executor, {number: len(ids)})[number])
        with torch.inference_mode():
            log_p = log_softmax(model(torch.tensor([ids])).logits[0].numpy())
        kl += (np.exp(log_p) * (log_p - log_q)).sum(-1).tolist()
        agreed += (log_p.argmax(-1) == log_q.argmax(-1)).tolist()
    executor.close()
    assert np.mean(kl) < 1e-8
    assert np.max(kl) < 1e-6
    assert np.mean(agreed) > 0.999


def test_gguf_says_the_same(tmp_path: Path, llm: LLM, said: dict[str, str]) -> None:
    path = tmp_path / "out.gguf"
    assert main(["convert", DEFAULT_MODEL, str(path), "--quiet"]) == 0
    with LLM(path, progress=False, memory=memory_for(2**29)) as converted:
        outputs = converted.chat([asks(text) for text in ASKED], GREEDY)
        assert [output.outputs[0].text for output in outputs] == list(said.values())
        raw = [o.outputs[0].text for o in converted.generate(list(RAW), GREEDY)]
    assert raw == [o.outputs[0].text for o in llm.generate(list(RAW), GREEDY)]
