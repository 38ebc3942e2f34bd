"""AsyncLLM: the same answers as LLM's, any number at once, and clear words before and after its life."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from helpers.tokenizers import Folder
from quire import LLM, AsyncLLM, SamplingParams
from quire.types import QuireError, RequestError

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
PROMPTS = ["Once upon a time", "Long ago", [5, 6, 7]]
CHAT = [{"role": "user", "content": "Hi"}]


async def _joined(stream: AsyncIterator[object]) -> str:
    return "".join([delta.text async for delta in stream])  # type: ignore[attr-defined]


def test_answers_equal_llm_s(checkpoint: Folder) -> None:
    folder = checkpoint("llama3.1")
    with LLM(folder, progress=False, max_model_len=200) as llm:
        expected = [output.outputs[0].text for output in llm.generate(PROMPTS, GREEDY)]
        chatted = llm.chat(CHAT, GREEDY)[0].outputs[0].text

    async def run() -> None:
        llm = AsyncLLM(folder, max_model_len=200)
        with pytest.raises(QuireError, match="not started"):
            await llm.generate("x")
        async with llm:
            outputs, *streamed = await asyncio.gather(
                llm.generate(PROMPTS, GREEDY), *(_joined(llm.stream(prompt, GREEDY)) for prompt in PROMPTS)
            )
            assert [output.outputs[0].text for output in outputs] == expected == streamed
            assert (await llm.chat(CHAT, GREEDY))[0].outputs[0].text == chatted
            assert await _joined(llm.stream_chat(CHAT, GREEDY)) == chatted
            with pytest.raises(RequestError, match="prompt_token_ids: 128 is not a token id"):
                await llm.generate([[5], [128]], GREEDY)
            with pytest.raises(RequestError, match="prompts: must be"):
                await llm.generate(5)  # type: ignore[arg-type]
            async for _ in llm.stream("x", GREEDY):
                break
            assert llm.card.max_model_len == 200
        await llm.close()
        with pytest.raises(QuireError, match="this AsyncLLM is closed"):
            await llm.generate("x")

    asyncio.run(run())
