"""Grammars of tool calls: they accept what templates write, refuse what is no call, and agree with the reader."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from helpers.grammars import tiny_tokenizer
from helpers.region_cases import CASES, IDS, TOOLS, Case, markers_of, read, spec_of, tokens_of
from quire import StructuredOutput
from quire.structured.answer_form import AnswerPlan, AskedPart
from quire.structured.ask import GrammarError
from quire.structured.compile import compile_grammar
from quire.structured.json_schema import compile_json_schema
from quire.structured.tool_grammar import ToolChoice, ToolFunction, answer_grammar, tool_grammar
from quire.text.reading import Reading
from quire.text.regions.calls import call_heads
from quire.text.regions.detect import FoundRegions, ModelRegions
from quire.text.regions.markers import Markers
from quire.text.regions.spec import CallSpec, ChannelCall, HeadedCall, Hole, ObjectCall, RegionSpec
from quire.text.tools import read_tools
from quire.types import RequestError

FUNCTIONS = [ToolFunction(name, schema) for name, schema in TOOLS.items()]


class _Bytes:
    """The vocabulary of the cases: 256 bytes, and markers without any."""

    is_tokenizer_wrapper = True
    eos_token_id = bos_token_id = None
    special_token_ids = ()
    tokens = [bytes([byte]) for byte in range(256)] + [b""] * 40

    def __call__(self, text: str) -> list[int]:
        return list(text.encode())


@pytest.fixture(scope="module")
def vocabulary() -> LLTokenizer:
    return LLTokenizer(_Bytes())


def accepted(vocabulary: LLTokenizer, source: str, tokens: list[int]) -> tuple[bool, int]:
    """Whether a grammar accepts tokens as a whole, and how many it takes."""
    matcher = LLMatcher(vocabulary, source, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    taken = matcher.try_consume_tokens(tokens)
    return taken == len(tokens) and matcher.is_accepting(), taken


def canonical(case: Case) -> str:
    """The calls of a case as its template writes them."""
    text = case.text
    for start in ("<think>", "Here is my thought", "[THINK]", "<|START_THINKING|>", "See."):
        if text.startswith(start):
            opener = case.spec.calls.opener.strip() or "{"
            text = text[text.index(opener) :]
    return text


WRITTEN = [
    case
    for case in CASES
    if not case.text.startswith(("<|python", "```")) and not isinstance(case.spec.calls.call, ChannelCall)
]


@pytest.mark.parametrize("case", WRITTEN, ids=[IDS[CASES.index(case)] for case in WRITTEN])
def test_calls_that_must_come(vocabulary, case):
    for markers in (markers_of(case.spec), Markers()):
        spec = RegionSpec(case.spec.calls)
        text = canonical(case)
        made = tool_grammar(spec, markers, FUNCTIONS, ToolChoice(mode="required"))
        tokens = tokens_of(markers, text)
        assert accepted(vocabulary, made.source, tokens) == (True, len(tokens))
        assert not made.dropped
        for wrong in ("Sure! " + text, text.replace("f", "h"), text.replace("3", "true"), text.replace('"a"', '"b"')
                      .replace("a=", "b=").replace(">a<", ">b<")):  # fmt: skip
            assert wrong == text or not accepted(vocabulary, made.source, tokens_of(markers, wrong))[0]
        named = tool_grammar(spec, markers, FUNCTIONS, ToolChoice(mode="named", name="g"))
        assert not accepted(vocabulary, named.source, tokens)[0]
        single = tool_grammar(spec, markers, FUNCTIONS, ToolChoice(mode="required", parallel=False))
        assert not accepted(vocabulary, single.source, tokens)[0]


def test_calls_of_channels(vocabulary):
    spec = spec_of("openai", "openai_gptoss")
    markers = markers_of(spec)
    made = tool_grammar(spec, markers, FUNCTIONS, ToolChoice(mode="required"))
    call = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": "x"}<|call|>'
    thought = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"
    for text, fits in (
        (call, True),
        (thought + call, True),
        (thought, False),
        (call.replace("f ", "h "), False),
    ):
        assert accepted(vocabulary, made.source, tokens_of(markers, text))[0] is fits
    auto = tool_grammar(spec, markers, FUNCTIONS, ToolChoice())
    assert auto.regions.triggers == (markers.ids["<|channel|>"], markers.ids["<|start|>"])
    behind = [
        (call.removeprefix("<|channel|>"), True),
        ("final<|message|>", True),
        ("analysis<|message|>", True),
        ("assistant<|channel|>commentary<|message|>", True),
        ("commentary to=functions.h <|constrain|>", False),
    ]
    for text, fits in behind:
        assert accepted(vocabulary, auto.source, tokens_of(markers, text))[0] is fits


@pytest.mark.parametrize("case", WRITTEN, ids=[IDS[CASES.index(case)] for case in WRITTEN])
def test_calls_that_may_come(vocabulary, case):
    spec, text = RegionSpec(case.spec.calls), canonical(case)
    for markers in (markers_of(case.spec), Markers()):
        made = tool_grammar(spec, markers, FUNCTIONS, ToolChoice())
        tokens = tokens_of(markers, text)
        if made.regions.triggers:
            assert tokens[0] in made.regions.triggers
            matcher = LLMatcher(vocabulary, made.source, log_level=0)
            taken = matcher.try_consume_tokens(tokens[1:])
            assert matcher.is_stopped()  # behind the first region
            again = tokens[1 + taken :]
            assert not again or made.regions.triggers[0] in again
            continue
        assert accepted(vocabulary, made.source, tokens)[0]
        assert accepted(vocabulary, made.source, tokens_of(markers, "Hello, [world] {}!"))[0]
        wrong = (
            text.replace('"f"', '"h"')
            .replace("f(", "h(")
            .replace("f[", "h[")
            .replace("=f>", "=h>")
            .replace("l>f", "l>h")
        )
        if wrong != text:
            assert not accepted(vocabulary, made.source, tokens_of(markers, wrong))[0]
        if case.spec.calls.opener:
            assert accepted(vocabulary, made.source, tokens_of(markers, "See.\n" + text))[0]


def test_none_enforces_nothing_and_unknown_names_are_refused():
    spec, markers = spec_of("hermes"), Markers()
    assert tool_grammar(spec, markers, FUNCTIONS, ToolChoice(mode="none")) is None
    assert tool_grammar(spec, markers, [], ToolChoice()) is None
    with pytest.raises(RequestError, match="tool_choice: 'h' is not the name of a tool"):
        tool_grammar(spec, markers, FUNCTIONS, ToolChoice(mode="named", name="h"))


@pytest.mark.parametrize("reasoning", ["qwen3", "granite"])
@pytest.mark.parametrize("with_markers", [True, False])
def test_thinking_comes_before_what_must_come(vocabulary, reasoning, with_markers):
    spec = spec_of("hermes", reasoning)
    markers = markers_of(spec) if with_markers else Markers()
    call = '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>'
    opener, closer = spec.reasoning.opener, spec.reasoning.closer
    made = tool_grammar(spec, markers, FUNCTIONS, ToolChoice(mode="required"))
    for text, fits in (
        (call, True),
        (f"{opener}so {{ it {closer}{call}", True),
        (f"{opener}so it{closer}No.", False),
        (f"No. {call}", False),
    ):
        assert accepted(vocabulary, made.source, tokens_of(markers, text))[0] is fits, text
    opened = tool_grammar(spec, markers, FUNCTIONS, ToolChoice(mode="required"), thinking=True)
    assert opened.regions.thinking
    rest = f"so{closer}{call}"
    if opened.regions.closer >= 0:  # the engine begins the grammar behind it
        rest = rest[rest.index("</think>") + len("</think>") :]
    assert accepted(vocabulary, opened.source, tokens_of(markers, rest))[0]
    assert not accepted(vocabulary, opened.source, tokens_of(markers, rest.replace('"g"', '"h"')))[0]


def test_a_response_format_holds_behind_the_thinking(vocabulary):
    spec = spec_of("hermes", "qwen3")
    markers = markers_of(spec)
    made = answer_grammar(spec, markers, 'start: "yes" | "no"')
    assert accepted(vocabulary, made.source, tokens_of(markers, "<think>\nhm\n</think>\n\nyes"))[0]
    assert accepted(vocabulary, made.source, tokens_of(markers, "no"))[0]
    assert not accepted(vocabulary, made.source, tokens_of(markers, "<think>\nhm\n</think>\n\nmaybe"))[0]
    source = json.dumps(
        {"grammars": [{"lark_grammar": "start: @x"}, {"name": "x", "json_schema": {"type": "null"}}]}
    )
    channels = spec_of("openai", "openai_gptoss")
    made = answer_grammar(channels, markers_of(channels), source)
    text = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>null"
    assert accepted(vocabulary, made.source, tokens_of(markers_of(channels), text))[0]
    assert not accepted(
        vocabulary, made.source, tokens_of(markers_of(channels), text.replace("null", "none"))
    )[0]


def grown(vocabulary: LLTokenizer, source: str, seed: int) -> list[int]:
    """Tokens that a grammar allows, at random, towards an end."""
    matcher = LLMatcher(vocabulary, source, log_level=0)
    draw = random.Random(seed)
    tokens: list[int] = []
    text = {*b' \n"}],>)abAB\\u00e9\xc3\xa9<'}
    while not matcher.is_stopped() and len(tokens) < 1500:
        if len(tokens) > 60 and draw.random() < 0.1:  # what chance would hardly spell
            tag = [*b"\n</parameter>\n"]
            tokens += tag[: matcher.try_consume_tokens(tag)]
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        allowed = [token for token in range(296) if mask >> token & 1]
        if not allowed:
            break
        liked = [token for token in allowed if token in text or token >= 256]
        token = draw.choice(liked if liked and draw.random() < 0.95 else allowed)
        if matcher.is_accepting() and draw.random() < 0.2:
            break
        if len(tokens) > 200:
            closing = [t for t in allowed if t in {*b'"}])>\n/'} or t >= 256]
            token = draw.choice(closing) if closing and draw.random() < 0.9 else token
        assert matcher.consume_token(token)
        tokens.append(token)
    return tokens if matcher.is_accepting() or matcher.is_stopped() else []


@pytest.mark.parametrize("case", WRITTEN, ids=[IDS[CASES.index(case)] for case in WRITTEN])
def test_what_a_grammar_allows_is_read_as_calls_that_fit(vocabulary, case):
    """Random text under the grammar: every call parses, has a name of the tools, and arguments of its schema."""
    spec, markers = RegionSpec(case.spec.calls), markers_of(case.spec)
    made = tool_grammar(spec, markers, FUNCTIONS, ToolChoice(mode="required"))
    ended = 0
    for seed in range(9):
        tokens = grown(vocabulary, made.source, seed)
        if not tokens:
            continue
        ended += 1
        parts = read(spec, _pieces(tokens), markers)
        assert {kind for kind, *_ in parts} == {"call", "arguments"}, parts
        names = [text for kind, text, *_ in parts if kind == "call"]
        for name, arguments in zip(
            names, (text for kind, text, *_ in parts if kind == "arguments"), strict=True
        ):
            value = json.loads(arguments)
            assert name in TOOLS
            assert set(value) <= set(TOOLS[name]["properties"])
            assert name == "g" or isinstance(value["a"], str)
            assert isinstance(value.get("n", 0), int)
        if ended == 1:
            break
    assert ended


TYPED = {
    "type": "object",
    "properties": {
        "s": {"type": "string", "enum": ["one", "two"]},
        "t": {"type": "string", "minLength": 2, "maxLength": 3},
        "b": {"type": "boolean"},
        "o": {"$ref": "#/$defs/point"},
        "u": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
    },
    "required": ["s", "o"],
    "$defs": {
        "point": {
            "type": "object",
            "properties": {"x": {"type": "integer"}},
            "required": ["x"],
            "additionalProperties": False,
        }
    },
}  # fmt: skip


def _tags(**values: str) -> str:
    inner = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function=f>\n{inner}</function>\n</tool_call>"


def test_arguments_in_tags_have_types(vocabulary):
    spec = spec_of("qwen3_coder")
    made = tool_grammar(spec, Markers(), [ToolFunction("f", TYPED, strict=True)], ToolChoice(mode="required"))
    good = _tags(s="one", t="ab\n", b="true", o='{"x": 1}', u="null")
    assert accepted(vocabulary, made.source, tokens_of(Markers(), good))[0]
    assert accepted(vocabulary, made.source, tokens_of(Markers(), _tags(s="two", o='{"x": 1}')))[0]
    for bad in (
        _tags(s="three", o='{"x": 1}'),
        _tags(s="one"),
        _tags(s="one", t="a", o='{"x": 1}'),
        _tags(s="one", t="abcd", o='{"x": 1}'),
        _tags(s="one", o='{"x": 1.5}'),
        _tags(s="one", b="True", o='{"x": 1}'),
        _tags(s="one", o='{"x": 1}', u="x"),
        _tags(o='{"x": 1}', s="one"),
    ):
        assert not accepted(vocabulary, made.source, tokens_of(Markers(), bad))[0], bad
    parts = read(spec, [good], tools={"f": TYPED})
    assert json.loads(parts[1][1]) == {"s": "one", "t": "ab\n", "b": True, "o": {"x": 1}, "u": None}


def test_arguments_of_python_have_types(vocabulary):
    spec = spec_of("pythonic")
    made = tool_grammar(spec, Markers(), [ToolFunction("f", TYPED)], ToolChoice(mode="required"))
    for text, fits in (
        ('[f(s="one", t="ab", b=True, o={"x": 1}, u=null)]', True),
        ('[f(s="one", o={"x": 1})]', True),
        ('[f(s="one", o={"x": 1}, u=3)]', True),
        ('[f(o={"x": 1})]', False),
        ('[f(s="one", b=1, o={"x": 1})]', False),
        ('[f(s="one" o={"x": 1})]', False),
    ):
        assert accepted(vocabulary, made.source, tokens_of(Markers(), text))[0] is fits, text


def test_what_tags_cannot_enforce_is_refused_or_dropped():
    spec = spec_of("qwen3_coder")
    schema = {"type": "object", "properties": {"s": {"type": "string", "format": "date"}}, "minProperties": 1}
    with pytest.raises(RequestError, match=r"f: strict .* cannot enforce minProperties"):
        tool_grammar(spec, Markers(), [ToolFunction("f", schema, strict=True)], ToolChoice())
    made = tool_grammar(spec, Markers(), [ToolFunction("f", schema)], ToolChoice())
    assert made.dropped == ("f: minProperties of the arguments", "f: format of the argument 's'")


@pytest.mark.parametrize("calls", ["hermes", "qwen3_coder", "pythonic", "kimi_k2"])
@pytest.mark.parametrize("name", ["", "a b", "f>", "x" * 300, "<tool_call>"])
def test_names_that_no_reader_takes_are_refused(calls, name):
    with pytest.raises(RequestError, match="cannot be written in this model's calls"):
        tool_grammar(spec_of(calls), Markers(), [ToolFunction(name)], ToolChoice())
    schema = {"type": "object", "properties": {name: {"type": "string"}}}
    if calls in ("qwen3_coder", "pythonic"):
        with pytest.raises(
            RequestError, match=r"argument name .* (cannot be written|is not a Python identifier)"
        ):
            tool_grammar(spec_of(calls), Markers(), [ToolFunction("f", schema)], ToolChoice())


def test_functions_whose_names_begin_alike(vocabulary):
    schema = {
        "type": "object",
        "properties": {"a": {"type": "boolean"}, "ab": {"type": "boolean"}},
        "required": ["ab"],
    }
    tools = [ToolFunction("f" * size, schema) for size in (1, 2, 3)]
    for calls in ("hermes", "qwen3_coder", "pythonic", "mistral_v11"):
        spec = spec_of(calls)
        markers = markers_of(spec)
        made = tool_grammar(spec, markers, tools, ToolChoice(mode="required"))
        for tool in tools:
            named = tool_grammar(spec, markers, tools, ToolChoice(mode="named", name=tool.name))
            tokens = next(filter(None, (grown(vocabulary, named.source, seed) for seed in range(9))))
            assert accepted(vocabulary, made.source, tokens)[0], (calls, tool.name)


def test_schemas_are_compiled_by_the_one_that_is_given():
    asked: list[object] = []

    def compile_schema(schema: object, strict: bool) -> tuple[str, list[str]]:
        asked.append((schema, strict))
        return 'start: "{}"', ["format"]

    made = tool_grammar(
        spec_of("hermes"),
        Markers(),
        [ToolFunction("f", strict=True)],
        ToolChoice(),
        compile_schema=compile_schema,
    )
    assert asked == [({"type": "object", "properties": {}, "additionalProperties": False}, True)]
    assert made.dropped == ("f: format",)


def test_names_of_grammars_beside_do_not_meet(vocabulary):
    """Two compiled schemas that call their inner grammars alike."""

    def compile_schema(schema: Any, _strict: bool) -> tuple[str, list[str]]:
        inner = {"name": "x", "lark_grammar": f'start: "{{{schema["title"]}}}"'}
        return json.dumps({"grammars": [{"lark_grammar": "start: @x"}, inner]}), []

    tools = [ToolFunction(name, {"type": "object", "title": name}) for name in "fg"]
    made = tool_grammar(
        spec_of("hermes"), Markers(), tools, ToolChoice(mode="required"), compile_schema=compile_schema
    )
    for name, arguments, fits in (("f", "{f}", True), ("g", "{g}", True), ("f", "{g}", False)):
        text = f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'
        assert accepted(vocabulary, made.source, tokens_of(Markers(), text))[0] is fits


# A call could begin like each of these: with a brace, a bracket, or with the name of a function.
FORMATS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "object": (
        {"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}}, "required": ["name"],
         "additionalProperties": False},
        ['{"name": "f"}', '{"name":"fg", "age": 3}', '{\n  "name": "<tool_call>"\n}', '{ "name": "[TOOL_CALLS] ["}'],
    ),
    "array": ({"type": "array"}, ["[]", "[false, 1]", '[ "f(", {"name": "f"}]', "[[null]]"]),
    "text": ({"type": ["string", "boolean"]}, ['"functools["', "false", '"[f("']),
}  # fmt: skip
BESIDE = [*WRITTEN, next(case for case in CASES if isinstance(case.spec.calls.call, ChannelCall))]


def _compiled(schema: object, _strict: bool) -> tuple[str, tuple[str, ...]]:
    return compile_json_schema(schema).source, ()


def _beside(spec: RegionSpec, markers: Markers, choice: ToolChoice, schema: object) -> str:
    """The grammar of an answer that is calls or JSON of a schema."""
    response = compile_json_schema(schema).source
    made = tool_grammar(spec, markers, FUNCTIONS, choice, compile_schema=_compiled, response=response)
    assert not made.regions.triggers
    return made.source


def _pieces(tokens: list[int]) -> list[Any]:
    """Text and markers."""
    pieces: list[Any] = []
    held = bytearray()
    for token in tokens:
        if token < 256:
            held.append(token)
        else:
            pieces += [held.decode(errors="replace"), token]
            held.clear()
    return [*pieces, held.decode(errors="replace")]


def _said(spec: RegionSpec, markers: Markers, tokens: list[int]) -> list[tuple[str, str, int, str]]:
    """The parts of an answer that is calls or has a format."""
    heads = call_heads(spec.calls, TOOLS, markers)
    return read(spec, _pieces(tokens), markers, eager=True, heads=heads)


@pytest.mark.parametrize(
    ("case", "form"),
    [
        (case, form)
        for case in BESIDE
        for form in FORMATS
        if form == "object" or not case.spec.calls.opener.startswith("<")
    ],
    ids=lambda value: value if isinstance(value, str) else IDS[CASES.index(value)],
)
def test_an_answer_is_calls_or_has_a_format(vocabulary, case, form):
    schema, texts = FORMATS[form]
    channels = isinstance(case.spec.calls.call, ChannelCall)
    call = case.text[case.text.index("<|channel|>commentary to") :] if channels else canonical(case)
    final = "<|channel|>final<|message|>" if channels else ""
    for markers in (markers_of(case.spec), Markers()):
        spec = case.spec if channels else RegionSpec(case.spec.calls)
        start = LLMatcher(vocabulary, _beside(spec, markers, ToolChoice(), schema), log_level=0)

        def fits(tokens: list[int], start: LLMatcher = start) -> bool:
            matcher = start.deep_copy()
            return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()

        if not channels:  # whose second call is written otherwise
            tokens = tokens_of(markers, call)
            assert fits(tokens)
            assert [kind for kind, *_ in _said(spec, markers, tokens)] == ["call", "arguments"] * 2
        for text in texts:
            tokens = tokens_of(markers, final + text) if channels else [*text.encode()]
            assert fits(tokens), text
            if not channels:
                assert _said(spec, markers, tokens) == [("text", text, 0, "")]
        for wrong in ("Hello", texts[0] + call, "See.\n" + call, call.replace("f", "h"), final + "{"):
            assert not fits(tokens_of(markers, wrong)), wrong
        if form == "object":
            required = _beside(spec, markers, ToolChoice(mode="required"), schema)
            assert not accepted(vocabulary, required, tokens_of(markers, final + texts[0]))[0]


@pytest.mark.parametrize("calls", ["hermes", "llama3_json", "pythonic"])
def test_random_answers_are_calls_that_fit_or_have_the_format(vocabulary, calls):
    spec, kinds = spec_of(calls), set()
    markers = markers_of(spec)
    source = _beside(spec, markers, ToolChoice(parallel=False), FORMATS["object"][0])
    for seed in range(5):
        tokens = grown(vocabulary, source, seed)
        parts = _said(spec, markers, tokens) if tokens else []
        for kind, text, *_ in parts:
            kinds.add(kind)
            assert kind != "call" or text in TOOLS
            assert kind != "arguments" or set(json.loads(text)) <= {"a", "n"}
            assert kind != "text" or {"name"} <= set(json.loads(text)) <= {"name", "age"}
        assert len(parts) in {0, 1, 2}
    assert kinds == {"text", "call", "arguments"}


CLOSED = FORMATS["object"][0]
BEGINNINGS: list[tuple[str, dict[str, Any], str]] = [
    ("llama3_json", {"json": CLOSED}, ""),
    (
        "llama3_json",
        {"json": {"properties": {"name": True, "parameters": True}}},
        '{"name":"f","parameters":',
    ),
    ("llama3_json", {"json_object": True}, '{"name":"f","parameters":'),
    ("llama3_json", {"regex": "[a-z]+"}, ""),
    ("llama3_json", {"regex": "[{].*"}, "{"),
    ("pythonic", {"json": {"type": "array"}}, ""),
    ("pythonic", {"choice": ["[f(x)]"]}, "["),
    ("hermes", {"json_object": True}, ""),
    ("hermes", {"regex": "<.*>"}, "<"),
    ("phi4_mini_json", {"choice": ["false", "true"]}, "f"),
    ("phi4_mini_json", {"json": {"type": "boolean"}}, ""),
]


@pytest.mark.parametrize(("calls", "ask", "begins"), BEGINNINGS)
def test_formats_that_may_begin_like_a_call_are_refused(calls, ask, begins):
    tools = read_tools([{"type": "function", "function": {"name": "f"}}])
    reading = Reading(ModelRegions(FoundRegions(spec_of(calls)), Markers()), tiny_tokenizer(), tools)
    plan = AnswerPlan(reading=reading, response=AskedPart("response_format", StructuredOutput(**ask)))
    form = plan.asks()[-1]
    assert form.field == "response_format"
    if not begins:
        assert compile_grammar(form.ask).grammar
        return
    with pytest.raises(GrammarError, match=re.escape(f"may begin with {begins!r}, as a call of tools does")):
        compile_grammar(form.ask)


def test_calls_without_a_beginning_cannot_be_told_from_a_format():
    call = CallSpec(name="bare", call=HeadedCall((Hole.NAME, ":")), opener="", closer="")
    tools = read_tools([{"type": "function", "function": {"name": "f"}}])
    reading = Reading(ModelRegions(FoundRegions(RegionSpec(call)), Markers()), tiny_tokenizer(), tools)
    plan = AnswerPlan(reading=reading, response=AskedPart("format", StructuredOutput(json_object=True)))
    with pytest.raises(RequestError, match="tools: cannot be combined with format"):
        plan.asks()


def test_every_object_call_is_covered():
    assert any(
        isinstance(case.spec.calls.call, ObjectCall) and case.spec.calls.call.array for case in WRITTEN
    )
