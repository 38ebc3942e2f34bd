"""Answers in each format of calls, and what is in them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from quire.answers import AnswerPart
from quire.text.regions.families import CALLS, REASONING
from quire.text.regions.markers import CHANNEL_MARKERS, Markers, _texts
from quire.text.regions.reader import RegionReader
from quire.text.regions.spec import RegionSpec

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "string"}, "n": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}
EMPTY = {"type": "object", "properties": {}, "additionalProperties": False}
TOOLS: dict[str, dict[str, Any]] = {"f": SCHEMA, "g": EMPTY}
A = '{"a": "x\\n<b> é", "n": 3}'
# Not tokens in the vocabularies of the families that use them.
PLAIN = {"</parameter>", "</function>"}


class Case(NamedTuple):
    """An answer: its format, its text, and its parts as (kind, text) with the name of a call."""

    calls: str
    reasoning: str
    text: str
    parts: tuple[tuple[str, str], ...]

    @property
    def spec(self) -> RegionSpec:
        return spec_of(self.calls, self.reasoning)


def spec_of(calls: str, reasoning: str = "") -> RegionSpec:
    return RegionSpec(CALLS[calls], REASONING[reasoning] if reasoning else None)


def _two(
    text: str, calls: str, reasoning: str = "", thought: str = "", said: str = "", first: str = A
) -> Case:
    parts = [("reasoning", thought)] if thought else []
    parts += [("text", said)] if said else []
    return Case(
        calls,
        reasoning,
        text,
        (*parts, ("call", "f"), ("arguments", first), ("call", "g"), ("arguments", "{}")),
    )


def _object(name: str, arguments: str, key: str = "arguments") -> str:
    return f'{{"name": "{name}", "{key}": {arguments}}}'


_F, _G = _object("f", A), _object("g", "{}")
_TAG_A = '{"a": "x\\n<b> é", "n": 3}'
CASES = (
    _two(
        f"<think>\nhm\n</think>\n\nSee.\n<tool_call>\n{_F}\n</tool_call>\n<tool_call>\n{_G}\n</tool_call>",
        "hermes", "qwen3", "hm", "See.",
    ),
    _two(f"<tool_call>{_F}</tool_call>\n<tool_call>{_G}</tool_call>", "smollm3"),
    _two(
        "See.\n\n<tool_call>\n<function=f>\n<parameter=a>\nx\n<b> é\n</parameter>\n<parameter=n>\n3\n</parameter>\n"
        "</function>\n</tool_call>\n<tool_call>\n<function=g>\n</function>\n</tool_call>",
        "qwen3_coder", said="See.", first=_TAG_A,
    ),
    _two(
        "<think>hm</think>\n<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>x\n<b> é</arg_value>\n<arg_key>n</arg_key>\n"
        "<arg_value>3</arg_value>\n</tool_call>\n<tool_call>g\n</tool_call>",
        "glm45", "glm45", "hm", first=_TAG_A,
    ),
    _two(f"{_object('f', A, 'parameters')}; {_object('g', '{}', 'parameters')}", "llama3_json"),
    _two(f"<|python_tag|>{_object('f', A, 'parameters')}; {_object('g', '{}', 'parameters')}", "llama3_json"),
    _two('[f(a="x\\n<b> é", n=3), g()]', "pythonic"),
    _two("<|python_start|>[f(a='x\\n<b> é', n=3), g()]<|python_end|>", "llama4_pythonic"),
    _two('```tool_code\n[f(a="x\\n<b> é", n=3), g()]\n```', "gemma3"),
    _two(f"[TOOL_CALLS] [{_F}, {_G}]", "mistral_v3"),
    _two(f"[THINK]hm[/THINK][TOOL_CALLS]f[ARGS]{A}[TOOL_CALLS]g[ARGS]{{}}", "mistral_v11", "mistral", "hm"),
    _two(
        f"<think>hm</think>See.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{A}\n```"
        "<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>g\n```json\n{}\n```<｜tool▁call▁end｜>"
        "<｜tool▁calls▁end｜>",
        "deepseek_v3", "deepseek_v3", "hm", "See.",
    ),
    _two(
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{A}<｜tool▁call▁end｜><｜tool▁call▁begin｜>g<｜tool▁sep｜>"
        "{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "deepseek_v31", "deepseek_r1",
    ),
    _two(
        f"<think>hm<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{A}"
        "<|tool_call_end|><|tool_call_begin|>functions.g:1<|tool_call_argument_begin|>{}<|tool_call_end|>"
        "<|tool_calls_section_end|>",
        "kimi_k2", "kimi_k2", "hm",
    ),
    _two(
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary<|message|>See.<|end|>"
        f"<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{A}<|call|>"
        "<|start|>assistant to=functions.g<|channel|>commentary json<|message|>{}<|call|>",
        "openai", "openai_gptoss", "hm", "See.",
    ),
    _two(
        f"Here is my thought process:\nhm\nHere is my response:\n<|tool_call|>[{_F}, {_G}]", "granite", "granite", "hm"
    ),
    _two(f"functools[{_F}, {_G}]", "phi4_mini_json"),
    _two(f"<|tool_call|>[{_F}, {_G}]<|/tool_call|>", "phi4_mini"),
    _two(
        '<|START_THINKING|>hm<|END_THINKING|><|START_ACTION|>[\n'
        '    {"tool_call_id": "0", "tool_name": "f", "parameters": '
        f'{A}}},\n    {{"tool_call_id": "1", "tool_name": "g", "parameters": {{}}}}\n]<|END_ACTION|>',
        "command_r", "command_r", "hm",
    ),
)  # fmt: skip
IDS = [f"{case.calls}-{index}" for index, case in enumerate(CASES)]


def markers_of(spec: RegionSpec) -> Markers:
    """A vocabulary in which every marker of a spec is a token behind the 256 bytes."""
    import re

    shape = re.compile(r"<[^<>\s=]+>|\[[A-Z_/]+\]")
    found = sorted({text for written in _texts(spec) for text in shape.findall(written)} - PLAIN)
    ids = {text: 256 + place for place, text in enumerate(found)}
    reasoning = spec.reasoning
    spelled = ("", "") if reasoning is None else (reasoning.opener.strip(), reasoning.closer.rstrip())
    made = Markers(ids)
    return Markers(ids, *(tuple(tokens_of(made, text)) for text in spelled))


def tokens_of(markers: Markers, text: str) -> list[int]:
    """The tokens of a text: its bytes and markers."""
    tokens: list[int] = []
    for piece in markers.split(text):
        tokens += [piece] if isinstance(piece, int) else piece.encode()
    return tokens


def fold(parts: Iterable[AnswerPart]) -> list[tuple[str, str, int, str]]:
    """The parts of a whole answer."""
    out: list[tuple[str, str, int, str]] = []
    for part in parts:
        if out and part.kind != "call" and (out[-1][0], out[-1][2]) == (part.kind, part.call):
            out[-1] = (out[-1][0], out[-1][1] + part.text, out[-1][2], "")
        else:
            out.append((str(part.kind), part.text, part.call, part.call_id))
    return out


def read(
    spec: RegionSpec, pieces: Sequence[str | int], markers: Markers | None = None, **options: Any
) -> list[tuple[str, str, int, str]]:
    """The parts of an answer that arrives in pieces of text and markers."""
    reader = RegionReader(spec, markers, **{"tools": TOOLS, **options})
    parts: list[AnswerPart] = []
    for piece in pieces:
        parts += reader.push(-1, piece) if isinstance(piece, str) else reader.push(piece, "")
    return fold([*parts, *reader.finish()])


__all__ = [
    "CASES",
    "CHANNEL_MARKERS",
    "IDS",
    "TOOLS",
    "Case",
    "fold",
    "markers_of",
    "read",
    "spec_of",
    "tokens_of",
]
