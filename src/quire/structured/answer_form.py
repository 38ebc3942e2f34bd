"""What a chat asks of the form of its answer, as one grammar: calls of functions, a response format, both behind the
thinking.

The schemas in it are compiled first, each by itself, where compiling is bounded (`asks`). Joining what came of them
costs little (`joined`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from quire.answers import AnswerRegions
from quire.records import dataclass
from quire.structured.ask import StructuredOutput
from quire.structured.tool_grammar import ToolChoice, ToolFunction, answer_grammar, tool_grammar
from quire.text.reading import Reading
from quire.text.tools import Calls
from quire.types import Grammar, RequestError

NEVER = -1  # a trigger that is no token
_JSON = ("json", "json_object")
_JSON_BEGINS = '{["-0123456789tfn'
_ANY = '{"grammars": [{"json_schema": {}}]}'
Compiled = tuple[str, Sequence[str]]  # the source of a grammar, and the keywords that it lacks


@dataclass(frozen=True, slots=True)
class AskedPart:
    """A structure that a request asks for; `field` is its place in the request."""

    field: str
    ask: StructuredOutput


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """What is enforced on an answer: `grammar` where `regions` say. `dropped` are keywords of lenient schemas.
    `formed`: text of the answer has a format.
    """

    grammar: Grammar
    regions: AnswerRegions
    dropped: tuple[str, ...] = ()
    formed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerPlan:
    """The form of the answers to a prompt: calls of the reading's tools, a `response` format. `thinking`: the prompt
    has opened the reasoning. `budget` is the most tokens of it.
    """

    reading: Reading
    thinking: bool = False
    response: AskedPart | None = None
    budget: int | None = None

    def asks(self) -> list[AskedPart]:
        """What must be compiled first."""
        found: dict[bytes, AskedPart] = {}
        places = self._places()

        def note(schema: object, strict: bool) -> Compiled:
            ask = StructuredOutput(json=schema, strict=strict)
            found.setdefault(ask.digest(), AskedPart(places.get(id(schema), "tools"), ask))
            return _ANY, ()

        response = self._response()
        self._made(note, _ANY)
        return [*found.values(), *([response] if response is not None else ())]

    def joined(self, compiled: Mapping[bytes, Compiled]) -> AnswerForm | None:
        """The form, from what `asks` named, by digest. None where any answer may be given."""
        part = self._response()
        response = compiled[part.ask.digest()] if part is not None else ("", ())
        made = self._made(
            lambda schema, strict: compiled[StructuredOutput(json=schema, strict=strict).digest()],
            response[0],
        )
        if made is None:
            if self.budget is None:
                return None
            made = self._unbound()
        source, regions, dropped = made
        grammar = Grammar(source, hashlib.sha256(source.encode()).digest())
        return AnswerForm(
            grammar, replace(regions, budget=self.budget), (*dropped, *response[1]), part is not None
        )

    def _made(
        self, compile_schema: Callable[[object, bool], Compiled], response: str
    ) -> tuple[str, AnswerRegions, Sequence[str]] | None:
        spec, markers = self.reading.regions.spec, self.reading.regions.markers
        tools = self.reading.tools
        if tools is None:
            if self.response is None:
                return None
            made = answer_grammar(spec, markers, response, thinking=self.thinking)
            return made.source, made.regions, ()
        functions = [ToolFunction(f.name, f.parameters, f.strict) for f in tools.callable]
        choice = ToolChoice(mode=tools.calls.value, parallel=tools.parallel)
        called = tool_grammar(
            spec,
            markers,
            functions,
            choice,
            thinking=self.thinking,
            compile_schema=compile_schema,
            response=response if self._response() is not None else "",
        )
        return None if called is None else (called.source, called.regions, called.dropped)

    def _response(self) -> AskedPart | None:
        """The format of the text, if there may be text. Where calls may stand in its place it does not begin like
        them."""
        response, tools = self.response, self.reading.tools
        if response is None or tools is None:
            return response
        if tools.calls is not Calls.AUTO:
            return None
        heads = self.reading.heads
        if not heads:
            raise RequestError(
                "tools",
                f"cannot be combined with {response.field}: this model's calls have no fixed beginning",
            )
        spelled = [head for head in heads if not self.reading.is_control(head)]
        if response.ask.kind in _JSON:
            apart = ["".join(head.split()) for head in spelled if head[0] in _JSON_BEGINS]
        else:  # a lexer of which nothing is known: not even the first characters are alike
            apart = [head[0] for head in spelled]
        return AskedPart(response.field, replace(response.ask, apart=tuple(dict.fromkeys(apart))))

    def _unbound(self) -> tuple[str, AnswerRegions, Sequence[str]]:
        """Any answer: only its thinking is followed."""
        regions = self.reading.regions
        made = answer_grammar(regions.spec, regions.markers, _ANY, thinking=self.thinking)
        return made.source, replace(made.regions, triggers=(NEVER,), opens_first=False), ()

    def _places(self) -> dict[int, str]:
        """The place in the request of each schema, which is the same object there: of all arguments of a function, and
        of one of them.
        """
        tools, found = self.reading.tools, {}
        if tools is not None:
            numbers = {tool["function"]["name"]: number for number, tool in enumerate(tools.rendered)}
            for index, function in enumerate(tools.callable):
                place = f"tools[{numbers.get(function.name, index)}].function.parameters"
                found[id(function.parameters)] = place
                for name, part in function.parameters.get("properties", {}).items():
                    found.setdefault(id(part), f"{place}.properties.{name}")
        return found
