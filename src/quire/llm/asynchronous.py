"""AsyncLLM: a model in a separate process, for asyncio programs."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import AsyncIterator, Coroutine, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from quire.config.serving import ServingConfig
from quire.engine.api import (
    Ask,
    CompiledStructure,
    GenerateAsk,
    ModelCard,
    OverloadedError,
    Stream,
    StreamDelta,
)
from quire.engine.front.forming import asked_part, formed, forming
from quire.engine.front.prompt_embeds import PromptEmbeds, embedded
from quire.engine.front.serving_engine import serving_engine
from quire.engine.request_forms import guided
from quire.llm.asked import (
    Message,
    Prompt,
    TextOrIds,
    adapter_path,
    asks_beside,
    chats_beside,
    check_salt,
    conversations,
    engine_options,
    one_each,
    one_prompt,
    priority_list,
    prompt_list,
    refuse_others,
    taken_tools,
)
from quire.llm.beam_outputs import BeamSearchOutput, BeamSearchParams, beam_asks, beam_output
from quire.loader import DEFAULT_MODEL
from quire.outputs import RequestOutput
from quire.text.chat_renderer import ChatAsk
from quire.types import QuireError, Request, RequestError, SamplingParams, TokenIds

if TYPE_CHECKING:
    from quire.llm.text_pooling import (
        ClassificationOutput,
        EmbeddingOutput,
        PoolingRequestOutput,
        PoolingWork,
        ScoringOutput,
        TextPooling,
    )
    from quire.structured.answer_form import AskedPart
    from quire.text.tokenizer import Tokenizer

T = TypeVar("T")
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

    def __init__(
        self,
        model: str | Path = DEFAULT_MODEL,
        *,
        chat_template: str | Path | None = None,
        tool_call_parser: str | None = None,
        reasoning_parser: str | None = None,
        adapters: Mapping[str, str | Path] | None = None,
        **options: Any,
    ) -> None:
        modules = [
            {"name": name, "path": adapter_path(name, path)} for name, path in (adapters or {}).items()
        ]
        serving = ServingConfig(  # a library waits for its caller without a limit
            max_num_queued_reqs=_AT_ONCE, max_num_queued_tokens=2**62, reader_tokens=2**31, reader_timeout=1e9,
            chat_template=None if chat_template is None else str(chat_template),
            tool_call_parser=tool_call_parser, reasoning_parser=reasoning_parser,
            lora_modules=tuple(map(json.dumps, modules)),
        )  # fmt: skip
        self._config = engine_options(options)
        self._engine = serving_engine(model, self._config, serving)
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

    async def load_adapter(self, name: str, adapter: str | Path) -> None:
        """Have `name` stand for the adapter in a folder or file; see LLM.load_adapter."""
        self._check()
        await self._engine.load_adapter(name, adapter_path(name, adapter))

    def unload_adapter(self, name: str) -> None:
        """Have `name` stand for nothing; running requests end. Raises RequestError for an unknown name."""
        self._check()
        self._engine.unload_adapter(name)

    async def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: Sequence[int] | None = None,
        cache_salt: str = "",
        prediction: Prompt | Sequence[Prompt] | None = None,
        adapter: str | Sequence[str] | None = None,
        negative_prompt: Prompt | Sequence[Prompt] | None = None,
        **others: object,
    ) -> list[RequestOutput]:
        """Run prompts (texts or token ids) to their end; outputs are in the order of the prompts.

        If one is refused or fails, the others are aborted and its error is raised.
        """
        self._check()
        refuse_others("generate", others)
        items = prompt_list(prompts, embed_dim=self._engine.card.embed_dim)
        each = one_each("sampling_params", sampling_params, len(items), SamplingParams, self._default)
        ranks = priority_list(priority, len(items), self._config.scheduler.scheduling_policy)
        check_salt(cache_salt)
        beside = asks_beside(len(items), prediction, negative_prompt, adapter)
        return await _all(
            self._whole(self._ask(prompt, one, priority=rank, cache_salt=cache_salt, **more))
            for prompt, one, rank, more in zip(items, each, ranks, beside, strict=True)
        )

    async def beam_search(
        self, prompts: Prompt | Sequence[Prompt], params: BeamSearchParams
    ) -> list[BeamSearchOutput]:
        """The likeliest sequences that continue each prompt; see LLM.beam_search."""
        self._check()
        found = await _all(map(self._whole, beam_asks(prompts, params)))
        return [beam_output(output, params, self._engine.tokenizer) for output in found]

    async def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        prediction: Prompt | None = None,
        adapter: str = "",
        negative_prompt: Prompt | None = None,
    ) -> AsyncIterator[StreamDelta]:
        """Generate from one prompt and yield the delta of each step; leaving the loop aborts the request."""
        self._check()
        item = one_prompt(prompt, self._engine.card.embed_dim)
        (one,) = one_each("sampling_params", sampling_params, 1, SamplingParams, self._default)
        beside = {"prediction": prediction, "negative_prompt": negative_prompt}
        async with self.running(item, one, adapter=adapter, **beside) as stream:
            async for delta in stream:
                yield delta

    async def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        **options: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation or several, rendered with the checkpoint's chat template; options as in LLM.chat."""
        self._check()
        return await _all(
            map(self._whole, await self._chats(conversations(messages), sampling_params, options))
        )

    async def stream_chat(
        self, messages: Sequence[Message], sampling_params: SamplingParams | None = None, **options: Any
    ) -> AsyncIterator[StreamDelta]:
        """Answer one conversation and yield the delta of each step; options as in LLM.chat."""
        self._check()
        (ask,) = await self._chats([messages], sampling_params, options)
        async with self._running(ask) as stream:
            async for delta in stream:
                yield delta

    async def _chats(
        self,
        chats: Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None,
        options: dict[str, Any],
    ) -> list[Ask]:
        tools = taken_tools(options)
        beside = chats_beside(len(chats), options)
        prompts = [await self.encode_chat(chat, **options) for chat in chats]
        each = one_each("sampling_params", params, len(prompts), SamplingParams, self._default)
        reading = self._engine.reading(tools)
        return [
            Ask(prompt=prompt, params=one, reading=reading, **more)
            for prompt, one, more in zip(prompts, each, beside, strict=True)
        ]

    async def encode_chat(self, messages: Sequence[Message], **options: Any) -> list[int]:
        """Token ids of a conversation with the checkpoint's chat template; options are those of ChatAsk."""
        self._check()
        return await self._engine.encode_chat(ChatAsk(messages=messages, **options))

    async def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        dimensions: int | None = None,
        normalize: bool | None = None,
        prompt_name: str | None = None,
        truncate_prompt_tokens: int | None = None,
        **others: object,
    ) -> list[PoolingRequestOutput[EmbeddingOutput]]:
        """The vector of each text, of a model with task embed; see LLM.embed."""
        refuse_others("embed", others)
        asked = dimensions, normalize, prompt_name, truncate_prompt_tokens
        return await self._pooled(self._pooling().embed(prompt_list(prompts), *asked))

    async def classify(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        truncate_prompt_tokens: int | None = None,
        use_activation: bool = True,
        **others: object,
    ) -> list[PoolingRequestOutput[ClassificationOutput]]:
        """The probabilities of a classifier's labels for each text; see LLM.classify."""
        refuse_others("classify", others)
        texts = prompt_list(prompts)
        work = self._pooling().classify(texts, truncate_prompt_tokens, squash=use_activation)
        return await self._pooled(work)

    async def score(
        self,
        text_1: str | Sequence[str],
        text_2: str | Sequence[str],
        *,
        truncate_prompt_tokens: int | None = None,
        instruction: str | None = None,
        use_activation: bool = True,
        **others: object,
    ) -> list[PoolingRequestOutput[ScoringOutput]]:
        """How well each text of `text_2` goes with `text_1`, or with that in its place; see LLM.score."""
        refuse_others("score", others)
        asked = truncate_prompt_tokens, instruction
        return await self._pooled(self._pooling().score(text_1, text_2, *asked, squash=use_activation))

    def _pooling(self) -> TextPooling:
        from quire.llm.text_pooling import TextPooling

        card = self.card
        return TextPooling(card.pooling, card.vocab_size, card.max_model_len)

    async def _pooled(self, work: PoolingWork[T]) -> list[T]:
        encoded = await self._engine.encode_inputs(work.texts())
        return work.answers(await _all(map(self._whole, work.asks(encoded))))

    def running(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        prediction: Prompt | None = None,
        adapter: str = "",
        negative_prompt: Prompt | None = None,
    ) -> AbstractAsyncContextManager[Stream]:
        """A request while it runs: iterate it for its deltas; `output` grows with them. Leaving the block aborts it."""
        self._check()
        (more,) = asks_beside(1, prediction, negative_prompt, adapter)
        item = one_prompt(prompt, self._engine.card.embed_dim)
        return self._running(self._ask(item, params, **more))

    def _ask(self, prompt: TextOrIds, params: SamplingParams, **more: Any) -> Ask:
        """A text to continue; where its thinking is, if that has a budget."""
        reading = None if params.thinking_token_budget is None else self._engine.reading(None)
        return Ask(prompt=prompt, params=params, reading=reading, divided=False, **more)

    @asynccontextmanager
    async def _running(self, ask: Ask) -> AsyncIterator[Stream]:
        async with self._places:
            stream = await self._submit(ask)
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

    async def _whole(self, ask: Ask) -> RequestOutput:
        async with self._running(ask) as stream:
            async for _ in stream:
                pass
        return stream.output

    async def _submit(self, ask: Ask) -> Stream:
        prompt, predicted = ask.prompt, ask.prediction
        text = prompt if isinstance(prompt, str) else None
        ids = await self._engine.encode(prompt) if isinstance(prompt, str) else prompt
        if not ids:
            raise RequestError("prompt", "the prompt has no tokens")
        if isinstance(predicted, str):
            encode = self._engine.encode
            predicted = (
                await encode(predicted, add_special_tokens=False, name="prediction") if predicted else []
            )
        negative = ask.negative_prompt
        if isinstance(negative, str):
            negative = await self._engine.encode(negative, name="negative_prompt") if negative else []
        request = Request(
            request_id=f"request-{next(self._numbers)}",
            prompt_token_ids=TokenIds(ids),
            params=ask.params,
            arrival=time.monotonic(),
            priority=ask.priority,
            namespace=ask.cache_salt,
            eos_token_ids=self._engine.card.eos_token_ids,
            prediction=TokenIds(predicted) if predicted else None,
            beams=ask.beams,
            texts=await self._engine.text_tokens(ask.params),
            pooling=ask.pooling,
        )
        request = guided(request, negative)
        if isinstance(prompt, PromptEmbeds):
            request = embedded(request, prompt)
        while True:
            try:
                work = forming(request, ask.reading, asked_part(ask.params), divided=ask.divided)
                form = await formed(work, self._compile)
                if form.request.grammar is not None:
                    await self._engine.share_vocabulary()
                made = form.request
                if ask.adapter:  # its version as of now
                    made = replace(made, adapter=self._engine.adapter(ask.adapter).digest)
                running = self._engine.generate(
                    GenerateAsk(request=made, prompt_text=text, reading=form.reading)
                )
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
