"""smolagents: an agent that calls functions, whole and streamed, and a structured answer."""

from __future__ import annotations

import sys
from importlib.metadata import version
from typing import Any

from asked import PROMPT, QUESTION, Person, Weather
from smolagents import OpenAIServerModel, Tool

FIXED: Any = {"temperature": 0, "max_tokens": 200}


class GetWeather(Tool):
    """The function as smolagents describes it."""

    name = "get_weather"
    description = "Get the current weather of a city."
    inputs = {"city": {"type": "string", "description": "The city."}}  # noqa: RUF012
    output_type = "string"

    def __init__(self, weather: Weather) -> None:
        super().__init__()
        self.weather = weather

    def forward(self, city: str) -> str:
        return self.weather.get_weather(city)


def main() -> None:
    model = OpenAIServerModel("tiny", api_base=f"{sys.argv[1]}/v1", api_key="secret", **FIXED)
    messages: Any = [{"role": "user", "content": [{"type": "text", "text": PROMPT}]}]
    whole = model.generate(messages)
    deltas = list(model.generate_stream(messages))
    assert "".join(part.content or "" for part in deltas) == whole.content
    assert deltas[-1].token_usage.output_tokens == whole.token_usage.output_tokens
    schema = {"type": "json_schema", "json_schema": {"name": "person", "schema": Person.model_json_schema()}}
    Person.model_validate_json(model.generate(messages, response_format=schema).content)
    agent(model)
    print("smolagents", version("smolagents"), "openai", version("openai"))


def agent(model: OpenAIServerModel) -> None:
    """The steps of a ToolCallingAgent by hand: its own prompt has 2,000 tokens, more than the small model reads."""
    weather = Weather()
    tool = GetWeather(weather)
    messages: Any = [{"role": "user", "content": [{"type": "text", "text": QUESTION}]}]
    asked = model.generate(messages, tools_to_call_from=[tool])
    (call,) = asked.tool_calls
    arguments = model.parse_tool_calls(asked).tool_calls[0].function.arguments
    result = tool(**arguments)
    streamed = list(model.generate_stream(messages, tools_to_call_from=[tool]))
    pieces = [d.function.arguments or "" for part in streamed for d in part.tool_calls or () if d.function]
    assert "".join(pieces) == call.function.arguments or "city" in "".join(pieces)
    messages += [
        {"role": "tool-call", "content": [{"type": "text", "text": f"Calling get_weather with {arguments}"}]},
        {"role": "tool-response", "content": [{"type": "text", "text": f"It returned: {result}"}]},
    ]
    assert model.generate(messages).content
    assert weather.cities == ["Paris"]


if __name__ == "__main__":
    main()
