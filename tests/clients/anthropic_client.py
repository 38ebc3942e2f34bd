"""The anthropic SDK: messages whole and streamed, its helpers, counts, agents, errors."""

from __future__ import annotations

import asyncio
import json
import sys
from importlib.metadata import version
from typing import Any

import anthropic
from anthropic import types
from anthropic.types import message_create_params
from asked import BOTH, NOTE, PROMPT, QUESTION, Person, Weather
from typed_fields import Fields, names_of

TOOLS: Any = [
    {
        "name": "get_weather",
        "description": NOTE,
        "input_schema": {
            "type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"],
            "additionalProperties": False,
        },
    }
]  # fmt: skip
FIXED: Any = {"model": "tiny", "max_tokens": 200, "extra_body": {"temperature": 0}}


def main() -> None:
    client = anthropic.Anthropic(base_url=sys.argv[1], api_key="secret", max_retries=0)
    messages: Any = [{"role": "user", "content": PROMPT}]
    counted = client.messages.count_tokens(model="tiny", messages=messages)
    answer = client.messages.create(messages=messages, **FIXED)
    usage = answer.usage
    assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)
    schema = {"type": "json_schema", "schema": Person.model_json_schema()}
    formed = client.messages.create(messages=messages, **FIXED, output_config={"format": schema})
    Person.model_validate_json(formed.content[-1].text)
    for ask in (created, streamed, raw):
        agent(client, ask, QUESTION, {"type": "any"})
        agent(client, ask, BOTH, {"type": "auto"})
    asyncio.run(together(anthropic.AsyncAnthropic(base_url=sys.argv[1], api_key="secret", max_retries=0)))
    errors(client)
    fields(sys.argv[1])
    print("anthropic", version("anthropic"))


def agent(client: anthropic.Anthropic, ask: Any, question: str, choice: Any) -> None:
    """A loop as the documentation of the SDK writes it: the content goes back as it came."""
    weather = Weather()
    messages: list[Any] = [{"role": "user", "content": question}]
    answer = ask(client, messages, choice)
    assert answer.stop_reason == "tool_use"
    messages.append({"role": "assistant", "content": answer.content})
    results = [
        {"type": "tool_result", "tool_use_id": block.id, "content": weather.get_weather(**block.input)}
        for block in answer.content
        if block.type == "tool_use"
    ]
    messages.append({"role": "user", "content": results})
    last = ask(client, messages, {"type": "auto"})
    assert last.stop_reason == "end_turn"
    weather.check(question, "".join(block.text for block in last.content if block.type == "text"))


def created(client: anthropic.Anthropic, messages: list[Any], choice: Any) -> Any:
    return client.messages.create(messages=messages, tools=TOOLS, tool_choice=choice, **FIXED)


def streamed(client: anthropic.Anthropic, messages: list[Any], choice: Any) -> Any:
    """The streamed helper, its events and what it accumulates."""
    text = ""
    with client.messages.stream(messages=messages, tools=TOOLS, tool_choice=choice, **FIXED) as stream:
        for event in stream:
            if event.type == "text":
                text += event.text
        final = stream.get_final_message()
    assert text == "".join(block.text for block in final.content if block.type == "text")
    return final


def raw(client: anthropic.Anthropic, messages: list[Any], choice: Any) -> Any:
    """Events added up by hand; the whole answer says the same."""
    blocks: list[Any] = []
    for event in client.messages.create(
        messages=messages, tools=TOOLS, tool_choice=choice, stream=True, **FIXED
    ):
        if event.type == "content_block_start":
            blocks.append([event.content_block.type, getattr(event.content_block, "name", ""), ""])
        elif event.type == "content_block_delta":
            blocks[event.index][2] += getattr(event.delta, "text", "") or getattr(
                event.delta, "partial_json", ""
            )
    whole = created(client, messages, choice)
    assert [kind for kind, *_ in blocks] == [block.type for block in whole.content]
    for (kind, name, text), block in zip(blocks, whole.content, strict=True):
        if kind == "tool_use":
            assert (name, json.loads(text)) == (block.name, block.input)
        else:
            assert text == block.text
    return whole


async def together(client: anthropic.AsyncAnthropic) -> None:
    """Several at once: the same as one alone."""
    messages: Any = [{"role": "user", "content": PROMPT}]

    async def one() -> str:
        async with client.messages.stream(messages=messages, **FIXED) as stream:
            return await stream.get_final_text()

    assert len(set(await asyncio.gather(*(one() for _ in range(8))))) == 1


def errors(client: anthropic.Anthropic) -> None:
    messages: Any = [{"role": "user", "content": "x"}]
    kinds = (
        (anthropic.NotFoundError, {"model": "other", "max_tokens": 1}),
        (anthropic.BadRequestError, {"model": "tiny", "max_tokens": 10_000}),
    )
    for kind, fields in kinds:
        try:
            client.messages.create(messages=messages, **fields)  # type: ignore[call-overload]
        except kind as error:
            raised = error.request_id
        else:
            raised = None
        assert raised, f"{kind.__name__} was not raised, or has no request id"
    try:
        client.with_options(api_key="wrong").messages.create(model="tiny", max_tokens=1, messages=messages)
    except anthropic.AuthenticationError:
        pass
    else:
        raise AssertionError("a wrong key was accepted")


def fields(url: str) -> None:
    """None of what the SDK can send is ignored."""
    told = Fields(url)
    tool: Any = {"name": "f", "input_schema": {"type": "object"}}
    call: Any = {"type": "tool_use", "id": "a", "name": "f", "input": {}}
    result: Any = {"type": "tool_result", "tool_use_id": "a", "content": "x"}
    body: Any = {
        "model": "tiny", "max_tokens": 1, "system": [{"type": "text", "text": "x"}], "tools": [tool],
        "thinking": {"type": "disabled"}, "tool_choice": {"type": "auto"}, "output_config": {},
        "cache_control": {"type": "ephemeral"},
        "messages": [
            {"role": "user", "content": "x"}, {"role": "assistant", "content": [call]},
            {"role": "user", "content": [result]},
        ],
    }  # fmt: skip
    told.check("/v1/messages", names_of(message_create_params.MessageCreateParamsStreaming), body)
    counted = {name: value for name, value in body.items() if name != "max_tokens"}
    told.check("/v1/messages/count_tokens", names_of(types.MessageCountTokensParams), counted)
    for kind, *within in (
        (types.ToolParam, "tools", 0), (types.TextBlockParam, "system", 0),
        (types.ToolUseBlockParam, "messages", 1, "content", 0),
        (types.ToolResultBlockParam, "messages", 2, "content", 0), (types.OutputConfigParam, "output_config"),
        (types.ThinkingConfigEnabledParam, "thinking"), (types.ToolChoiceToolParam, "tool_choice"),
        (types.CacheControlEphemeralParam, "cache_control"),
    ):  # fmt: skip
        told.check("/v1/messages", names_of(kind), body, *within)


if __name__ == "__main__":
    main()
