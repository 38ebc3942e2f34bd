"""The grammar of an answer with tool calls and reasoning, from the spec that its reader uses."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from quire.records import dataclass
from quire.text.regions.markers import Markers
from quire.text.regions.spec import RegionSpec

# A JSON schema and whether it is strict -> a grammar of llguidance, and the keywords that were dropped.
CompileSchema = Callable[[object, bool], tuple[str, Sequence[str]]]


@dataclass(frozen=True, slots=True)
class ToolFunction:
    """A function that may be called. `parameters` is the JSON schema of its arguments; `strict` refuses a schema that
    cannot be enforced in every keyword.
    """

    name: str
    parameters: Mapping[str, Any] | bool | None = None
    strict: bool = False


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


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerRegions:
    """What the engine process follows token by token (`region_machine`).

    `thinking`: the answer starts inside the thinking region. `opener` and `closer` are that region's ids, -1 where the
    family has no such token; `closer_bytes` is then how the closer is spelled. `close` are the tokens that close the
    region when `budget` tokens of thinking are spent. `triggers`: the grammar begins behind one of these tokens, and
    again each time, or behind the first only if `once`; empty: at the start of the answer, after the thinking.
    """

    thinking: bool = False
    opener: int = -1
    closer: int = -1
    closer_bytes: bytes = b""
    close: tuple[int, ...] = ()
    budget: int | None = None
    triggers: tuple[int, ...] = ()
    once: bool = False


def tool_grammar(
    spec: RegionSpec,
    markers: Markers,
    tools: Sequence[ToolFunction],
    choice: ToolChoice,
    *,
    thinking: bool = False,
    compile_schema: CompileSchema | None = None,
) -> AnswerGrammar | None:
    """The grammar of an answer that may call `tools`; None where nothing is to be enforced (choice "none").

    `required` and `named` hold from the first token, after the thinking; `auto` from the opener of a call on.
    Raises RequestError for a tool that the model's format cannot enforce.
    """
    raise NotImplementedError


def answer_grammar(
    spec: RegionSpec, markers: Markers, source: str, *, thinking: bool = False
) -> AnswerGrammar:
    """The grammar of a response format, behind the thinking and inside the markers of the answer."""
    raise NotImplementedError
