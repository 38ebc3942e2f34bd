"""The grammar of an answer with tool calls and reasoning, from the spec that its reader uses."""

from __future__ import annotations

import json
from collections.abc import Sequence

from quire.answers import AnswerRegions
from quire.records import dataclass
from quire.structured.call_rules import CallRules, CompileSchema, Lark, ToolFunction, pattern
from quire.text.regions.markers import CHANNEL_MARKERS, Markers
from quire.text.regions.spec import CallSpec, ChannelCall, ObjectCall, PythonCall, RegionSpec
from quire.types import RequestError

__all__ = ["AnswerGrammar", "CompileSchema", "ToolChoice", "ToolFunction", "answer_grammar", "tool_grammar"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolChoice:
    """`mode`: "auto", "none", "required", or "named" for the function `name`. Without `parallel` there is at most one
    call.
    """

    mode: str = "auto"
    name: str = ""
    parallel: bool = True


@dataclass(frozen=True, slots=True)
class AnswerGrammar:
    """`source` is a grammar of llguidance. It holds from the start of the answer, or from where `regions` says.

    `dropped` are the keywords that a schema that is not strict lost, with their function.
    """

    source: str
    regions: AnswerRegions
    dropped: tuple[str, ...] = ()


def tool_grammar(
    spec: RegionSpec,
    markers: Markers,
    tools: Sequence[ToolFunction],
    choice: ToolChoice,
    *,
    thinking: bool = False,
    compile_schema: CompileSchema | None = None,
    response: str = "",
) -> AnswerGrammar | None:
    """The grammar of an answer that may call `tools`; None where nothing is to be enforced (choice "none").

    `required` and `named` hold from the first token, after the thinking; `auto` from the opener of a call on. With a
    `response` format, `auto` holds from the first token, too: the answer is calls, or has that format.
    Raises RequestError for a tool that the model's format cannot enforce.
    """
    if choice.mode == "none" or not tools or spec.calls is None:
        return None
    called = [tool for tool in tools if choice.mode != "named" or tool.name == choice.name]
    if not called:
        raise RequestError("tool_choice", f"{choice.name!r} is not the name of a tool")
    if choice.mode not in ("auto", "required", "named"):
        raise RequestError("tool_choice", f"{choice.mode!r} is not auto, none, required or named")
    lark = Lark(markers, compile_schema or _with_llguidance)
    writer = _Writer(lark, spec, spec.calls, thinking)
    if choice.mode == "auto" and not response:
        start, regions = writer.auto(called, choice.parallel)
    else:
        either = choice.mode == "auto"
        rules = CallRules(lark, spec.calls, beside=either)
        answer = rules.regions(called, choice.parallel and choice.mode != "named")
        if either:
            answer = f"({writer.marked()} {answer} | {writer.formatted(response)})"
        start, regions = f"{writer.thinking_first()} {answer}", writer.regions(first=True)
    return AnswerGrammar(lark.source(start), regions, tuple(lark.dropped))


def answer_grammar(
    spec: RegionSpec, markers: Markers, source: str, *, thinking: bool = False
) -> AnswerGrammar:
    """The grammar of a response format, behind the thinking and inside the markers of the answer."""
    lark = Lark(markers, _with_llguidance)
    writer = _Writer(lark, spec, spec.calls, thinking)
    start = f"{writer.thinking_first()} {writer.formatted(source)}"
    return AnswerGrammar(lark.source(start), writer.regions(first=True))


class _Writer:
    """What stands around the calls of an answer."""

    def __init__(self, lark: Lark, spec: RegionSpec, calls: CallSpec | None, thinking: bool) -> None:
        self._lark, self._spec, self._calls = lark, spec, calls
        self._thinking = thinking and spec.reasoning is not None
        reasoning = spec.reasoning
        self.channels = bool(reasoning and reasoning.channel) or isinstance(calls and calls.call, ChannelCall)
        ids = lark.markers.ids
        self._closer = ids.get(reasoning.closer.strip(), -1) if reasoning else -1

    def regions(
        self, triggers: tuple[int, ...] = (), *, once: bool = False, first: bool = False
    ) -> AnswerRegions:
        """What the engine follows. `first`: thinking comes first or not at all."""
        spelled = self._spec.reasoning.closer.strip().encode() if self._spec.reasoning else b""
        return AnswerRegions(
            thinking=self._thinking,
            opener=self._lark.markers.opens_thinking,
            closer=self._closer,
            close=self._lark.markers.closes_thinking,
            closer_bytes=spelled if self._closer < 0 and not self.channels else b"",
            triggers=triggers,
            once=once,
            opens_first=first and not self.channels,
        )

    def formatted(self, source: str) -> str:
        """Text of a format, inside the markers of the answer."""
        opener, closer = map(self._lark.literal, self._spec.answer)
        if self.channels:
            opener = self._lark.literal("<|channel|>final<|message|>")
        return f"{opener} {self._lark.embed(source)} {closer}"

    def marked(self) -> str:
        """The tokens of which one may stand before calls without an opener."""
        spec, ids = self._calls, self._lark.markers.ids
        if spec is None or spec.opener.strip():
            return ""
        tokens = [f"<[{ids[other]}]>" for other in spec.others if other in ids]
        return f"({' | '.join(tokens)})?" if tokens else ""

    def thinking_first(self) -> str:
        """Thinking before what is enforced. That which ends with a token the engine skips by itself."""
        reasoning, lark = self._spec.reasoning, self._lark
        if reasoning is None:
            return ""
        if self.channels:
            text = lark.rule("text", "/(?s:.*)/")
            end = lark.literal("<|end|><|start|>assistant")
            return f"({lark.literal('<|channel|>analysis<|message|>')} {text} {end})*"
        after = len(reasoning.closer) - len(reasoning.closer.rstrip("\n"))
        newlines = "/" + "\\n?" * (after - 1) + "\\n/"
        gap = f"({lark.rule('GAP', newlines)})?" if after else ""
        if self._thinking and self._closer >= 0:
            return gap
        if self._closer >= 0:
            body = f"{lark.rule('text', '/(?s:.*)/')} <[{self._closer}]>"
        else:
            end = lark.rule("THOUGHT", f"/(?s:.*){pattern(reasoning.closer.strip())}/")
            body = lark.rule("thought", end, "[lazy]")
        if self._thinking:
            return f"{body} {gap}"
        return f"({lark.literal(reasoning.opener.strip())} {body} {gap})?"

    def auto(self, tools: Sequence[ToolFunction], parallel: bool) -> tuple[str, AnswerRegions]:
        """Calls where the model begins one, and anything else besides."""
        lark, spec = self._lark, self._calls
        assert spec is not None
        rules = CallRules(lark, spec)
        ids = lark.markers.ids
        if self.channels:
            return self._auto_channels(spec, rules, tools)
        first = next(iter(lark.markers.split(spec.opener.strip())), "")
        if isinstance(first, int):
            text = next(text for text, number in ids.items() if number == first)
            others = tuple(ids[other] for other in spec.others if other in ids)
            return rules.region(tools, parallel, behind=text), self.regions(
                (first, *others), once=not parallel
            )
        text = lark.rule("text", "/(?s:.*)/")
        if not spec.opener.strip():
            calls = rules.regions(tools, parallel)
            tokens = [f"<[{ids[other]}]>" for other in spec.others if other in ids]
            plain = lark.rule("PLAIN", f"/(?s:.*)/ & ~/{_beginning(spec)}(?s:.*)/")
            marked = f" ({' | '.join(tokens)}) {calls}" if tokens else ""
            answer = (
                f"({calls} | {plain}{f' ({marked})?' if marked else ''}{f' |{marked}' if marked else ''})"
            )
            return f"{self.thinking_first()} {answer}", self.regions()
        opener = pattern(spec.opener.strip())
        lead = lark.rule("LEAD", f"/(?s:.*){opener}/")
        head = lark.rule("lead", lead, "[lazy]")
        region = f"{head} {rules.region(tools, parallel, behind=spec.opener.strip())}"
        rest = lark.rule("REST", f"/(?s:.*)/ & ~/(?s:.*){opener}(?s:.*)/")
        return f"{self.thinking_first()} ({region}){'*' if parallel else '?'} {rest}", self.regions()

    def _auto_channels(
        self, spec: CallSpec, rules: CallRules, tools: Sequence[ToolFunction]
    ) -> tuple[str, AnswerRegions]:
        """Behind the start of a message, its head: that of a call is followed by the whole call."""
        lark = self._lark
        ids = lark.markers.ids
        start, channel = (ids.get(text, -1) for text in CHANNEL_MARKERS[:2])
        if channel < 0:
            raise RequestError("tools", "this vocabulary lacks the tokens of the model's format of calls")
        call = lark.rule("function", rules.region(tools, False, behind=spec.opener))
        message = lark.literal("<|message|>")
        head = lark.rule("head", f'("analysis" | "final") {message} | "commentary" ({message} | {call})')
        again = f'"assistant" <[{channel}]> {head}'
        return f"{head} | {again}", self.regions(tuple(number for number in (channel, start) if number >= 0))


def _beginning(spec: CallSpec) -> str:
    """A pattern for what an answer that starts with a call begins with."""
    if isinstance(spec.call, PythonCall):
        return r"\s*\[\s*[^\s<>{}\[\]()\"'=,]+\s*\("
    bracket = r"\[\s*" if isinstance(spec.call, ObjectCall) and spec.call.array else ""
    return rf"\s*{bracket}\{{\s*\""


def _with_llguidance(schema: object, strict: bool) -> tuple[str, Sequence[str]]:
    options = (
        schema if strict or not isinstance(schema, dict) else {**schema, "x-guidance": {"lenient": True}}
    )
    return json.dumps({"grammars": [{"json_schema": options}]}), ()
