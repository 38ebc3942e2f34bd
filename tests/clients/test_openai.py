"""The unmodified openai SDK: its calls, its streams, its retries, its error classes."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest
from openai.types import completion_create_params, embedding_create_params, shared_params
from openai.types.chat import ChatCompletionStreamOptionsParam
from openai.types.chat import completion_create_params as chat_params
from openai.types.responses import FunctionToolParam, ResponseTextConfigParam, response_create_params

from clients.typed_fields import Fields, names_of
from helpers.server import LiveServer

MESSAGES: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
FIXED: Any = {"model": "tiny", "seed": 3, "max_tokens": 16}


@pytest.fixture
def client(live: LiveServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{live.url}/v1", api_key="secret", max_retries=0)


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(messages=MESSAGES, logprobs=True, top_logprobs=2, **FIXED)
    (choice,) = answer.choices
    assert choice.message.role == "assistant"
    assert choice.finish_reason in {"stop", "length"}
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.usage.prompt_tokens_details is not None
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    assert len(choice.logprobs.content[0].top_logprobs) == 2
    assert answer._request_id


def test_a_prediction(client: openai.OpenAI) -> None:
    plain = client.chat.completions.create(messages=MESSAGES, **FIXED)
    predicted: Any = {"type": "content", "content": plain.choices[0].message.content}
    answer = client.chat.completions.create(messages=MESSAGES, prediction=predicted, **FIXED)
    assert answer.choices == plain.choices
    assert answer.usage is not None
    details = answer.usage.completion_tokens_details
    assert details is not None
    assert details.accepted_prediction_tokens is not None
    assert details.rejected_prediction_tokens is not None


def test_chat_stream_adds_up(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(messages=MESSAGES, **FIXED)
    text, usage, finish = "", None, None
    for chunk in client.chat.completions.create(
        messages=MESSAGES, stream=True, stream_options={"include_usage": True}, **FIXED
    ):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text += choice.delta.content or ""
            finish = choice.finish_reason or finish
    assert text == whole.choices[0].message.content
    assert finish == whole.choices[0].finish_reason
    assert usage is not None
    assert usage.completion_tokens == (whole.usage and whole.usage.completion_tokens)


def test_stream_helper(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(messages=MESSAGES, **FIXED) as stream:
        text = "".join(event.delta for event in stream if event.type == "content.delta")
        final = stream.current_completion_snapshot
    assert final.choices[0].message.content == text


def test_completions_of_every_kind(client: openai.OpenAI) -> None:
    for prompt in ("Hello", ["Hello", "there"], [10, 11, 12], [[10, 11], [12, 13]]):
        answer = client.completions.create(prompt=prompt, logprobs=1, echo=True, n=1, **FIXED)
        several = isinstance(prompt, list) and not isinstance(prompt[0], int)
        assert len(answer.choices) == (2 if several else 1)
        assert answer.choices[0].logprobs is not None
        assert answer.choices[0].logprobs.tokens
    text = "".join(
        chunk.choices[0].text for chunk in client.completions.create(prompt="Hello", stream=True, **FIXED)
    )
    assert text == client.completions.create(prompt="Hello", **FIXED).choices[0].text


def test_extras_go_through_extra_body(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        messages=MESSAGES, extra_body={"top_k": 1, "ignore_eos": True, "return_token_ids": True}, **FIXED
    )
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 16
    assert len(answer.choices[0].token_ids) == 16  # type: ignore[attr-defined]


def test_a_response_has_logprobs(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {
        "input": "Hello", "model": "tiny", "temperature": 0, "max_output_tokens": 6, "top_logprobs": 2,
        "include": ["message.output_text.logprobs"],
    }  # fmt: skip
    part: Any = client.responses.create(**asked).output[0]
    scores = part.content[0].logprobs
    assert [len(score.top_logprobs) for score in scores] == [2] * 6
    found: list[Any] = []
    last: Any = None
    for event in client.responses.create(**asked, stream=True):
        if event.type == "response.output_text.delta":
            found += event.logprobs
        elif event.type in {"response.completed", "response.incomplete"}:
            last = event.response.output[0]
    assert [score.logprob for score in found] == [score.logprob for score in scores]
    assert last.content[0].logprobs == scores


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by == "quire"


def test_errors_have_the_right_classes(client: openai.OpenAI, live: LiveServer) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(messages=MESSAGES, model="tiny", temperature=-1)
    assert bad.value.param == "temperature"
    assert bad.value.code == "invalid_value"
    assert bad.value.type == "invalid_request_error"
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(messages=MESSAGES, model="other")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{live.url}/v1", api_key="wrong", max_retries=0).models.list()
    with pytest.raises(openai.PermissionDeniedError):
        client.models.list(extra_headers={"origin": "http://evil.example"})
    with pytest.raises(openai.InternalServerError) as late:
        client.chat.completions.create(messages=MESSAGES, extra_body={"deadline_ms": 0}, **FIXED)
    assert late.value.status_code == 504
    with pytest.raises(openai.BadRequestError) as tools:
        client.chat.completions.create(
            messages=MESSAGES, tools=[{"type": "function", "function": {"name": "f"}}], **FIXED
        )
    assert tools.value.param == "tools"  # the template of this model reads none


def test_a_full_queue_is_retried_after_the_time_it_names(live: LiveServer) -> None:
    async def ask(retries: int) -> list[Any]:
        async with openai.AsyncOpenAI(
            base_url=f"{live.url}/v1", api_key="secret", max_retries=retries
        ) as client:
            asked = (
                client.chat.completions.create(
                    messages=MESSAGES, model="tiny", max_tokens=150, extra_body={"ignore_eos": True}
                )
                for _ in range(10)
            )
            return await asyncio.gather(*asked, return_exceptions=True)

    refused = [a for a in asyncio.run(ask(0)) if isinstance(a, Exception)]
    assert refused
    for error in refused:
        assert isinstance(error, openai.RateLimitError)
        assert int(error.response.headers["retry-after"]) >= 1
    assert not any(isinstance(a, Exception) for a in asyncio.run(ask(20)))


def test_an_error_within_a_stream_is_raised(client: openai.OpenAI) -> None:
    with pytest.raises(openai.APIError) as late:
        for _ in client.chat.completions.create(
            messages=MESSAGES, model="tiny", max_tokens=150, n=32, stream=True,
            extra_body={"ignore_eos": True, "deadline_ms": 60},
        ):  # fmt: skip
            pass
    assert late.value.code == "deadline_exceeded"


def test_async_streams_and_leaving_one(live: LiveServer) -> None:
    async def talk() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{live.url}/v1", api_key="secret", max_retries=0) as client:

            async def one() -> str:
                stream = await client.chat.completions.create(messages=MESSAGES, stream=True, **FIXED)
                return "".join([c.choices[0].delta.content or "" async for c in stream])

            abandoned = await client.chat.completions.create(
                messages=MESSAGES, model="tiny", max_tokens=150, stream=True, extra_body={"ignore_eos": True}
            )
            async for _ in abandoned:
                break
            await abandoned.close()
            return list(await asyncio.gather(one(), one()))

    first, second = asyncio.run(talk())
    assert first == second
    live.wait(live.idle)


@pytest.mark.parametrize("fields", [{}, {"logprobs": True}, {"n": 2}])
def test_usage_in_every_chunk(client: openai.OpenAI, fields: Any) -> None:
    """vLLM's continuous_usage_stats: counts so far, which end with those of the whole answer."""
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    asked = {**FIXED, **fields}
    chunks = list(
        client.chat.completions.create(messages=MESSAGES, stream=True, stream_options=options, **asked)
    )
    usages = [chunk.usage for chunk in chunks]
    assert all(usages)
    counts = [usage.completion_tokens for usage in usages if usage]
    assert counts == sorted(counts)
    assert counts[-2:] == [counts[-1]] * 2
    whole = client.chat.completions.create(messages=MESSAGES, **asked)
    assert whole.usage is not None
    assert usages[-1] is not None
    assert usages[-1].completion_tokens == whole.usage.completion_tokens
    texts = [choice.message.content for choice in whole.choices]
    streamed = ["".join(c.delta.content or "" for chunk in chunks for c in chunk.choices if c.index == i)
                for i in range(len(texts))]  # fmt: skip
    assert streamed == texts
    del options["include_usage"]
    with pytest.raises(openai.BadRequestError, match="needs include_usage"):
        client.chat.completions.create(messages=MESSAGES, stream=True, stream_options=options, **asked)


def test_every_field_is_done_or_refused(live: LiveServer) -> None:
    """None of what the SDK can send is ignored, and the docs name each."""
    told = Fields(live.url)
    chat: Any = {"messages": MESSAGES, "stream": True, "stream_options": {}, "max_tokens": 1}
    told.check(
        "/v1/chat/completions",
        names_of(chat_params.CompletionCreateParamsStreaming, chat_params.CompletionCreateParamsNonStreaming),
        chat,
    )
    told.check("/v1/chat/completions", names_of(ChatCompletionStreamOptionsParam), chat, "stream_options")
    told.check(
        "/v1/completions",
        names_of(completion_create_params.CompletionCreateParamsStreaming),
        {"prompt": "x", "max_tokens": 1},
    )
    told.check("/v1/embeddings", names_of(embedding_create_params.EmbeddingCreateParams), {"input": "x"})
    tool = {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": False}
    body: Any = {"input": "x", "tools": [tool], "reasoning": {}, "text": {}, "max_output_tokens": 1}
    told.check("/v1/responses", names_of(response_create_params.ResponseCreateParamsStreaming), body)
    told.check("/v1/responses", names_of(shared_params.Reasoning), body, "reasoning")
    told.check("/v1/responses", names_of(ResponseTextConfigParam), body, "text")
    told.check("/v1/responses", names_of(FunctionToolParam), body, "tools", 0)
