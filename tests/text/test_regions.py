"""Reasoning and tool calls in answers: whatever the pieces, one and the same parts, and no text is lost."""

from __future__ import annotations

import json
import re
import sys
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.region_cases import CASES, IDS, TOOLS, Case, markers_of, read, spec_of
from quire.text.regions.families import CALLS, REASONING
from quire.text.regions.reader import RegionReader, call_id, read_whole
from quire.text.regions.scanners import JsonScanner
from quire.text.regions.spec import CallIds, ChannelCall, RegionSpec

SPACE = re.compile(r"\s")


def cut(text: str, places: list[int]) -> list[str]:
    """A text in pieces."""
    ends = sorted({place % (len(text) + 1) for place in places} | {0, len(text)})
    return [text[start:end] for start, end in pairwise(ends)]


def pieces_of(case: Case, text: str, places: list[int], with_markers: bool) -> tuple[list[str | int], object]:
    if not with_markers:
        return list(cut(text, places)), None
    markers = markers_of(case.spec)
    pieces: list[str | int] = []
    for piece in markers.split(text):
        pieces += [piece] if isinstance(piece, int) else cut(piece, places)
    return pieces, markers


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_what_is_in_an_answer(case):
    for with_markers in (False, True):
        if isinstance(case.spec.calls.call, ChannelCall) and not with_markers:
            continue
        for eager in (False, True):
            pieces, markers = pieces_of(case, case.text, [], with_markers)
            parts = read(case.spec, pieces, markers, eager=eager)
            assert tuple((kind, text) for kind, text, _, _ in parts) == case.parts
            assert [call for kind, _, call, _ in parts if kind == "call"] == [0, 1]


def test_every_family_has_a_case():
    assert {case.spec.calls.name for case in CASES} == {spec.name for spec in CALLS.values()}
    spelled = {(spec.opener, spec.closer) for spec in REASONING.values()}
    tested = {(case.spec.reasoning.opener, case.spec.reasoning.closer) for case in CASES if case.reasoning}
    assert tested == spelled


places = st.lists(st.integers(0, 2000), max_size=40)
damage = st.tuples(
    st.sampled_from(("cut", "drop", "twice", "put", "none")), st.integers(0, 2000), st.integers(0, 30)
)
PUT = (
    '"',
    "}",
    "{",
    "]",
    ",",
    "\n",
    " ",
    "<tool_call>",
    "</think>",
    "\\",
    "'",
    "<",
    "</parameter>",
    " " * 70,
    "x" * 300,
)


def damaged(text: str, how: tuple[str, int, int]) -> str:
    kind, place, size = how
    place %= len(text) + 1
    if kind == "cut":
        return text[:place]
    if kind == "drop":
        return text[:place] + text[place + size :]
    if kind == "twice":
        return text[: place + size] + text[place:]
    return text if kind == "none" else text[:place] + PUT[size % len(PUT)] + text[place:]


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(CASES), places, st.lists(damage, min_size=1, max_size=3), st.booleans(), st.booleans())
def test_pieces_change_nothing_and_nothing_is_lost(case, cuts, damages, with_markers, eager):
    text = case.text
    for how in damages:
        text = damaged(text, how)
    whole, markers = pieces_of(case, text, [], with_markers)
    pieces, _ = pieces_of(case, text, cuts, with_markers)
    single, _ = pieces_of(case, text, list(range(len(text))), with_markers)
    expected = read(case.spec, whole, markers, eager=eager, hide=False)
    assert read(case.spec, pieces, markers, eager=eager, hide=False) == expected
    assert read(case.spec, single, markers, eager=eager, hide=False) == expected
    if not any(kind == "call" for kind, *_ in expected) and not isinstance(case.spec.calls.call, ChannelCall):
        kept = SPACE.sub("", "".join(part[1] for part in expected))
        markers_out = [case.spec.reasoning.opener, case.spec.reasoning.closer] if case.spec.reasoning else []
        lost = SPACE.sub("", text)
        for marker in markers_out:
            lost, kept = (side.replace(SPACE.sub("", marker), "") for side in (lost, kept))
        assert kept == lost
    if not eager:  # a call is whole, or it is text
        for kind, arguments, *_ in expected:
            assert kind != "arguments" or isinstance(json.loads(arguments), dict)


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_an_answer_that_breaks_off_is_text_or_an_unfinished_call(case):
    whole = read(case.spec, *pieces_of(case, case.text, [], True))
    arguments = [text for kind, text, *_ in whole if kind == "arguments"]
    end = case.text.index("3") if "3" in case.text else len(case.text)  # inside the first call
    pieces, markers = pieces_of(case, case.text[:end], [], True)
    held = read(case.spec, pieces, markers)
    assert [kind for kind, *_ in held if kind == "call"] == []
    assert "x" in "".join(text for kind, text, *_ in held if kind == "text")
    eager = read(case.spec, pieces, markers, eager=True)
    started = "".join(text for kind, text, *_ in eager if kind == "arguments")
    assert started
    assert arguments[0].startswith(started)


def test_a_marker_is_a_token_and_not_its_spelling():
    case = CASES[0]
    markers = markers_of(case.spec)
    assert read(case.spec, [case.text.removeprefix("<think>")], markers)[0][0] == "text"
    assert {kind for kind, *_ in read(case.spec, [case.text], markers)} == {"text"}


def test_markers_are_found_where_their_text_is_hidden_and_where_it_is_shown():
    case = CASES[0]
    markers = markers_of(case.spec)
    spelled = {number: text for text, number in markers.ids.items()}
    for shown in (False, True):
        reader = RegionReader(case.spec, markers, tools=TOOLS)
        parts = []
        for piece in markers.split(case.text):
            if isinstance(piece, int):
                parts += reader.push(
                    piece,
                    "\ufffd" + spelled[piece] if shown and not parts else spelled[piece] if shown else "",
                )
            else:
                parts += reader.push(-1, piece)
        kinds = [part.kind for part in [*parts, *reader.finish()]]
        assert kinds.count("call") == 2
        assert kinds[0] == ("text" if shown else "reasoning")  # what was held before the token


def test_a_marker_that_means_nothing_is_hidden_or_shown():
    spec = spec_of("hermes")
    markers = markers_of(spec)
    pieces = ["a", markers.ids["</tool_call>"], "b"]
    assert read(spec, pieces, markers) == [("text", "ab", 0, "")]
    assert read(spec, pieces, markers, hide=False) == [("text", "a</tool_call>b", 0, "")]


def test_calls_stay_text_without_tools():
    text = CASES[1].text
    assert read(spec_of("smollm3"), [text], tools=None) == [("text", text, 0, "")]


def test_calls_inside_of_thinking_are_thinking():
    text = f"<think>\n{CASES[1].text}\n</think>\n\nDone."
    parts = read(spec_of("hermes", "qwen3"), [text])
    assert [(kind, text) for kind, text, *_ in parts] == [("reasoning", CASES[1].text), ("text", "Done.")]


def test_the_prompt_may_have_opened_the_thinking():
    spec = spec_of("hermes", "qwen3")
    assert spec.reasoning.opened_by("<|im_start|>assistant\n<think>\n")
    assert not spec.reasoning.opened_by("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    parts = read(spec, ["hm\n</think>\n\n  indented"], thinking=True)
    assert [(kind, text) for kind, text, *_ in parts] == [("reasoning", "hm"), ("text", "  indented")]
    assert read(spec, ["never closed"], thinking=True) == [("reasoning", "never closed", 0, "")]


def test_tokens_of_thinking_are_counted():
    case = CASES[0]
    markers = markers_of(case.spec)
    reader = RegionReader(case.spec, markers, tools=TOOLS)
    for token in [markers.ids["<think>"], *b"hm", markers.ids["</think>"], *b"\n\nyes"]:
        reader.push(token, chr(token) if token < 256 else "")
    assert reader.reasoning_tokens == 4


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('{"name": "f"}', "{}"),
        ('{"arguments": {"x": [1, {"y": null}]}, "name": "f"}', '{"x": [1, {"y": null}]}'),
        ('{"type": "function", "name": "f", "arguments": "{\\"a\\": 1}"}', '{"a": 1}'),
        ('{"name": "f", "arguments": null}', "{}"),
        ('{"name": "f", "arguments": {"a": "\\ud83d\\ude00"}, "more": [1]}', '{"a": "\\ud83d\\ude00"}'),
    ],
)
def test_objects_that_models_write(text, value):
    parts = read(spec_of("hermes"), [f"<tool_call>{text}</tool_call>"])
    assert [(kind, text) for kind, text, *_ in parts] == [("call", "f"), ("arguments", value)]


@pytest.mark.parametrize(
    "text", ['{"name": 3}', '{"name": "f", "arguments": [1]}', '{"arguments": {}}', "{}", "[]", "f()"]
)
def test_objects_that_are_no_calls_are_text(text):
    whole = f"<tool_call>{text}</tool_call> after"
    assert read(spec_of("hermes"), [whole]) == [("text", whole, 0, "")]


def test_ids():
    assert call_id(CallIds.GENERATED, "r", 0, "f") == call_id(CallIds.GENERATED, "r", 0, "g")
    assert call_id(CallIds.GENERATED, "r", 0, "f") != call_id(CallIds.GENERATED, "r", 1, "f")
    assert re.fullmatch("[0-9a-zA-Z]{9}", call_id(CallIds.NINE, "r", 0, "f"))
    assert call_id(CallIds.INDEXED, "r", 2, "f") == "functions.f:2"
    written = read(spec_of("mistral_v3"), ['[TOOL_CALLS][{"name": "f", "arguments": {}, "id": "abcdefghi"}]'])
    assert written[0][3] == "abcdefghi"
    kimi = "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:7<|tool_call_argument_begin|>{}<|tool_call_end|>"
    assert read(spec_of("kimi_k2"), [kimi])[0] == ("call", "f", 0, "functions.f:7")


def test_the_work_for_a_token_does_not_grow():
    """Calls of functions for each token, and the text that is kept, at the start and at the end of long answers."""
    spec = spec_of("hermes", "qwen3")
    markers = markers_of(spec)
    begin = '{"name": "f", "arguments": {"a": "'
    for opener, filler in (
        ([], "text "),
        ([markers.ids["<think>"]], "hm "),
        ([markers.ids["<tool_call>"], begin], "x"),
        ([], "<"),
        ([], "\n"),
    ):
        reader = RegionReader(spec, markers, tools=TOOLS, eager=True)
        for piece in opener:
            reader.push(piece, "") if isinstance(piece, int) else reader.push(-1, piece)
        for _ in range(100):  # white space is held at first
            reader.push(-1, filler)
        counts = [_calls(reader, filler) for _ in range(3)]
        for _ in range(3000):
            reader.push(-1, filler)
            assert len(reader._text) <= 64 + len(filler) + 16
        later = [_calls(reader, filler) for _ in range(3)]
        assert max(later) <= max(counts)


def _calls(reader: RegionReader, text: str) -> int:
    count = 0

    def trace(_frame, event, _argument):
        nonlocal count
        count += event == "call"

    sys.setprofile(trace)
    try:
        reader.push(-1, text)
    finally:
        sys.setprofile(None)
    return count


texts = st.text('aé😀"\\/\n\x7f\u2028', max_size=8)  # drawing from all of Unicode takes a second to prepare
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=12,
)


@settings(max_examples=50, deadline=None)
@given(values, st.integers(0, 200), st.sampled_from('x,]}"{ 1e.-\\\n'), st.booleans(), places)
def test_the_scanner_agrees_with_the_json_module(value, place, char, change, cuts):
    text = json.dumps([value], ensure_ascii=False)
    if change:
        place %= len(text)
        text = text[:place] + char + text[place + 1 :]
    try:
        json.loads(text, parse_constant=lambda name: 1 / 0)
        valid = True
    except (ValueError, ZeroDivisionError):
        valid = False
    scanner = JsonScanner()
    taken = 0
    for piece in cut(text, cuts):
        end = scanner.feed(piece)
        taken += end
        if end < len(piece):
            break
    assert (scanner.done and not text[taken:].strip()) == valid


def test_deep_nesting_is_no_call():
    text = '<tool_call>{"name": "f", "arguments": {"a": ' + "[" * 100_000 + "</tool_call>"
    assert read(spec_of("hermes"), [text]) == [("text", text, 0, "")]
    text = "[f(a=" + "(" * 100_000 + ")"
    assert read(spec_of("pythonic"), [text]) == [("text", text, 0, "")]


def test_a_large_answer_in_one_piece():
    calls = (
        f"<tool_call>\n<function=f>\n<parameter=a>\n{'x' * 50}\n</parameter>\n</function>\n</tool_call>\n"
        * 2000
    )
    parts = read_whole(spec_of("qwen3_coder"), calls, TOOLS)
    assert [part.kind for part in parts] == ["call", "arguments"] * 2000


def test_no_spec_reads_nothing():
    assert read(RegionSpec(), ["<think>a</think>"]) == [("text", "<think>a</think>", 0, "")]
