"""LLM: a model in this process, for scripts and notebooks."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from quire.config.schema import EngineConfig
from quire.engine.build import Built, build
from quire.engine.opening import open_model
from quire.engine.output import TextDelta
from quire.engine.sync_engine import SyncEngine
from quire.loader import DEFAULT_MODEL
from quire.types import RequestError, RequestOutput, SamplingParams, StepRecord
from quire.util.progress import ByteProgress
from quire.util.sizes import parse_size
from quire.util.startup import Startup

if TYPE_CHECKING:
    from quire.text.chat import ChatRenderer

Prompt = str | Sequence[int]
Message = Mapping[str, Any]


class LLM:
    """Loads a model and generates.

        llm = LLM("path/to/model", memory="6GiB")
        for out in llm.generate(["Hello", [1, 2, 3]], SamplingParams(max_tokens=32)):
            print(out.outputs[0].text)

    `model` is a checkpoint folder, a GGUF file or a hub name (default: the small model that ships with Quire). Options
    are the fields of EngineConfig; `memory` may be a string such as "6GiB". Raises CheckpointError,
    UnsupportedModelError, MemoryBudgetError or ValueError, each naming what is wrong. Not thread-safe.
    """

    def __init__(self, model: str | Path = DEFAULT_MODEL, *, progress: bool = True, **options: Any) -> None:
        if isinstance(options.get("memory"), str):
            options["memory"] = parse_size(options["memory"])
        self._startup = Startup()
        config = EngineConfig(**options)
        with ByteProgress("loading weights", "saving packed weights", enabled=progress) as bar:
            opened = open_model(model, later=True, startup=self._startup)
            self._built = build(opened, config, bar, startup=self._startup)
        self._engine = SyncEngine(self._built)
        self._chat: ChatRenderer | None = None
        self._startup.mark("ready")

    @property
    def built(self) -> Built:
        """What was built: facts, choices, program and memory plan."""
        return self._built

    @property
    def notices(self) -> list[str]:
        """What the user should know about how the model is run."""
        return self._built.notices()

    @property
    def startup(self) -> list[dict[str, Any]]:
        """Where start-up time went: spans in seconds from the start of this process; see docs/startup.md."""
        return self._startup.report()

    def memory_report(self) -> list[str]:
        """The memory bound by part, as lines of text."""
        return self._built.plan.lines()

    def default_params(self) -> SamplingParams:
        """The sampling parameters that the checkpoint recommends."""
        return SamplingParams(**dict(self._built.model.facts.generation.sampling))

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priorities: Sequence[int] | None = None,
        cache_salt: str = "",
        progress: bool = True,
    ) -> list[RequestOutput]:
        """Run prompts (texts or token ids) to their end; outputs in the order of the prompts.

        One SamplingParams for all or one a prompt; None takes the checkpoint's defaults. `progress` shows a bar on
        a terminal. When one prompt is refused, RequestError is raised and none has run.
        """
        asks = _prompts(prompts)
        each = self._params(params, len(asks))
        outputs: list[RequestOutput] = []
        try:
            for i, (prompt, one) in enumerate(zip(asks, each, strict=True)):
                priority = priorities[i] if priorities else 0
                outputs.append(self._engine.add(prompt, one, priority=priority, cache_salt=cache_salt))
            self._run(outputs, progress)
        except BaseException:
            self._abort(outputs)
            raise
        return outputs

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[TextDelta]:
        """Generate one prompt, yielding what each step adds. Closing the iterator aborts the request."""
        return self._stream(self._engine.add(prompt, params or self.default_params()))

    def chat(
        self, messages: Sequence[Message] | Sequence[Sequence[Message]], params: SamplingParams | None = None
    ) -> list[RequestOutput]:
        """Answer one conversation or several, rendered with the checkpoint's chat template."""
        many = messages if messages and not isinstance(messages[0], Mapping) else [messages]
        prompts = [self.encode_chat(conversation) for conversation in many]  # type: ignore[arg-type]
        return self.generate(prompts, params)

    def stream_chat(
        self, messages: Sequence[Message], params: SamplingParams | None = None
    ) -> Iterator[TextDelta]:
        """Answer one conversation, yielding what each step adds."""
        return self.stream(self.encode_chat(messages), params)

    def encode_chat(self, messages: Sequence[Message], **options: Any) -> list[int]:
        """Token ids of a conversation under the checkpoint's chat template; options are ChatAsk's."""
        from quire.text.chat import ChatAsk, ChatRenderer

        if self._chat is None:
            tokenizer = self._built.model.tokenizer
            if tokenizer is None:
                raise RequestError("messages", "this model folder has no tokenizer, so no chat template")
            self._chat = ChatRenderer(tokenizer)
        return self._chat.encode(ChatAsk(messages=messages, **options))

    def step_records(self) -> list[StepRecord]:
        """The latest steps: what each held and what it cost."""
        return list(self._engine.core.records)

    def close(self) -> None:
        """Give memory back. The LLM cannot be used afterwards."""
        self._built.executor.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _params(
        self, params: SamplingParams | Sequence[SamplingParams] | None, count: int
    ) -> list[SamplingParams]:
        if params is None:
            return [self.default_params()] * count
        if isinstance(params, SamplingParams):
            return [params] * count
        if len(params) != count:
            raise RequestError("params", f"{len(params)} sampling parameters for {count} prompts")
        return list(params)

    def _run(self, outputs: list[RequestOutput], progress: bool) -> None:
        bar = None
        if progress and sys.stderr.isatty():
            from tqdm import tqdm

            bar = tqdm(total=len(outputs), desc="requests", unit="req")
        started, done, tokens = time.perf_counter(), 0, 0
        while self._engine.has_work():
            for delta in self._step():
                tokens += len(delta.token_ids)
            if bar is not None:
                finished = sum(out.finished for out in outputs)
                bar.set_postfix_str(f"{tokens / (time.perf_counter() - started):.1f} tokens/s", refresh=False)
                bar.update(finished - done)
                done = finished
        if bar is not None:
            bar.close()

    def _step(self) -> list[TextDelta]:
        deltas = self._engine.step()
        if deltas:
            self._startup.mark("first token")
        return deltas

    def _stream(self, output: RequestOutput) -> Iterator[TextDelta]:
        try:
            while not output.finished:
                for delta in self._step():
                    if delta.request_id == output.request_id:
                        yield delta
        finally:
            self._abort([output])

    def _abort(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            if not output.finished:
                self._engine.abort(output.request_id)


def _prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or several: a string, or a list of ids, is one."""
    if isinstance(prompts, str):
        return [prompts]
    if prompts and isinstance(prompts[0], int):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]
