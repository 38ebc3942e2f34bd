"""OpenAI's Agents SDK over chats and over responses: agents, whole and streamed, and a typed output."""

from __future__ import annotations

import asyncio
import sys
from importlib.metadata import version
from typing import Any

from agents import (
    Agent,
    AgentOutputSchema,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from asked import BOTH, NOTE, PROMPT, QUESTION, Person, Weather
from openai import AsyncOpenAI

SETTINGS = ModelSettings(temperature=0, max_tokens=200)


def main() -> None:
    set_tracing_disabled(disabled=True)
    asyncio.run(all_of_it())
    print("openai-agents", version("openai-agents"), "openai", version("openai"))


async def all_of_it() -> None:
    async with AsyncOpenAI(base_url=f"{sys.argv[1]}/v1", api_key="secret", max_retries=0) as client:
        models: Any = (OpenAIChatCompletionsModel("tiny", client), OpenAIResponsesModel("tiny", client))
        for model in models:
            for question in (QUESTION, BOTH):
                weather = Weather()
                done = await Runner.run(weather_agent(model, weather), question)
                weather.check(question, done.final_output)
                weather = Weather()
                weather.check(question, await streamed(weather_agent(model, weather), question))
            typed: Any = Agent(
                "typed", model=model, model_settings=SETTINGS, output_type=AgentOutputSchema(Person)
            )
            assert isinstance((await Runner.run(typed, PROMPT)).final_output, Person)


def weather_agent(model: Any, weather: Weather) -> Agent[Any]:
    tool = function_tool(
        weather.get_weather, name_override="get_weather", description_override=NOTE, strict_mode=False
    )
    return Agent("weather", model=model, model_settings=SETTINGS, tools=[tool])


async def streamed(agent: Agent[Any], question: str) -> str:
    """The deltas of the last answer, which are the final output."""
    run = Runner.run_streamed(agent, question)
    text = ""
    async for event in run.stream_events():
        if event.type == "raw_response_event":
            if event.data.type == "response.output_text.delta":
                text += event.data.delta
            elif event.data.type == "response.completed" and run.final_output is None and text:
                text = text if event.data.response.output_text == text else ""
    assert str(run.final_output).endswith(text)
    return str(run.final_output)


if __name__ == "__main__":
    main()
