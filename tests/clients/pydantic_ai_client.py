"""pydantic-ai: its output as a schema and as a tool, and agents that call functions, whole and streamed."""

from __future__ import annotations

import asyncio
import sys
from importlib.metadata import version
from typing import Any

from asked import BOTH, NOTE, PROMPT, QUESTION, Person, Weather
from pydantic_ai import Agent, NativeOutput, Tool, ToolOutput
from pydantic_ai.messages import PartDeltaEvent, PartStartEvent, TextPart, TextPartDelta
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

SETTINGS: Any = {"max_tokens": 200, "temperature": 0}


def main() -> None:
    model = OpenAIChatModel("tiny", provider=OpenAIProvider(base_url=f"{sys.argv[1]}/v1"))
    for output in (NativeOutput(Person), ToolOutput(Person)):
        agent = Agent(model, output_type=output, model_settings=SETTINGS, retries=0)
        assert isinstance(agent.run_sync(PROMPT).output, Person)
    for question in (QUESTION, BOTH):
        weather = Weather()
        weather.check(question, agent_of(model, weather).run_sync(question).output)
        weather = Weather()
        weather.check(question, asyncio.run(streamed(agent_of(model, weather), question)))
    print("pydantic-ai", version("pydantic-ai-slim"), "openai", version("openai"))


def agent_of(model: OpenAIChatModel, weather: Weather) -> Agent[None, str]:
    tools = [Tool(weather.get_weather, takes_ctx=False, description=NOTE)]
    return Agent(model, tools=tools, model_settings=SETTINGS, retries=0)


async def streamed(agent: Agent[None, str], question: str) -> str:
    """`run_stream` takes the first text for the answer, so an agent whose calls follow a text reads events."""
    texts: list[str] = []

    async def read(_: Any, events: Any) -> None:
        texts.append("")
        async for event in events:
            if isinstance(event, PartStartEvent) and isinstance(event.part, TextPart):
                texts[-1] += event.part.content
            elif isinstance(event, PartDeltaEvent) and isinstance(event.delta, TextPartDelta):
                texts[-1] += event.delta.content_delta

    found = await agent.run(question, event_stream_handler=read)
    assert found.output in texts
    return found.output


if __name__ == "__main__":
    main()
