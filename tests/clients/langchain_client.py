"""LangChain's OpenAI classes: calls, streams with usage, batches, async, logprobs, stops, chains, errors."""

from __future__ import annotations

import asyncio
import sys
from importlib.metadata import version
from typing import Any

import openai
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_openai import ChatOpenAI, OpenAI

MESSAGES = [SystemMessage("Be brief."), HumanMessage("Hi"), AIMessage("Hello."), HumanMessage("And?")]


def main() -> None:
    base: dict[str, Any] = {"model": "tiny", "base_url": f"{sys.argv[1]}/v1", "seed": 3, "max_retries": 0}
    chat = ChatOpenAI(**base, temperature=1.0, max_tokens=24, stream_usage=True)
    whole(chat)
    asyncio.run(asynchronous(chat))
    completions(OpenAI(**base, temperature=0, max_tokens=8))
    errors(base)
    print("langchain-openai", version("langchain-openai"), "langchain-core", version("langchain-core"))


def whole(chat: ChatOpenAI) -> None:
    answer = chat.invoke(MESSAGES)
    assert isinstance(answer.content, str)
    assert answer.content
    assert answer.usage_metadata is not None
    assert answer.usage_metadata["total_tokens"] == sum(
        answer.usage_metadata[k] for k in ("input_tokens", "output_tokens")
    )
    assert answer.response_metadata["finish_reason"] in {"stop", "length"}
    assert answer.response_metadata["model_name"] == "tiny"

    chunks = list(chat.stream(MESSAGES))
    assert "".join(chunk.content for chunk in chunks) == answer.content
    total = chunks[0]
    for chunk in chunks[1:]:
        total += chunk
    assert total.usage_metadata is not None
    assert total.usage_metadata["output_tokens"] == answer.usage_metadata["output_tokens"]

    prompt = ChatPromptTemplate.from_messages([("system", "You answer {how}."), ("user", "{question}")])
    chain = prompt | chat | StrOutputParser()
    asked = [{"how": "briefly", "question": f"{i}?"} for i in range(6)]
    assert chain.batch(asked) == [chain.invoke(one) for one in asked]

    listed = (
        chat.bind(logprobs=True, top_logprobs=2).invoke(MESSAGES).response_metadata["logprobs"]["content"]
    )
    assert len(listed[0]["top_logprobs"]) == 2
    stop = answer.content[4]
    assert chat.invoke(MESSAGES, stop=[stop]).content == answer.content[: answer.content.index(stop)]
    several = chat.generate([MESSAGES], n=3).generations[0]
    assert len(several) == 3
    extra = chat.bind(extra_body={"top_k": 1}).invoke(MESSAGES)  # vLLM's fields
    assert extra.content == chat.bind(temperature=0).invoke(MESSAGES).content


async def asynchronous(chat: ChatOpenAI) -> None:
    expected = chat.invoke(MESSAGES).content
    answers = await asyncio.gather(*(chat.ainvoke(MESSAGES) for _ in range(8)))
    assert {answer.content for answer in answers} == {expected}
    assert "".join([chunk.content async for chunk in chat.astream(MESSAGES)]) == expected
    async for _ in chat.astream(MESSAGES):
        break  # leaves in the middle


def completions(model: OpenAI) -> None:
    assert isinstance(model.invoke("one two"), str)
    assert "".join(model.stream("one two")) == model.invoke("one two")
    both = model.generate(["one", "two"])
    assert [g[0].text for g in both.generations] == [model.invoke("one"), model.invoke("two")]
    assert both.llm_output is not None
    assert both.llm_output["token_usage"]["completion_tokens"] == 16


def errors(base: dict[str, Any]) -> None:
    for error, options, text in (
        (openai.NotFoundError, {"model": "other"}, "Hi"),
        (openai.AuthenticationError, {"api_key": "wrong"}, "Hi"),
        (openai.BadRequestError, {"temperature": -1}, "Hi"),
        (openai.BadRequestError, {}, "too long " * 5000),
    ):
        try:
            ChatOpenAI(**base | options).invoke(text)
        except error:
            continue
        raise AssertionError(f"no {error.__name__} for {options}")
    tools = ChatOpenAI(**base).bind_tools([{"type": "function", "function": {"name": "f", "parameters": {}}}])
    try:
        tools.invoke("Hi")
    except openai.BadRequestError as error:
        refused = error.param
    else:
        refused = ""
    assert refused == "tools"  # not there yet, and said by name


if __name__ == "__main__":
    main()
