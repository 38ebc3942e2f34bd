"""How the answers of a model are read: its regions, and what one request wants of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from quire.records import dataclass
from quire.text.regions.detect import ModelRegions, model_regions
from quire.text.regions.reader import RegionReader
from quire.text.tokenizer import Tokenizer
from quire.text.tools import Calls, ToolUse

# The end of a prompt that shows whether the answer begins inside reasoning: an opener and white space behind it.
_END_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Reading:
    """How the samples of one request are divided. `schemas` are those of the functions that may be called, None if no
    calls are read. Without `parallel` a sample ends before a second call. `eager`: a grammar keeps calls to their
    format, so that they are delivered as they arrive.
    """

    regions: ModelRegions
    tokenizer: Tokenizer
    schemas: Mapping[str, Mapping[str, Any]] | None = None
    parallel: bool = True
    eager: bool = False

    def thinking(self, prompt: Sequence[int]) -> bool:
        """Whether a prompt has opened the reasoning."""
        reasoning = self.regions.spec.reasoning
        if reasoning is None:
            return False
        end = self.tokenizer.decode(list(prompt[-_END_TOKENS:]), skip_special_tokens=False)
        return reasoning.opened_by(end)

    def reader(self, prompt: Sequence[int], seed: str, *, hide: bool) -> RegionReader:
        """A reader of one sample; `seed` determines the ids of its calls, `hide` leaves out control tokens."""
        return RegionReader(
            self.regions.spec,
            self.regions.markers,
            tools=self.schemas,
            thinking=self.thinking(prompt),
            eager=self.eager,
            hide=hide,
            seed=seed,
        )


class AnswerFormat:
    """The format of a model's answers; see `regions.detect.model_regions` for the arguments and errors."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: str | None = None,
        *,
        tool_call_parser: str | None = None,
        reasoning_parser: str | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self.regions = model_regions(
            tokenizer, template, tool_call_parser=tool_call_parser, reasoning_parser=reasoning_parser
        )

    def reading(self, tools: ToolUse | None, *, eager: bool = False) -> Reading | None:
        """How an answer is read; None if it is nothing but text."""
        spec = self.regions.spec
        calls = tools is not None and tools.calls is not Calls.NONE and spec.calls is not None
        if not calls and spec.reasoning is None and spec.answer == ("", ""):
            return None
        schemas = (
            {function.name: function.parameters for function in tools.callable} if tools and calls else None
        )
        parallel = tools is None or tools.parallel
        return Reading(self.regions, self._tokenizer, schemas, parallel, eager)
