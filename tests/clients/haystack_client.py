"""Haystack: chat generators whole, streamed and async, functions, structured output, and a pipeline."""

from __future__ import annotations

import asyncio
import sys
from importlib.metadata import version
from typing import Any

from asked import BOTH, NOTE, PROMPT, QUESTION, Person, Weather
from haystack import Pipeline
from haystack.components.builders import ChatPromptBuilder
from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.dataclasses import ChatMessage
from haystack.tools import Tool
from haystack.utils import Secret

PARAMETERS = {
    "type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"], "additionalProperties": False,
}  # fmt: skip


def generator(**more: Any) -> OpenAIChatGenerator:
    fixed = {"temperature": 0, "max_tokens": 200} | more.pop("generation_kwargs", {})
    return OpenAIChatGenerator(
        model="tiny", api_base_url=f"{sys.argv[1]}/v1", api_key=Secret.from_token("secret"), max_retries=0,
        generation_kwargs=fixed, **more,
    )  # fmt: skip


def main() -> None:
    asked = [ChatMessage.from_user(PROMPT)]
    (whole,) = generator().run(asked)["replies"]
    parts: list[str] = []
    (streamed,) = generator(streaming_callback=lambda chunk: parts.append(chunk.content)).run(asked)[
        "replies"
    ]
    assert "".join(parts) == streamed.text == whole.text
    assert whole.meta["usage"]["completion_tokens"] > 0
    (later,) = asyncio.run(generator().run_async(asked))["replies"]
    assert later.text == whole.text
    (formed,) = generator(generation_kwargs={"response_format": Person}).run(asked)["replies"]
    Person.model_validate_json(formed.text or "")
    piped(whole.text or "")
    for question in (QUESTION, BOTH):
        agent(question)
    print("haystack-ai", version("haystack-ai"), "openai", version("openai"))


def piped(expected: str) -> None:
    pipeline = Pipeline()
    pipeline.add_component("prompt", ChatPromptBuilder(template=[ChatMessage.from_user("{{ text }}")]))
    pipeline.add_component("llm", generator())
    pipeline.connect("prompt.prompt", "llm.messages")
    assert pipeline.run({"prompt": {"text": PROMPT}})["llm"]["replies"][0].text == expected


def agent(question: str) -> None:
    weather = Weather()
    tools = [Tool("get_weather", NOTE, PARAMETERS, weather.get_weather)]
    messages = [ChatMessage.from_user(question)]
    required = {"generation_kwargs": {"tool_choice": "required"}} if question == QUESTION else {}
    (call,) = generator(tools=tools, **required).run(messages)["replies"]
    results = [
        ChatMessage.from_tool(tools[0].invoke(**made.arguments), origin=made) for made in call.tool_calls
    ]
    (answer,) = generator(tools=tools).run([*messages, call, *results])["replies"]
    weather.check(question, answer.text)


if __name__ == "__main__":
    main()
