"""LLM: a model in this process, for scripts and notebooks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from quire.engine.api import Ask, StepRecord
from quire.engine.build.adapter_room import with_room_for
from quire.engine.build.assemble import Built, build
from quire.engine.build.opening import kept_files, open_model
from quire.engine.shared_engine import SharedEngine
from quire.engine.sync_engine import TextDelta
from quire.llm.asked import (
    Message,
    Prompt,
    adapter_opener,
    adapter_sources,
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
from quire.loader import DEFAULT_MODEL
from quire.outputs import RequestOutput
from quire.types import RequestError, SamplingParams
from quire.util.progress import ByteProgress, make_bar, shows_progress
from quire.util.startup_spans import Startup

if TYPE_CHECKING:
    from quire.llm.beam_outputs import BeamSearchOutput, BeamSearchParams
    from quire.llm.text_pooling import (
        ClassificationOutput,
        EmbeddingOutput,
        PoolingRequestOutput,
        PoolingWork,
        ScoringOutput,
        TextPooling,
    )
    from quire.lora.adapter import Adapter
    from quire.text.chat_renderer import ChatRenderer
    from quire.text.reading import AnswerFormat, Reading
    from quire.text.tokenizer import Tokenizer

Bar = bool | Callable[..., Any]  # whether to show a bar, or what makes it, with the arguments of tqdm
T = TypeVar("T")


class LLM:
    """Loads a model and generates.

        llm = LLM("path/to/model", memory="6GiB")
        for out in llm.generate(["Hello", [1, 2, 3]], SamplingParams(max_tokens=32)):
            print(out.outputs[0].text)

    `model` is a checkpoint folder, a GGUF file or a hub name (default: the bundled small model). Options are the fields
    of EngineConfig; `memory` may be a string such as "6GiB". Options of vLLM's LLM are taken where Quire has the thing,
    or refused with the reason. `chat_template` replaces the checkpoint's: a file, or its text. `tool_call_parser` and
    `reasoning_parser` name the formats of answers as `quire serve` does, else they are found. `adapters`, with
    enable_lora=True, are what `load_adapter` takes, by name. Raises CheckpointError, UnsupportedModelError,
    MemoryBudgetError or ValueError, with the reason.

    Several threads may use it, and several streams may be open: a caller that waits for a token runs a step for all. It
    belongs to the process that made it; a forked child must make its own. For asyncio, use AsyncLLM.
    """

    def __init__(
        self,
        model: str | Path = DEFAULT_MODEL,
        *,
        progress: bool = True,
        chat_template: str | Path | None = None,
        tool_call_parser: str | None = None,
        reasoning_parser: str | None = None,
        adapters: Mapping[str, str | Path | Adapter] | None = None,
        **options: Any,
    ) -> None:
        self._startup = Startup()
        config = engine_options(options)
        if adapters and not config.adapters.enable_lora:
            raise ValueError("adapters: they need enable_lora=True")
        self._parsers = {"tool_call_parser": tool_call_parser, "reasoning_parser": reasoning_parser}
        self._template: str | None = None
        if chat_template is not None or any(self._parsers.values()):
            self._check_formats(chat_template)
        with ByteProgress("loading weights", "saving packed weights", enabled=progress) as bar:
            opened = open_model(model, later=True, startup=self._startup, cache=kept_files(config))
            config = with_room_for(config, adapter_sources(adapters or {}), opened.facts.spec)
            self._built = build(opened, config, bar, startup=self._startup)
        self._engine = SharedEngine(self._built)
        self._chat: ChatRenderer | None = None
        self._format: AnswerFormat | None = None
        for name, adapter in (adapters or {}).items():
            self.load_adapter(name, adapter)
        self._startup.mark("ready")

    def _check_formats(self, template: str | Path | None) -> None:
        """Before the model is loaded: read the template, and check the names."""
        from quire.text.chat_renderer import read_template
        from quire.text.regions.families import check_parsers

        self._template = read_template(template)
        check_parsers(**self._parsers)

    def __repr__(self) -> str:
        config = self._built.config
        facts = f"{config.quantized or config.weights} weights, context of {self._built.plan.limits.max_len} tokens"
        return f"LLM({self._built.model.facts.architecture}: {facts})"

    @property
    def built(self) -> Built:
        """The built engine: facts, choices, program and memory plan."""
        return self._built

    @property
    def notices(self) -> list[str]:
        """Remarks for the user on how the model is run."""
        return self._built.notices()

    @property
    def startup(self) -> list[dict[str, Any]]:
        """Start-up phases, in seconds from the start of this process; see docs/startup.md."""
        return self._startup.report()

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer of the checkpoint, if it has one."""
        return self._built.model.tokenizer

    def memory_report(self) -> list[str]:
        """The memory plan by part, as lines of text."""
        return self._built.plan.lines()

    def default_params(self) -> SamplingParams:
        """The sampling parameters that the checkpoint recommends."""
        return SamplingParams(**dict(self._built.model.facts.generation.sampling))

    def load_adapter(self, name: str, adapter: str | Path | Adapter) -> None:
        """Have `name` stand for an adapter: its folder or file, or its numbers.

        If it stands for another, that is replaced for later requests; running ones end on theirs. Raises
        CheckpointError or UnsupportedModelError, and changes nothing, for one that is broken or does not fit.
        """
        self._engine.load_adapter(name, adapter_opener(name, adapter, self._engine.adapters))

    def unload_adapter(self, name: str) -> None:
        """Have `name` stand for nothing; running requests end. Raises RequestError for an unknown name."""
        self._engine.unload_adapter(name)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: Bar = True,
        priority: Sequence[int] | None = None,
        cache_salt: str = "",
        prediction: Prompt | Sequence[Prompt] | None = None,
        negative_prompt: Prompt | Sequence[Prompt] | None = None,
        adapter: str | Sequence[str] | None = None,
        **others: object,
    ) -> list[RequestOutput]:
        """Run prompts to their end; outputs are in the order of the prompts. A prompt is a text, token ids, or with
        enable_prompt_embeds {"prompt_embeds": rows}, an array [tokens, hidden size] of embeddings.

        One SamplingParams for all or one per prompt; None uses the checkpoint's defaults. `prediction` is what the
        outputs may turn out to be, for all or one per prompt: such outputs are faster. `negative_prompt` is what a
        `guidance_scale` keeps them away from, for all or one per prompt; without it that is the last token of the
        prompt. `adapter` is the name of one for all, or one per prompt, "" being none. `use_tqdm` shows a bar on a
        terminal and in a notebook; a callable makes it. `others` are arguments of vLLM without a counterpart, which are
        refused unless they ask for nothing. If one prompt is refused, RequestError is raised and none has run.
        """
        refuse_others("generate", others)
        items = prompt_list(prompts, embed_dim=self._built.embed_dim)
        each = self._params(sampling_params, len(items))
        ranks = priority_list(priority, len(items), self._built.config.asked.scheduler.scheduling_policy)
        beside = asks_beside(len(items), prediction, negative_prompt, adapter)
        check_salt(cache_salt)
        asks = [
            Ask(
                prompt=prompt,
                params=one,
                priority=rank,
                cache_salt=cache_salt,
                reading=self._thinks(one),
                divided=False,
                **more,
            )
            for prompt, one, rank, more in zip(items, each, ranks, beside, strict=True)
        ]
        return self._whole(asks, use_tqdm)

    def beam_search(
        self, prompts: Prompt | Sequence[Prompt], params: BeamSearchParams, use_tqdm: Bar = True
    ) -> list[BeamSearchOutput]:
        """The likeliest sequences that continue each prompt, as transformers' beam search finds them.

        If one prompt is refused, RequestError is raised and none has run.
        """
        from quire.llm.beam_outputs import beam_asks, beam_output

        outputs = self._whole(beam_asks(prompts, params), use_tqdm)
        return [beam_output(output, params, self.tokenizer) for output in outputs]

    def _whole(self, asks: list[Ask], use_tqdm: Bar) -> list[RequestOutput]:
        """Run requests to their end."""
        outputs = self._engine.add(asks)
        try:
            self._run(outputs, use_tqdm)
        except BaseException:
            self._engine.abort(outputs)
            raise
        return outputs

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        prediction: Prompt | None = None,
        negative_prompt: Prompt | None = None,
        adapter: str = "",
    ) -> TextStream:
        """Generate from one prompt and yield the delta of each step. Closing the stream aborts the request."""
        item = one_prompt(prompt, self._built.embed_dim)
        (one,) = self._params(sampling_params, 1)
        (more,) = asks_beside(1, prediction, negative_prompt, adapter)
        return self._stream(Ask(prompt=item, params=one, reading=self._thinks(one), divided=False, **more))

    def _stream(self, ask: Ask) -> TextStream:
        (output,) = self._engine.add([ask], stream=True)
        return TextStream(self._engine, output, self._startup)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: Bar = True,
        **options: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation or several, rendered with the checkpoint's chat template.

        Options are those of ChatAsk, such as `chat_template_kwargs` and `reasoning_effort`, `tools`, `tool_choice` and
        `parallel_tool_calls` as in OpenAI's API, and `prediction`, `negative_prompt` and `adapter` as in `generate`.
        Each output has the `text` of the answer, its `reasoning` and its `tool_calls`.
        """
        return self._whole(self._chats(conversations(messages), sampling_params, options), use_tqdm)

    def stream_chat(
        self, messages: Sequence[Message], sampling_params: SamplingParams | None = None, **options: Any
    ) -> TextStream:
        """Answer one conversation and yield the delta of each step; its `parts` are text, reasoning and calls."""
        (ask,) = self._chats([messages], sampling_params, options)
        return self._stream(ask)

    def _chats(
        self,
        chats: Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None,
        options: dict[str, Any],
    ) -> list[Ask]:
        tools = taken_tools(options)
        each = self._params(params, len(chats))
        beside = chats_beside(len(chats), options)
        prompts = [self.encode_chat(chat, **options) for chat in chats]
        reading = self._answer_format().reading(tools)
        return [
            Ask(prompt=prompt, params=one, reading=reading, **more)
            for prompt, one, more in zip(prompts, each, beside, strict=True)
        ]

    def encode_chat(self, messages: Sequence[Message], **options: Any) -> list[int]:
        """Token ids of a conversation with the checkpoint's chat template; options are those of ChatAsk."""
        from quire.text.chat_messages import REASONING
        from quire.text.chat_renderer import ChatAsk

        if any(name in message for message in messages for name in REASONING):
            self._answer_format()  # which may say where it goes
        return self._renderer().encode(ChatAsk(messages=messages, **options))

    def _renderer(self) -> ChatRenderer:
        from quire.text.chat_renderer import ChatRenderer

        if self._chat is None:
            tokenizer = self._built.model.tokenizer
            if tokenizer is None:
                raise RequestError(
                    "messages", "this model folder has no tokenizer and therefore no chat template"
                )
            self._chat = ChatRenderer(tokenizer, template=self._template)
        return self._chat

    def _answer_format(self) -> AnswerFormat:
        from quire.text.reading import AnswerFormat

        if self._format is None:
            assert self._built.model.tokenizer is not None  # the conversation was rendered
            reads_tools = self._renderer().reads_tools
            self._format = AnswerFormat(
                self._built.model.tokenizer, self._template, reads_tools=reads_tools, **self._parsers
            )
            self._format.prepare(self._renderer())
        return self._format

    def _thinks(self, params: SamplingParams) -> Reading | None:
        """Where thinking is in a continued text, if it has a budget."""
        if params.thinking_token_budget is None or self._built.model.tokenizer is None:
            return None
        return self._answer_format().reading(None)

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        use_tqdm: Bar = True,
        dimensions: int | None = None,
        normalize: bool | None = None,
        prompt_name: str | None = None,
        truncate_prompt_tokens: int | None = None,
        **others: object,
    ) -> list[PoolingRequestOutput[EmbeddingOutput]]:
        """The vector of each text, of a model with task embed; `outputs.embedding` has its numbers.

        `dimensions` keeps the first numbers only. `normalize`: to length one; None as the checkpoint says.
        `prompt_name`: the prompt of the checkpoint that is put before texts. `truncate_prompt_tokens` cuts longer
        texts, -1 to what the model takes; without it they are refused. `others`: as in `generate`.
        """
        refuse_others("embed", others)
        asked = dimensions, normalize, prompt_name, truncate_prompt_tokens
        return self._pooled(self._pooling().embed(prompt_list(prompts), *asked), use_tqdm)

    def classify(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        use_tqdm: Bar = True,
        truncate_prompt_tokens: int | None = None,
        use_activation: bool = True,
        **others: object,
    ) -> list[PoolingRequestOutput[ClassificationOutput]]:
        """The probabilities of a classifier's labels for each text; without `use_activation`, the logits."""
        refuse_others("classify", others)
        texts = prompt_list(prompts)
        work = self._pooling().classify(texts, truncate_prompt_tokens, squash=use_activation)
        return self._pooled(work, use_tqdm)

    def score(
        self,
        text_1: str | Sequence[str],
        text_2: str | Sequence[str],
        *,
        use_tqdm: Bar = True,
        truncate_prompt_tokens: int | None = None,
        instruction: str | None = None,
        use_activation: bool = True,
        **others: object,
    ) -> list[PoolingRequestOutput[ScoringOutput]]:
        """How well each text of `text_2` goes with `text_1`, or with that in its place.

        It is the score of a cross-encoder, or of a decoder that judges by `instruction`; of a model with task embed,
        the cosine of their vectors.
        """
        refuse_others("score", others)
        asked = truncate_prompt_tokens, instruction
        return self._pooled(self._pooling().score(text_1, text_2, *asked, squash=use_activation), use_tqdm)

    def _pooling(self) -> TextPooling:
        from quire.llm.text_pooling import TextPooling

        facts = self._built.model.facts
        return TextPooling(facts.pooling, facts.spec.vocab, self._built.plan.limits.max_len)

    def _pooled(self, work: PoolingWork[T], use_tqdm: Bar) -> list[T]:
        """Run the texts of a call on a model with pooling."""
        from quire.engine.front.pool_inputs import PoolInputs

        model = self._built.model
        inputs = PoolInputs(model.facts, model.tokenizer, self._built.plan.limits.max_len)
        return work.answers(self._whole(work.asks(list(map(inputs.encode, work.texts()))), use_tqdm))

    def step_records(self) -> list[StepRecord]:
        """Records of the latest steps: contents and cost."""
        return list(self._built.core.records)

    def close(self) -> None:
        """Free the memory. The LLM cannot be used afterwards; closing again does nothing."""
        if self._engine.close():
            self._built.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _params(
        self, params: SamplingParams | Sequence[SamplingParams] | None, count: int
    ) -> list[SamplingParams]:
        return one_each("sampling_params", params, count, SamplingParams, self.default_params)

    def _run(self, outputs: list[RequestOutput], use_tqdm: Bar) -> None:
        bar = None
        if callable(use_tqdm) or (use_tqdm and shows_progress()):
            make = use_tqdm if callable(use_tqdm) else make_bar
            bar = make(total=len(outputs), desc="requests", unit="req")
        started, done = time.perf_counter(), 0
        while done < len(outputs):
            self._engine.advance(outputs)
            self._startup.mark("first token")
            finished = sum(output.finished for output in outputs)
            if bar is not None:
                tokens = sum(output.usage.completion_tokens for output in outputs)
                bar.set_postfix_str(f"{tokens / (time.perf_counter() - started):.1f} tokens/s", refresh=False)
                bar.update(finished - done)
            done = finished
        if bar is not None:
            bar.close()


class TextStream(Iterator[TextDelta]):
    """The deltas of one request, step by step. Closing it, or dropping it before its end, aborts the request.

    `output` grows with every step, also with those run by other callers of the same LLM.
    """

    def __init__(self, engine: SharedEngine, output: RequestOutput, startup: Startup) -> None:
        self.output = output
        self._engine, self._startup = engine, startup
        self._open = True

    def __next__(self) -> TextDelta:
        delta = self._engine.read(self.output) if self._open else None
        if delta is None:
            self._open = False
            raise StopIteration
        self._startup.mark("first token")
        return delta

    def advance(self) -> None:
        """Run one step for all open requests of the LLM, unless this one has ended; deltas are kept."""
        self._engine.advance([self.output])

    def close(self) -> None:
        """Abort the request; does nothing if it has ended."""
        if self._open:
            self._open = False
            self._engine.abort([self.output])

    def __enter__(self) -> TextStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if self._open:
            self._engine.drop(self.output)
