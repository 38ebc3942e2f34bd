"""Structured output through clients: openai's parse, instructor, pydantic-ai and LangChain, each without tools."""

from __future__ import annotations

import asyncio
import sys
from importlib.metadata import version
from typing import Annotated, Any, Literal

import instructor
import openai
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider


class Pet(BaseModel):
    """A pet."""

    kind: Literal["cat", "dog"]
    name: Annotated[str, Field(max_length=12)]


class Person(BaseModel):
    """A person with pets."""

    name: Annotated[str, Field(max_length=16)]
    age: Annotated[int, Field(ge=0, le=150)]
    pets: Annotated[list[Pet], Field(max_length=2)]


PROMPT = "Ada is 36 years old and has a cat named Turing."
MESSAGES: Any = [{"role": "user", "content": PROMPT}]
FIXED: Any = {"model": "tiny", "seed": 3, "max_tokens": 200}


def main() -> None:
    url = f"{sys.argv[1]}/v1"
    client = openai.OpenAI(base_url=url, max_retries=0)
    parse(client)
    asyncio.run(parse_async(openai.AsyncOpenAI(base_url=url, max_retries=0)))
    with_instructor(client)
    with_pydantic_ai(url)
    with_langchain(url)
    names = ("openai", "instructor", "pydantic-ai-slim", "langchain-openai")
    print(*(f"{name} {version(name)}" for name in names))


def parse(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(messages=MESSAGES, response_format=Person, **FIXED)
    assert isinstance(answer.choices[0].message.parsed, Person)
    with client.chat.completions.stream(messages=MESSAGES, response_format=Person, **FIXED) as stream:
        for _ in stream:
            pass
        streamed = stream.get_final_completion().choices[0].message
    assert streamed.parsed == answer.choices[0].message.parsed
    assert streamed.content == answer.choices[0].message.content
    short = {**FIXED, "max_tokens": 3}
    try:
        client.chat.completions.parse(messages=MESSAGES, response_format=Person, **short)
    except openai.LengthFinishReasonError:
        pass
    else:
        raise AssertionError("an answer that was cut looks finished")
    bad = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"$ref": "https://example.com/"}}}
    try:
        client.chat.completions.create(messages=MESSAGES, response_format=bad, **FIXED)  # type: ignore[call-overload]
    except openai.BadRequestError as error:
        refused = error.param
    else:
        refused = None
    assert (refused or "").startswith("response_format")
    body = {"structured_outputs": {"choice": ["red", "blue"]}}  # vLLM's way
    chosen = client.chat.completions.create(messages=MESSAGES, extra_body=body, **FIXED)
    assert chosen.choices[0].message.content in {"red", "blue"}


async def parse_async(client: openai.AsyncOpenAI) -> None:
    asked = [
        client.chat.completions.parse(messages=MESSAGES, response_format=Person, **FIXED) for _ in range(8)
    ]
    found = {answer.choices[0].message.content for answer in await asyncio.gather(*asked)}
    assert len(found) == 1


def with_instructor(client: openai.OpenAI) -> None:
    made = instructor.from_openai(client, mode=instructor.Mode.JSON_SCHEMA)
    pet = made.chat.completions.create(messages=MESSAGES, response_model=Pet, max_retries=0, **FIXED)
    assert isinstance(pet, Pet)


def with_pydantic_ai(url: str) -> None:
    model = OpenAIChatModel("tiny", provider=OpenAIProvider(base_url=url))
    agent = Agent(
        model, output_type=NativeOutput(Person), model_settings={"max_tokens": 200, "seed": 3}, retries=0
    )
    assert isinstance(agent.run_sync(PROMPT).output, Person)


def with_langchain(url: str) -> None:
    chat = ChatOpenAI(base_url=url, model="tiny", seed=3, max_tokens=200, max_retries=0)
    for strict in (None, True):
        found = chat.with_structured_output(Person, method="json_schema", strict=strict).invoke(PROMPT)
        assert isinstance(found, Person)
    schema = {**Person.model_json_schema(), "title": "person", "description": "A person."}
    found = chat.with_structured_output(schema, method="json_schema").invoke(PROMPT)
    assert Person.model_validate(found)
    both = chat.with_structured_output(Person, method="json_schema", include_raw=True).invoke(PROMPT)
    assert both["parsing_error"] is None


if __name__ == "__main__":
    main()
