"""LiteLLM, as an OpenAI and as a vLLM endpoint: calls, streams, async, completions, the router, error classes."""

from __future__ import annotations

import asyncio
import os
import sys
from importlib.metadata import version
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # no download of prices at import
import litellm

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
PROVIDERS = ("openai", "hosted_vllm")


def main() -> None:
    base: dict[str, Any] = {
        "api_base": f"{sys.argv[1]}/v1",
        "api_key": os.environ["OPENAI_API_KEY"],
        "seed": 3,
        "max_tokens": 24,
    }
    texts = {provider: chat(f"{provider}/tiny", base) for provider in PROVIDERS}
    assert len(set(texts.values())) == 1, texts
    asyncio.run(asynchronous(base, texts["openai"]))
    completions(base)
    router(base, texts["openai"])
    errors(base)
    print("litellm", version("litellm"))


def chat(model: str, base: dict[str, Any]) -> str:
    answer = litellm.completion(model, MESSAGES, **base)
    text = answer.choices[0].message.content
    assert answer.choices[0].finish_reason in {"stop", "length"}
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    chunks = list(
        litellm.completion(model, MESSAGES, stream=True, stream_options={"include_usage": True}, **base)
    )
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == text
    usage = next(c.usage for c in reversed(chunks) if getattr(c, "usage", None))
    assert usage.completion_tokens == answer.usage.completion_tokens
    whole = litellm.stream_chunk_builder(chunks)
    assert whole.choices[0].message.content == text
    listed = (
        litellm.completion(model, MESSAGES, logprobs=True, top_logprobs=2, **base).choices[0].logprobs.content
    )
    assert len(listed[0].top_logprobs) == 2
    greedy = litellm.completion(model, MESSAGES, temperature=0, **base).choices[0].message.content
    assert (
        litellm.completion(model, MESSAGES, extra_body={"top_k": 1}, **base).choices[0].message.content
        == greedy
    )
    return str(text)


async def asynchronous(base: dict[str, Any], expected: str) -> None:
    answers = await asyncio.gather(*(litellm.acompletion("openai/tiny", MESSAGES, **base) for _ in range(8)))
    assert {answer.choices[0].message.content for answer in answers} == {expected}
    stream = await litellm.acompletion("hosted_vllm/tiny", MESSAGES, stream=True, **base)
    assert "".join([c.choices[0].delta.content or "" async for c in stream if c.choices]) == expected


def completions(base: dict[str, Any]) -> None:
    for provider in ("text-completion-openai", "hosted_vllm"):
        model = f"{provider}/tiny"
        text = litellm.text_completion(prompt="one two", model=model, **base).choices[0].text
        pieces = litellm.text_completion(prompt="one two", model=model, stream=True, **base)
        assert "".join(piece.choices[0].text or "" for piece in pieces) == text


def router(base: dict[str, Any], expected: str) -> None:
    deployments = [
        {"model_name": "served", "litellm_params": {"model": "openai/tiny", **base}} for _ in range(2)
    ]
    answer = litellm.Router(model_list=deployments).completion("served", MESSAGES)
    assert answer.choices[0].message.content == expected


def errors(base: dict[str, Any]) -> None:
    long = [{"role": "user", "content": "too long " * 1000}]
    for error, model, messages, options in (
        (litellm.NotFoundError, "openai/other", MESSAGES, {}),
        (litellm.AuthenticationError, "openai/tiny", MESSAGES, {"api_key": "wrong"}),
        (litellm.BadRequestError, "openai/tiny", MESSAGES, {"temperature": -1}),
        (litellm.BadRequestError, "hosted_vllm/tiny", long, {}),
    ):
        try:
            litellm.completion(model, messages, **base | options, num_retries=0)
        except error:
            continue
        raise AssertionError(f"no {error.__name__} for {model} {options}")


if __name__ == "__main__":
    main()
