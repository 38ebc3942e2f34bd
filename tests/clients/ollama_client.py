"""The ollama package: chat and generate whole and streamed, thinking, formats, an agent, lists, errors."""

from __future__ import annotations

import asyncio
import sys
from importlib.metadata import version
from typing import Any

import ollama
from asked import BOTH, PROMPT, QUESTION, Person, Weather
from ollama import _types as types
from typed_fields import Fields, names_of

MODEL = "tiny"
GREEDY = {"temperature": 0, "num_predict": 200}


def main() -> None:
    client = ollama.Client(host=sys.argv[1], headers={"authorization": "Bearer secret"})
    messages: Any = [{"role": "user", "content": PROMPT}]
    whole = client.chat(MODEL, messages, options=GREEDY)
    streamed = list(client.chat(MODEL, messages, options=GREEDY, stream=True))
    assert "".join(part.message.content or "" for part in streamed) == whole.message.content
    assert streamed[-1].done_reason == whole.done_reason == "stop"
    assert streamed[-1].eval_count == whole.eval_count
    formed = client.chat(MODEL, messages, format=Person.model_json_schema(), options=GREEDY)
    Person.model_validate_json(formed.message.content or "")
    said = client.generate(MODEL, PROMPT, options=GREEDY)
    assert said.response == whole.message.content
    parts = client.generate(MODEL, PROMPT, options=GREEDY, stream=True)
    assert "".join(part.response for part in parts) == said.response
    scored = client.generate(MODEL, PROMPT, options=GREEDY, logprobs=True, top_logprobs=2)
    assert len(scored.logprobs or ()) == scored.eval_count
    assert all(len(score.top_logprobs or ()) == 2 for score in scored.logprobs or ())
    parts = client.chat(MODEL, messages, options=GREEDY, logprobs=True, top_logprobs=2, stream=True)
    found = [score.logprob for part in parts for score in part.logprobs or ()]
    assert found == [score.logprob for score in scored.logprobs or ()]
    for stream in (False, True):
        agent(client, QUESTION, stream=stream)
        agent(client, BOTH, stream=stream)
    assert [model.model for model in client.list().models] == [MODEL]
    assert [model.model for model in client.ps().models] == [MODEL]
    errors(client)
    fields(sys.argv[1])
    asyncio.run(together(ollama.AsyncClient(host=sys.argv[1], headers={"authorization": "Bearer secret"})))
    print("ollama", version("ollama"))


def fields(url: str) -> None:
    """None of what the package can send is ignored."""
    told = Fields(url)
    message: Any = {"role": "user", "content": "x"}
    chat: Any = {"model": MODEL, "messages": [message], "options": {"num_predict": 1}}
    told.check("/api/chat", names_of(types.ChatRequest), chat)
    told.check("/api/chat", names_of(types.Options), chat, "options")
    told.check("/api/chat", names_of(types.Message), chat, "messages", 0)
    told.check("/api/generate", names_of(types.GenerateRequest), {"model": MODEL, "prompt": "x"})
    told.check("/api/embed", names_of(types.EmbedRequest), {"model": MODEL, "input": "x"})
    told.check("/api/embeddings", names_of(types.EmbeddingsRequest), {"model": MODEL, "prompt": "x"})


def agent(client: ollama.Client, question: str, *, stream: bool) -> None:
    """A loop as the documentation of the package writes it, with a function of Python as a tool."""
    weather = Weather()
    messages: list[Any] = [{"role": "user", "content": question}]
    for _ in range(3):
        message = ask(client, messages, weather.get_weather, stream=stream)
        messages.append(message)
        if not message.tool_calls:
            break
        for call in message.tool_calls:
            result = weather.get_weather(**call.function.arguments)
            messages.append({"role": "tool", "tool_name": call.function.name, "content": result})
    weather.check(question, messages[-1].content)


def ask(client: ollama.Client, messages: list[Any], tool: Any, *, stream: bool) -> ollama.Message:
    if not stream:
        return client.chat(MODEL, messages, tools=[tool], options=GREEDY).message
    whole = ollama.Message(role="assistant", content="")
    for part in client.chat(MODEL, messages, tools=[tool], options=GREEDY, stream=True):
        whole.content = (whole.content or "") + (part.message.content or "")
        if part.message.tool_calls:
            whole.tool_calls = [*(whole.tool_calls or ()), *part.message.tool_calls]
    return whole


async def together(client: ollama.AsyncClient) -> None:
    """Several at once: the same as one alone."""

    async def one() -> str:
        return (await client.generate(MODEL, PROMPT, options=GREEDY)).response

    assert len(set(await asyncio.gather(*(one() for _ in range(8))))) == 1


def errors(client: ollama.Client) -> None:
    for fields, status in (
        ({"model": "other", "prompt": "x"}, 404),
        ({"model": MODEL, "prompt": "x", "options": {"num_ctx": 10**7}}, 400),
    ):
        try:
            client.generate(**fields)  # type: ignore[call-overload]
        except ollama.ResponseError as error:
            found = error.status_code
        else:
            found = 200
        assert found == status, (fields, found)


if __name__ == "__main__":
    main()
