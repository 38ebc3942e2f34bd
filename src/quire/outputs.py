"""What a request brings: its samples, running or finished."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import field

from quire import records
from quire.answers import Timings, ToolCall, Usage
from quire.logprobs import LogprobTable, PositionLogprobs
from quire.types import FinishReason

_SHOWN_CHARS = 80  # the longest text shown in a repr, in characters


@records.dataclass(slots=True, repr=False)
class CompletionOutput:
    """One sample of a request, running or finished. `text` is without reasoning and calls where these are read."""

    index: int
    text: str
    token_ids: list[int] | array[int]
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    logprobs: LogprobTable | None = None
    reasoning: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)

    def __repr__(self) -> str:
        """One line, however long the sample is: shown by notebooks."""
        text = self.text if len(self.text) <= _SHOWN_CHARS else f"{self.text[: _SHOWN_CHARS - 1]}…"
        state = "unfinished" if self.finish_reason is None else str(self.finish_reason)
        names = "".join(f" {call.name}()," for call in self.tool_calls)
        return f"CompletionOutput({self.index}, {text!r},{names} {len(self.token_ids)} tokens, {state})"


@records.dataclass(slots=True, repr=False)
class RequestOutput:
    """The samples of a request, with prompt, usage and timings; `dropped` are keywords of its schema not enforced, and
    `pooled` the float32 numbers that a model with pooling gave for the prompt."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: Sequence[PositionLogprobs | None] | None = None
    usage: Usage = field(default_factory=Usage)
    timings: Timings = field(default_factory=Timings)
    finished: bool = False
    dropped: tuple[str, ...] = ()
    pooled: bytes = b""

    def __repr__(self) -> str:
        samples = "".join(f"\n  {output!r}," for output in self.outputs)
        asked, cached = self.usage.prompt_tokens, self.usage.cached_tokens
        return f"RequestOutput({self.request_id!r}, {asked} prompt tokens, {cached} cached, [{samples}\n])"
