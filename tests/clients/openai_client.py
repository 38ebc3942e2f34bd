"""The openai SDK: `parse`, and agents over its calls, its streams and its streamed helpers."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import openai
from asked import BOTH, NOTE, PROMPT, QUESTION, Person, Weather
from pydantic import BaseModel

MESSAGES: Any = [{"role": "user", "content": PROMPT}]
FIXED: Any = {"model": "tiny", "seed": 3, "max_tokens": 200}


class GetWeather(BaseModel):
    """Get the current weather of a city."""

    city: str


TOOLS = [openai.pydantic_function_tool(GetWeather, name="get_weather")]
AGENT: Any = {"model": "tiny", "temperature": 0, "max_tokens": 200, "tools": TOOLS}


def main() -> None:
    url = f"{sys.argv[1]}/v1"
    client = openai.OpenAI(base_url=url, max_retries=0)
    parse(client)
    asyncio.run(parse_async(openai.AsyncOpenAI(base_url=url, max_retries=0)))
    for ask in (created, parsed, streamed, helped):
        agent(client, ask, QUESTION, "required")
        agent(client, ask, BOTH, "auto")
    asyncio.run(agent_async(openai.AsyncOpenAI(base_url=url, max_retries=0)))
    respond(client)
    for stream in (False, True):
        responding_agent(client, QUESTION, "required", stream=stream)
        responding_agent(client, BOTH, "auto", stream=stream)
    print("openai", version("openai"))


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


Ask = Callable[[openai.OpenAI, list[Any], str], Any]


def agent(client: openai.OpenAI, ask: Ask, question: str, first: str) -> None:
    """A loop as the documentation of the SDK writes it: the message goes back as it came."""
    weather = Weather()
    messages: list[Any] = [{"role": "user", "content": question}]
    message = ask(client, messages, first)
    assert message.tool_calls
    messages.append(message)
    for call in message.tool_calls:
        assert call.function.name == "get_weather"
        result = weather.get_weather(**json.loads(call.function.arguments))
        messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    answer = ask(client, messages, "auto")
    assert not answer.tool_calls
    weather.check(question, answer.content)


def created(client: openai.OpenAI, messages: list[Any], choice: str) -> Any:
    (found,) = client.chat.completions.create(messages=messages, tool_choice=choice, **AGENT).choices
    assert found.finish_reason == ("tool_calls" if found.message.tool_calls else "stop")
    return found.message


def parsed(client: openai.OpenAI, messages: list[Any], choice: str) -> Any:
    (found,) = client.chat.completions.parse(messages=messages, tool_choice=choice, **AGENT).choices
    for call in found.message.tool_calls or ():
        assert isinstance(call.function.parsed_arguments, GetWeather)
    return found.message


def streamed(client: openai.OpenAI, messages: list[Any], choice: str) -> Any:
    """Chunks added up by hand, as agents do it."""
    content, calls = "", {}
    for chunk in client.chat.completions.create(messages=messages, tool_choice=choice, stream=True, **AGENT):
        for delta in (found.delta for found in chunk.choices):
            content += delta.content or ""
            for piece in delta.tool_calls or ():
                call = calls.setdefault(piece.index, {"id": piece.id, "type": "function", "function": {}})
                for name, text in piece.function.to_dict().items():
                    call["function"][name] = call["function"].get(name, "") + text
    whole = {"role": "assistant", "content": content or None}
    if calls:
        whole["tool_calls"] = list(calls.values())
    return openai.types.chat.ChatCompletionMessage.model_validate(whole)


def helped(client: openai.OpenAI, messages: list[Any], choice: str) -> Any:
    """The streamed helpers: their events, and what they accumulate."""
    deltas: dict[int, str] = {}
    done: dict[int, Any] = {}
    text = ""
    with client.chat.completions.stream(messages=messages, tool_choice=choice, **AGENT) as stream:
        for event in stream:
            if event.type == "tool_calls.function.arguments.delta":
                deltas[event.index] = deltas.get(event.index, "") + event.arguments_delta
            elif event.type == "tool_calls.function.arguments.done":
                done[event.index] = event
            elif event.type == "content.delta":
                text += event.delta
        (found,) = stream.get_final_completion().choices
    message = found.message
    assert text == (message.content or "")
    assert found.finish_reason == ("tool_calls" if message.tool_calls else "stop")
    for index, call in enumerate(message.tool_calls or ()):
        assert deltas[index] == done[index].arguments == call.function.arguments
        assert done[index].name == call.function.name
        assert call.function.parsed_arguments == GetWeather.model_validate_json(call.function.arguments)
    assert len(done) == len(message.tool_calls or ())
    return message


async def agent_async(client: openai.AsyncOpenAI) -> None:
    """Several at once: the same calls as one alone."""

    async def one() -> str:
        messages: Any = [{"role": "user", "content": QUESTION}]
        async with client.chat.completions.stream(
            messages=messages, tool_choice="required", **AGENT
        ) as stream:
            final = await stream.get_final_completion()
        (call, *_) = final.choices[0].message.tool_calls or ()
        return call.function.arguments

    assert len(set(await asyncio.gather(*(one() for _ in range(8))))) == 1


RESPONDING: Any = {"model": "tiny", "temperature": 0, "max_output_tokens": 200}


def respond(client: openai.OpenAI) -> None:
    """Responses: parsed, streamed, stored, continued, in the background, removed."""
    first = client.responses.parse(input=PROMPT, text_format=Person, **RESPONDING)
    assert isinstance(first.output_parsed, Person)
    with client.responses.stream(input=PROMPT, text_format=Person, **RESPONDING) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        final = stream.get_final_response()
    assert text == final.output_text == first.output_text
    assert client.responses.retrieve(first.id).output_text == first.output_text
    items = client.responses.input_items.list(first.id).data
    assert [item.content[0].text for item in items] == [PROMPT]  # type: ignore[union-attr]
    more = client.responses.create(input="And its name?", previous_response_id=first.id, **RESPONDING)
    assert more.usage is not None
    assert first.usage is not None
    assert more.usage.input_tokens > first.usage.total_tokens - 10
    later = client.responses.create(input=PROMPT, background=True, **RESPONDING)
    while (later := client.responses.retrieve(later.id)).status in {"queued", "in_progress"}:
        time.sleep(0.05)
    assert later.status == "completed"
    assert client.responses.cancel(later.id).status == "completed"
    client.responses.delete(first.id)
    for gone in (client.responses.retrieve, client.responses.cancel):
        try:
            gone(first.id)
        except openai.NotFoundError:
            continue
        raise AssertionError("a response that was deleted is still there")


def responding_agent(client: openai.OpenAI, question: str, choice: Any, *, stream: bool) -> None:
    """A loop over stored responses: only the results of the calls are sent."""
    tools: Any = [
        {"type": "function", "name": "get_weather", "description": NOTE, "strict": True,
         "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"],
                        "additionalProperties": False}},
    ]  # fmt: skip
    weather = Weather()
    said: Any = question
    before: str | None = None
    for _ in range(3):
        asked = {
            "input": said,
            "previous_response_id": before,
            "tools": tools,
            "tool_choice": choice,
            **RESPONDING,
        }
        if stream:
            events = list(client.responses.create(stream=True, **asked))
            assert [event.sequence_number for event in events] == list(range(len(events)))
            answer = events[-1].response
        else:
            answer = client.responses.create(**asked)
        calls = [item for item in answer.output if item.type == "function_call"]
        if not calls:
            break
        before, choice = answer.id, "auto"
        said = [
            {"type": "function_call_output", "call_id": call.call_id,
             "output": weather.get_weather(**json.loads(call.arguments))}
            for call in calls
        ]  # fmt: skip
    weather.check(question, answer.output_text)


if __name__ == "__main__":
    main()
