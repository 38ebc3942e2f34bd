"""LlamaIndex: completions and chats, whole, streamed and async, typed answers, and an agent."""

from __future__ import annotations

import asyncio
import sys
from importlib.metadata import version
from typing import Any

from asked import BOTH, NOTE, PROMPT, QUESTION, Person, Weather
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike


def main() -> None:
    base: Any = {"model": "tiny", "api_base": f"{sys.argv[1]}/v1", "api_key": "secret", "max_retries": 0}
    llm = OpenAILike(
        **base, is_chat_model=True, is_function_calling_model=True, temperature=0, max_tokens=200,
        context_window=1024, should_use_structured_outputs=True,
    )  # fmt: skip
    messages = [ChatMessage(role="user", content=PROMPT)]
    whole = llm.chat(messages).message.content
    assert "".join(part.delta or "" for part in llm.stream_chat(messages)) == whole
    plain = OpenAILike(**base, is_chat_model=False, temperature=0, max_tokens=8)
    text = plain.complete("one two").text
    assert "".join(part.delta or "" for part in plain.stream_complete("one two")) == text
    assert isinstance(llm.as_structured_llm(Person).chat(messages).raw, Person)
    asyncio.run(together(llm, messages, whole))
    print("llama-index-core", version("llama-index-core"), "openai", version("openai"))


async def together(llm: OpenAILike, messages: list[ChatMessage], expected: str | None) -> None:
    assert (await llm.achat(messages)).message.content == expected
    for question in (QUESTION, BOTH):
        await agent(llm, question)


async def agent(llm: OpenAILike, question: str) -> None:
    weather = Weather()
    tool = FunctionTool.from_defaults(weather.get_weather, name="get_weather", description=NOTE)
    required = "required" if question == QUESTION else None
    worker = FunctionAgent(tools=[tool], llm=llm, system_prompt=None, initial_tool_choice=required)
    weather.check(question, str(await worker.run(question)))


if __name__ == "__main__":
    main()
