"""AsyncLLM: a model in a separate process, for asyncio programs."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from quire.config.serving import ServingConfig
from quire.engine.api import CompiledStructure, GenerateAsk, ModelCard, OverloadedError, Stream, StreamDelta
from quire.engine.front.async_engine import AsyncEngine
from quire.engine.front.forming import asked_part, formed, forming
from quire.llm.asked import (
    Message,
    Prompt,
    check_salt,
    conversations,
    engine_options,
    one_each,
    one_prompt,
    priority_list,
    prompt_list,
    taken_tools,
)
from quire.loader import DEFAULT_MODEL
from quire.text.chat_renderer import ChatAsk
from quire.types import QuireError, Request, RequestError, RequestOutput, SamplingParams, TokenIds

if TYPE_CHECKING:
    from quire.structured.answer_form import AskedPart
    from quire.text.reading import Reading
    from quire.text.tokenizer import Tokenizer

# Requests in the engine at once; more wait here and only occupy their prompts.
_AT_ONCE = 1024


class AsyncLLM:
    """Loads a model and generates without blocking the event loop.

        async with AsyncLLM("path/to/model", memory="6GiB") as llm:
            async for delta in llm.stream("Hello", SamplingParams(max_tokens=32)):
                print(delta.text, end="")
            outputs = await llm.generate(["One", "Two"])

    Arguments and errors are those of LLM. The model runs in a separate process and is loaded when the block is entered,
    or by `await llm.start()`. All calls must come from the event loop that started it; any number may run at once.
    """

    def __init__(self, model: str | Path = DEFAULT_MODEL, **options: Any) -> None:
        serving = ServingConfig(  # a library waits for its caller without a limit
            max_num_queued_reqs=_AT_ONCE, max_num_queued_tokens=2**62, reader_tokens=2**31, reader_timeout=1e9
        )
        self._config = engine_options(options)
        self._engine = AsyncEngine(model, self._config, serving)
        self._places = asyncio.Semaphore(_AT_ONCE)
        self._numbers = itertools.count()
        self._state = "not started: use `async with`, or await start()"

    @property
    def card(self) -> ModelCard:
        """The model: architecture, context length, vocabulary, recommended sampling."""
        self._check()
        return self._engine.card

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer of the checkpoint, if it has one."""
        self._check()
        return self._engine.tokenizer

    async def start(self) -> None:
        """Load the model. Raises CheckpointError, UnsupportedModelError, MemoryBudgetError or QuireError."""
        if not self._state:
            return
        if self._state == _CLOSED:
            self._check()
        await self._engine.start()
        self._state = ""

    async def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priorities: Sequence[int] | None = None,
        cache_salt: str = "",
    ) -> list[RequestOutput]:
        """Run prompts (texts or token ids) to their end; outputs are in the order of the prompts.

        If one is refused or fails, the others are aborted and its error is raised.
        """
        self._check()
        items = prompt_list(prompts)
        each = one_each("params", params, len(items), SamplingParams, self._default)
        ranks = priority_list(priorities, len(items), self._config.scheduler.scheduling_policy)
        check_salt(cache_salt)
        return await _all(
            self._whole(prompt, one, rank, cache_salt)
            for prompt, one, rank in zip(items, each, ranks, strict=True)
        )

    async def stream(
        self, prompt: Prompt, params: SamplingParams | None = None
    ) -> AsyncIterator[StreamDelta]:
        """Generate from one prompt and yield the delta of each step; leaving the loop aborts the request."""
        self._check()
        item = one_prompt(prompt)
        (one,) = one_each("params", params, 1, SamplingParams, self._default)
        async for delta in self._stream(item, one):
            yield delta

    async def _stream(
        self, prompt: Prompt, params: SamplingParams, reading: Reading | None = None
    ) -> AsyncIterator[StreamDelta]:
        async with self.running(prompt, params, reading=reading) as stream:
            async for delta in stream:
                yield delta

    async def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | None = None,
        **options: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation or several, rendered with the checkpoint's chat template; options as in LLM.chat."""
        self._check()
        tools = taken_tools(options)
        prompts = [await self.encode_chat(chat, **options) for chat in conversations(messages)]
        each = one_each("params", params, len(prompts), SamplingParams, self._default)
        reading = self._engine.reading(tools)
        return await _all(
            self._whole(prompt, one, reading=reading) for prompt, one in zip(prompts, each, strict=True)
        )

    async def stream_chat(
        self, messages: Sequence[Message], params: SamplingParams | None = None, **options: Any
    ) -> AsyncIterator[StreamDelta]:
        """Answer one conversation and yield the delta of each step; options as in LLM.chat."""
        self._check()
        tools = taken_tools(options)
        prompt = await self.encode_chat(messages, **options)
        (one,) = one_each("params", params, 1, SamplingParams, self._default)
        async for delta in self._stream(prompt, one, self._engine.reading(tools)):
            yield delta

    async def encode_chat(self, messages: Sequence[Message], **options: Any) -> list[int]:
        """Token ids of a conversation with the checkpoint's chat template; options are those of ChatAsk."""
        self._check()
        return await self._engine.encode_chat(ChatAsk(messages=messages, **options))

    @asynccontextmanager
    async def running(
        self,
        prompt: Prompt,
        params: SamplingParams,
        priority: int = 0,
        cache_salt: str = "",
        reading: Reading | None = None,
    ) -> AsyncIterator[Stream]:
        """A request while it runs: iterate it for its deltas; `output` grows with them. Leaving the block aborts it."""
        self._check()
        async with self._places:
            stream = await self._submit(prompt, params, priority, cache_salt, reading)
            try:
                yield stream
            finally:
                stream.cancel()

    async def close(self) -> None:
        """End running requests and the engine process; closing again does nothing."""
        state, self._state = self._state, _CLOSED
        if not state:
            await self._engine.stop(drain_seconds=0)

    async def __aenter__(self) -> AsyncLLM:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def _default(self) -> SamplingParams:
        fields: dict[str, Any] = dict(self._engine.card.default_sampling)
        return SamplingParams(**fields)

    async def _whole(
        self,
        prompt: Prompt,
        params: SamplingParams,
        priority: int = 0,
        cache_salt: str = "",
        reading: Reading | None = None,
    ) -> RequestOutput:
        async with self.running(prompt, params, priority, cache_salt, reading) as stream:
            async for _ in stream:
                pass
        return stream.output

    async def _submit(
        self, prompt: Prompt, params: SamplingParams, priority: int, cache_salt: str, reading: Reading | None
    ) -> Stream:
        text = prompt if isinstance(prompt, str) else None
        ids = await self._engine.encode(prompt) if isinstance(prompt, str) else prompt
        if not ids:
            raise RequestError("prompt", "the prompt has no tokens")
        request = Request(
            request_id=f"request-{next(self._numbers)}",
            prompt_token_ids=TokenIds(ids),
            params=params,
            arrival=time.monotonic(),
            priority=priority,
            namespace=cache_salt,
            eos_token_ids=self._engine.card.eos_token_ids,
        )
        while True:
            try:
                form = await formed(forming(request, reading, asked_part(params)), self._compile)
                ask = GenerateAsk(request=form.request, prompt_text=text, reading=form.reading)
                running = self._engine.generate(ask)
            except OverloadedError as error:
                await asyncio.sleep(error.retry_after)
            else:
                running.output.dropped = form.dropped
                return running

    async def _compile(self, part: AskedPart) -> CompiledStructure:
        return await self._engine.compile(part.ask)

    def _check(self) -> None:
        if self._state:
            raise QuireError(f"this AsyncLLM is {self._state}")


async def _all(running: Iterable[Coroutine[Any, Any, RequestOutput]]) -> list[RequestOutput]:
    """The outputs in order. If one fails, the others are aborted."""
    tasks = [asyncio.create_task(one) for one in running]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


_CLOSED = "closed; create a new one"
