"""Structured output of the Python API: LLM and AsyncLLM give the same answers, and others' answers do not change."""

from __future__ import annotations

import asyncio
import json
import os
import re
from typing import Any

import pytest

from helpers.memory import memory_for
from helpers.process import children
from helpers.tokenizers import Folder
from quire import LLM, AsyncLLM, SamplingParams, StructuredOutput
from quire.types import CheckpointError, RequestError

CHAT = [{"role": "user", "content": "Hi"}]
SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": [1, 22]}},
    "required": ["a"],
    "additionalProperties": False,
}
LETTERS = StructuredOutput(regex="[a-c]{3}")


def asked(structured: StructuredOutput | None, **fields: Any) -> SamplingParams:
    return SamplingParams(**{"seed": 5, "max_tokens": 40, **fields}, structured=structured)


PARAMS = [
    asked(LETTERS),
    asked(StructuredOutput(choice=["red", "green"])),
    asked(StructuredOutput(json=SCHEMA, disable_any_whitespace=True)),
    asked(StructuredOutput(grammar='root ::= "x" [0-9]+ "."', syntax="gbnf"), n=2),
    asked(None),
]
PROMPTS = ["one", "two", "three", "four", "five"]


def texts(outputs: list[Any]) -> list[list[str]]:
    return [[sample.text for sample in output.outputs] for output in outputs]


def test_llm_and_async_llm_agree(checkpoint: Folder) -> None:
    folder = checkpoint("llama3.1")
    with LLM(folder, progress=False, max_model_len=200) as llm:
        (plain,) = texts(llm.generate(["five"], PARAMS[-1]))
        expected = texts(llm.generate(PROMPTS, PARAMS))
        letters, colour, data, numbers, free = expected
        assert re.fullmatch("[a-c]{3}", letters[0])
        assert colour[0] in {"red", "green"}
        assert json.loads(data[0])["a"] in {1, 22}
        assert all(re.fullmatch(r"x[0-9]+\.?", text) for text in numbers)
        assert free == plain  # beside the others as alone
        chatted = "".join(delta.text for delta in llm.stream_chat(CHAT, PARAMS[0]))
        assert re.fullmatch("[a-c]{3}", chatted)
        assert texts(llm.chat(CHAT, PARAMS[0])) == [[chatted]]

    async def run() -> None:
        async with AsyncLLM(folder, max_model_len=200) as llm:
            assert texts(await llm.generate(PROMPTS, PARAMS)) == expected
            assert "".join([delta.text async for delta in llm.stream_chat(CHAT, PARAMS[0])]) == chatted
            with pytest.raises(RequestError, match="regex"):
                await llm.generate("x", asked(StructuredOutput(regex="(")))

    asyncio.run(run())


def test_what_is_dropped_and_what_is_refused(checkpoint: Folder) -> None:
    schema = {**SCHEMA, "properties": {"a": {"enum": [1]}, "b": {"format": "made-up"}}}
    with LLM(checkpoint("llama3.1"), progress=False, max_model_len=200) as llm:
        with pytest.raises(RequestError, match="made-up") as refused:
            llm.generate(["a", "b"], asked(StructuredOutput(json=schema)))
        assert refused.value.field.startswith("json")
        (out,) = llm.generate(["a"], asked(StructuredOutput(json=schema, strict=False)))
        assert [said for said in out.dropped if "made-up" in said]
        (out,) = llm.generate(["a"], asked(LETTERS))
        assert out.dropped == ()
    with pytest.raises(RequestError, match="structured: dict is not a StructuredOutput"):
        SamplingParams(structured=SCHEMA)  # type: ignore[arg-type]


TEMPLATE = (
    "{{ (tools or []) | length }} {% for m in messages %}{{ m.content }}{% endfor %} {{ reasoning_effort }}"
    "{% if enable_thinking %}<think>\n{% endif %}"
)
FORMATS: dict[str, Any] = {"tool_call_parser": "hermes", "reasoning_parser": "qwen3"}
CHATTED: dict[str, Any] = {
    "tools": [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}],
    "parallel_tool_calls": False, "chat_template_kwargs": {"enable_thinking": True}, "reasoning_effort": "low",
}  # fmt: skip


def said(sample: Any) -> tuple[str, str, list[tuple[str, str]]]:
    return sample.text, sample.reasoning, [(call.name, call.arguments) for call in sample.tool_calls]


def test_formats_of_answers_are_options(checkpoint: Folder, tmp_path: Any) -> None:
    folder = checkpoint("llama3.1")
    (tmp_path / "chat.jinja").write_text(TEMPLATE)
    value = StructuredOutput(json=SCHEMA, disable_any_whitespace=True)
    form = asked(value, thinking_token_budget=4, n=6, max_tokens=200)
    budget = asked(None, thinking_token_budget=3)
    with LLM(folder, progress=False, max_model_len=250, chat_template=TEMPLATE, **FORMATS) as llm:
        (out,) = llm.chat(CHAT, form, **CHATTED)
        expected = [said(sample) for sample in out.outputs]
        for text, reasoning, calls in expected:
            assert reasoning
            assert bool(text) != bool(calls)
            values = [arguments for _, arguments in calls] or [text]
            assert all(json.loads(value)["a"] in {1, 22} for value in values)
        assert len({bool(text) for text, *_ in expected}) == 2
        (free,) = llm.generate(["Well: <think>\n"], budget)
        closed = free.outputs[0].text
        assert 0 < closed.index("\n</think>") <= 3
        assert llm.encode_chat(CHAT, reasoning_effort="low") != llm.encode_chat(CHAT)

    async def run() -> None:
        async with AsyncLLM(
            folder, max_model_len=250, chat_template=tmp_path / "chat.jinja", **FORMATS
        ) as llm:
            (out,) = await llm.chat(CHAT, form, **CHATTED)
            assert [said(sample) for sample in out.outputs] == expected
            (free,) = await llm.generate(["Well: <think>\n"], budget)
            assert free.outputs[0].text == closed

    asyncio.run(run())
    with pytest.raises(ValueError, match="tool_call_parser: 'x' is not one of cohere2, "):
        LLM(folder, progress=False, tool_call_parser="x")
    with pytest.raises(CheckpointError, match=r"none\.jinja"):
        LLM(folder, progress=False, chat_template="none.jinja")


def test_a_model_without_a_tokenizer_takes_no_structure(checkpoint: Folder, tmp_path: Any) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    for file in checkpoint("llama3.1").iterdir():
        if not file.name.startswith("tokenizer"):
            (bare / file.name).symlink_to(file)
    with LLM(bare, progress=False, max_model_len=200) as llm, pytest.raises(RequestError, match="tokenizer"):
        llm.generate([[5, 6]], asked(LETTERS))


def test_a_bound_without_room_for_grammars_starts_no_compiler(checkpoint: Folder) -> None:
    before = children(os.getpid(), "*")
    with LLM(checkpoint("llama3.1"), progress=False, max_model_len=200, memory=memory_for(96 * 2**20)) as llm:
        assert llm.built.plan.parts["compiler"] == 0
        with pytest.raises(
            RequestError, match="regex: the memory bound leaves no room for grammars"
        ) as raised:
            llm.generate(["one"], asked(LETTERS))
        assert raised.value.field == "regex"
        assert children(os.getpid(), "*") == before
