"""instructor: its modes of JSON schemas and of tools, streams of partial objects, a retry, and an agent."""

from __future__ import annotations

import sys
from importlib.metadata import version
from typing import Any, Literal

import instructor
import openai
from asked import PROMPT, QUESTION, Closed, Person, Pet, Weather
from pydantic import field_validator

MESSAGES: Any = [{"role": "user", "content": PROMPT}]
FIXED: Any = {"model": "tiny", "temperature": 0, "max_tokens": 600}


class GetWeather(Closed):
    """Get the current weather of a city."""

    city: str


class Report(Closed):
    """Report the weather."""

    temperature: int
    sky: Literal["sunny", "cloudy"]


class Doubted(Pet):
    """A pet that is refused once, to see that the model is asked again with the reason."""

    @field_validator("name")
    @classmethod
    def _doubt(cls, name: str) -> str:
        DOUBTS.append(name)
        if len(DOUBTS) == 1:
            raise ValueError("this cannot be right")
        return name


DOUBTS: list[str] = []


def main() -> None:
    client = openai.OpenAI(base_url=f"{sys.argv[1]}/v1", max_retries=0)
    for mode in (instructor.Mode.JSON_SCHEMA, instructor.Mode.TOOLS, instructor.Mode.TOOLS_STRICT):
        made = instructor.from_openai(client, mode=mode)
        person = made.chat.completions.create(
            messages=MESSAGES, response_model=Person, max_retries=0, **FIXED
        )
        assert isinstance(person, Person)
        *_, last = made.chat.completions.create_partial(messages=MESSAGES, response_model=Person, **FIXED)
        Person.model_validate(last.model_dump())  # of a function of another name, so not always the same
    tools = instructor.from_openai(client, mode=instructor.Mode.TOOLS)
    DOUBTS.clear()
    pet = tools.chat.completions.create(messages=MESSAGES, response_model=Doubted, max_retries=2, **FIXED)
    assert isinstance(pet, Doubted)
    assert len(DOUBTS) == 2
    agent(tools)
    print("instructor", version("instructor"), "openai", version("openai"))


def agent(client: Any) -> None:
    """Each turn is an object: a call, whose result goes back, then the answer."""
    weather = Weather()
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    asked, raw = client.chat.completions.create_with_completion(
        messages=messages, response_model=GetWeather, max_retries=0, **FIXED
    )
    (call,) = raw.choices[0].message.tool_calls
    messages.append(raw.choices[0].message.to_dict())
    messages.append({"role": "tool", "tool_call_id": call.id, "content": weather.get_weather(asked.city)})
    report = client.chat.completions.create(messages=messages, response_model=Report, max_retries=0, **FIXED)
    weather.check(QUESTION, f"{report.temperature} {report.sky}")


if __name__ == "__main__":
    main()
