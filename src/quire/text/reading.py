"""How the answers of a model are read: its regions, and what one request wants of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from quire.records import dataclass
from quire.text.chat_renderer import ChatRenderer
from quire.text.regions.calls import call_heads
from quire.text.regions.detect import ModelRegions, model_regions
from quire.text.regions.reader import RegionReader
from quire.text.regions.spec import ChannelCall
from quire.text.tokenizer import Tokenizer
from quire.text.tools import Calls, ToolUse
from quire.types import RequestError

# The end of a prompt that shows whether the answer begins inside reasoning: an opener and white space behind it.
_END_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Reading:
    """How the samples of one request are divided. `tools` are None if no calls are read; `calls` counts what becomes of
    them. `eager`: a grammar keeps calls to their format, so that they are delivered as they arrive. `formed`: one keeps
    the answer to calls or to a text of some format; its beginning says to which. `banned` tokens would begin a call
    that is not wanted. `thinking`: the prompt has opened the reasoning (`behind`).
    """

    regions: ModelRegions
    tokenizer: Tokenizer
    tools: ToolUse | None = None
    calls: Counter[str] | None = None
    eager: bool = False
    formed: bool = False
    banned: tuple[int, ...] = ()
    thinking: bool = False

    @property
    def parallel(self) -> bool:
        """Whether a sample may have several calls."""
        return self.tools is None or self.tools.parallel

    @property
    def heads(self) -> tuple[str, ...]:
        """See `call_heads`."""
        spec, tools = self.regions.spec.calls, self.tools
        if spec is None or tools is None:
            return ()
        return call_heads(spec, [tool.name for tool in tools.callable], self.regions.markers)

    def is_control(self, text: str) -> bool:
        """Whether a text begins with a control token, which is never part of other text."""
        first = next(iter(self.regions.markers.split(text)), "")
        return isinstance(first, int) and first in self.tokenizer.control_ids

    def behind(self, prompt: Sequence[int]) -> Reading:
        """The reading of the answers to a prompt."""
        reasoning = self.regions.spec.reasoning
        if reasoning is None:
            return self
        end = self.tokenizer.decode(list(prompt[-_END_TOKENS:]), skip_special_tokens=False)
        return replace(self, thinking=reasoning.opened_by(end))

    def reader(self, seed: str, *, hide: bool) -> RegionReader:
        """A reader of one sample; `seed` determines the ids of its calls, `hide` leaves out control tokens."""
        tools = self.tools
        return RegionReader(
            self.regions.spec,
            self.regions.markers,
            tools=None if tools is None else {tool.name: tool.parameters for tool in tools.callable},
            thinking=self.thinking,
            eager=self.eager,
            heads=self.heads if self.formed else None,
            counts=self.calls,
            hide=hide,
            seed=seed,
        )


class AnswerFormat:
    """The format of a model's answers; see `regions.detect.model_regions` for the arguments and errors. `reads_tools`:
    the template shows tools to the model.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: str | None = None,
        *,
        reads_tools: bool = True,
        tool_call_parser: str | None = None,
        reasoning_parser: str | None = None,
    ) -> None:
        self._tokenizer, self._reads_tools = tokenizer, reads_tools
        self.regions = model_regions(
            tokenizer, template, tool_call_parser=tool_call_parser, reasoning_parser=reasoning_parser
        )
        self.calls: Counter[str] = Counter()  # by what became of them

    def prepare(self, renderer: ChatRenderer) -> None:
        """Have earlier turns rendered as this format writes them."""
        reasoning = self.regions.spec.reasoning
        if reasoning is not None and reasoning.in_content:
            renderer.write_thoughts(reasoning.opener, reasoning.closer)

    def reading(self, tools: ToolUse | None) -> Reading | None:
        """How an answer is read; None if it is nothing but text.

        Raises RequestError for tools that the template does not read, or whose format of calls is not known.
        """
        spec = self.regions.spec
        field = "functions" if tools is not None and tools.older else "tools"
        if tools is not None and not self._reads_tools:
            raise RequestError(
                field,
                "this model's chat template ignores tools; set --chat-template to one that renders them",
            )
        if tools is not None and tools.calls is not Calls.NONE:
            if spec.calls is None:
                raise RequestError(
                    field,
                    "the format of this model's tool calls is not known; set --tool-call-parser to name it",
                )
            return Reading(self.regions, self._tokenizer, tools, self.calls)
        banned = () if tools is None else self._call_openers()
        if not banned and spec.reasoning is None and spec.answer == ("", ""):
            return None
        return Reading(self.regions, self._tokenizer, banned=banned)

    def _call_openers(self) -> tuple[int, ...]:
        """The tokens that begin a call and nothing else."""
        spec, markers = self.regions.spec.calls, self.regions.markers
        if spec is None or isinstance(spec.call, ChannelCall):
            return ()
        firsts = (next(iter(markers.split(text.strip())), "") for text in (spec.opener, *spec.others))
        return tuple(first for first in firsts if isinstance(first, int))
