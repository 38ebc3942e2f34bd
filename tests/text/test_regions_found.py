"""Which regions a model has: by name, by its response_template, by its family, by an analysis of its template."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path

import pytest

import quire
from helpers.byte_tokenizer import byte_tokenizer
from helpers.region_cases import SCHEMA, fold
from helpers.region_templates import FAMILIES, ODD, UNKNOWN, template
from quire.text.chat_renderer import ChatAsk, ChatRenderer
from quire.text.outline import folder_outline
from quire.text.reading import AnswerFormat
from quire.text.regions.detect import facts_text, found_regions, model_regions
from quire.text.regions.families import CALLS, REASONING, VARIANTS
from quire.text.regions.reader import RegionReader
from quire.text.regions.response_template import spec_of_response_template
from quire.text.regions.spec import ArgumentForm, HeadedCall, Hole, ObjectCall, Tags
from quire.text.sandbox import ChatSandbox
from quire.text.tokenizer import Tokenizer

TOOLS = [
    {"type": "function", "function": {"name": name, "description": "d", "parameters": SCHEMA}}
    for name in "fg"
]
PARAMETERS = dict.fromkeys("fg", SCHEMA)
MINI = Path(quire.__file__).parent / "models" / "quire-mini"


def tokenizer(template: str, *tokens: str, **options: object) -> Tokenizer:
    """A vocabulary of bytes, with tokens."""
    return Tokenizer(
        byte_tokenizer(*tokens, control=()),
        chat_templates={"default": template} if template else {},
        **options,
    )


MARKERS = (
    "<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "[TOOL_CALLS]", "[ARGS]",
    "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>",
    "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_end|>",
    "<|tool_call_argument_begin|>", "<|START_ACTION|>", "<|END_ACTION|>", "<|tool_call|>", "<|/tool_call|>",
    "<|channel|>", "<|constrain|>", "<|message|>", "<|call|>", "<|start|>", "<|end|>", "<|return|>",
    "<think>", "</think>", "<|im_start|>", "<|im_end|>",
)  # fmt: skip


def call(name: str, call_id: str, **arguments: object) -> dict[str, object]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def turns(first: str, second: str) -> tuple[dict[str, object], ...]:
    """An assistant's turns with calls of functions of these names, and without."""
    one = call(first, "call00001", a="x")
    return (
        {"role": "assistant", "content": "", "tool_calls": [call(first, "call00001", a='x\n"<b>" é', n=3)]},
        {"role": "assistant", "content": "", "tool_calls": [one, call(second, "call00002", a="y")]},
        {"role": "assistant", "content": "See.", "tool_calls": [one]},
        {"role": "assistant", "content": "Plain\n\ntext."},
    )


TURNS = turns("f", "g")


def read_turn(found, model: Tokenizer, text: str, tools=PARAMETERS) -> dict[str, object]:
    """An assistant's turn as a message, read token by token from its text."""
    detokenizer = model.detokenizer(skip_special_tokens=True)
    reader = RegionReader(found.spec, found.markers, tools=tools)
    parts = []
    for token in model.encode(text, add_special_tokens=False):
        parts += reader.push(token, detokenizer.push([token]))
    parts += reader.finish(detokenizer.finish())
    message: dict[str, object] = {
        "role": "assistant",
        "content": "".join(p.text for p in parts if p.kind == "text"),
    }
    if reasoning := "".join(p.text for p in parts if p.kind == "reasoning"):
        message["reasoning_content"] = reasoning
    calls = [(text, call_id) for kind, text, _, call_id in fold(parts) if kind == "call"]
    arguments = [json.loads(text) for kind, text, *_ in fold(parts) if kind == "arguments"]
    if calls:
        message["tool_calls"] = [
            call(name, call_id, **value) for (name, call_id), value in zip(calls, arguments, strict=True)
        ]
    return message


def check_round_trip(found, model: Tokenizer, turn: dict[str, object]) -> None:
    """Render, read, render: one and the same text."""
    renderer = ChatRenderer(model)
    user = {"role": "user", "content": "hi"}
    prompt = renderer.render(ChatAsk(messages=[user], tools=TOOLS)).text
    text = renderer.render(ChatAsk(messages=[user, turn], tools=TOOLS, add_generation_prompt=False)).text
    assert text.startswith(prompt)
    answer = text[len(prompt) :].removesuffix("<|im_end|>\n")
    message = read_turn(found, model, answer)
    assert message["content"] == turn["content"]
    again = renderer.render(ChatAsk(messages=[user, message], tools=TOOLS, add_generation_prompt=False)).text
    assert again == text


@pytest.mark.parametrize("name", sorted(FAMILIES))
@pytest.mark.parametrize("with_markers", [True, False])
def test_families_are_recognised_and_render_what_is_read(name, with_markers):
    model = tokenizer(template(FAMILIES[name]), *(MARKERS if with_markers else ()))
    if name == "openai" and not with_markers:
        return
    found = model_regions(model)
    assert (found.found.calls, found.spec.calls) == ("table", CALLS[name])
    assert bool(found.markers.ids) == with_markers
    for turn in TURNS:
        check_round_trip(found, model, turn)


def test_quire_mini():
    model = Tokenizer.from_dir(MINI)
    found = model_regions(model)
    assert facts_text(found.found.facts()) == "tool calls hermes (table), no reasoning"
    assert found_regions(folder_outline(MINI)) == found.found
    for turn in TURNS:
        check_round_trip(found, model, turn)


def test_names_of_vllm():
    model = tokenizer("", "[ARGS]", "[TOOL_CALLS]")
    assert model_regions(model).found.facts()["tool_calls"] == {"format": None, "found": "none"}
    found = model_regions(model, tool_call_parser="mistral", reasoning_parser="deepseek_r1")
    assert facts_text(found.found.facts()) == "tool calls mistral_v11 (named), reasoning deepseek_r1 (named)"
    assert set(found.markers.ids) == {"[ARGS]", "[TOOL_CALLS]"}
    assert model_regions(tokenizer(""), tool_call_parser="mistral").spec.calls.name == "mistral_v3"
    for name in ("hermes", "llama3_json", "pythonic", "deepseek_v3", "qwen3_coder", "openai", "glm45", "granite",
                 "phi4_mini_json", "kimi_k2"):  # fmt: skip
        assert name in {*CALLS, *VARIANTS}
    for name in ("qwen3", "deepseek_r1", "glm45", "granite", "mistral", "openai_gptoss", "kimi_k2"):
        assert name in REASONING
    with pytest.raises(ValueError, match=r"tool_call_parser: 'nope' is not one of .*hermes"):
        model_regions(model, tool_call_parser="nope")


def test_thinking_of_a_template():
    model = tokenizer(
        template(FAMILIES["hermes"], "<think>\n{{ m.reasoning_content }}\n</think>\n\n"), *MARKERS
    )
    found = model_regions(model)
    assert (found.spec.reasoning.name, found.spec.reasoning.in_content) == ("qwen3", False)
    assert found.markers.opens_thinking == (found.markers.ids["<think>"],)
    check_round_trip(found, model, {**TURNS[2], "reasoning_content": "so\n\nso"})
    ignoring = tokenizer("{{ messages[0].content.split('</think>')[-1] }}")
    assert model_regions(ignoring).spec.reasoning.name == "qwen3"


@pytest.mark.parametrize("name", sorted(UNKNOWN))
def test_unknown_templates_are_analysed_with_a_warning(name, caplog):
    written, expected = UNKNOWN[name]
    model = tokenizer(template(written, "<<R>>{{ m.reasoning_content }}<</R>>"))
    with caplog.at_level(logging.WARNING):
        found = model_regions(model)
    assert (found.found.calls, found.found.reasoning) == ("template", "template")
    assert found.spec.reasoning.opener == "<<R>>"
    assert found.spec.reasoning.closer == "<</R>>"
    assert "opener '<<R>>', closer '<</R>>'" in caplog.text
    if expected is not None:
        assert found.spec.calls.call == expected
    else:
        assert found.spec.calls.call.tags == Tags('<p name="', '">', "</p>")
        assert found.spec.calls.call.arguments is ArgumentForm.TAGS
    for turn in TURNS:
        check_round_trip(found, model, turn)


def test_what_cannot_be_analysed_stays_text(caplog):
    with caplog.at_level(logging.WARNING):
        found = model_regions(tokenizer(ODD))
    assert (found.spec.calls, found.found.calls) == (None, "none")
    assert "calls are returned as text" in caplog.text


def test_a_template_that_fails_is_no_obstacle():
    assert model_regions(tokenizer("{{ raise_exception('no') }}")).found.calls == "none"
    assert model_regions(tokenizer("{% for x in range(10**9) %}a{% endfor %}")).found.calls == "none"


# What says the family, and where its template writes the reasoning of earlier turns: a field, the content, nowhere.
READ = "{% if m.reasoning_content %}OPEN{{ m.reasoning_content }}CLOSE{% endif %}"
THINKING = {
    "qwen3": ("", READ),
    "glm45": ("<arg_key>", READ),
    "kimi_k2": ("<|tool_calls_section_begin|>", READ),
    "command_r": ("", READ),
    "openai_gptoss": ("", READ),
    "granite": ("Here is my thought process:", ""),
    "mistral": ("[THINK]", ""),
    "deepseek_v3": ("<｜Assistant｜></think>", ""),
}
THOUGHT = {"role": "assistant", "content": "It is\n\n4.", "reasoning_content": "Is it <b>4</b>?\nYes."}


@pytest.mark.parametrize("name", THINKING)
@pytest.mark.parametrize("with_markers", [True, False])
def test_reasoning_of_earlier_turns_is_rendered_as_it_is_read(name, with_markers):
    sign, written = THINKING[name]
    spec = REASONING[name]
    written = written.replace("OPEN", spec.opener).replace("CLOSE", spec.closer)
    if spec.channel:
        written += "<|start|>assistant<|channel|>final<|message|>"
    markers = ("[THINK]", "[/THINK]", "<|START_THINKING|>", "<|END_THINKING|>", *MARKERS)
    source = template("", written) if written else template("")
    model = tokenizer(f"{{# {sign} #}}{source}", *(markers if with_markers else ()))
    found = model_regions(model)
    assert found.spec.reasoning.name == name
    renderer = ChatRenderer(model)
    AnswerFormat(model).prepare(renderer)

    def rendered(turn: dict[str, object]) -> str:
        user = {"role": "user", "content": "hi"}
        chat = renderer.render(ChatAsk(messages=[user, turn], add_generation_prompt=False))
        own = model.encode_guarded(chat.text, chat.own)
        assert name == "deepseek_v3" or set(found.markers.closes_thinking) <= {*own}  # as control tokens
        return chat.text[chat.text.index("assistant\n") + 10 :].removesuffix("<|im_end|>\n")

    message = read_turn(found, model, rendered(THOUGHT), None)
    if name == "deepseek_v3":
        assert message == {key: value for key, value in THOUGHT.items() if key != "reasoning_content"}
        return
    assert message == THOUGHT
    assert rendered(message) == rendered(THOUGHT)
    reader = RegionReader(found.spec, found.markers, thinking=True)
    for token in model.encode("hm" + spec.closer.strip(), add_special_tokens=False):
        reader.push(token, model.decode([token], skip_special_tokens=False))
    assert reader.reasoning_tokens == 2 + len(model.encode(spec.closer.strip(), add_special_tokens=False))


QWEN3 = {
    "version": 1,
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "reasoning_content": {"open": "<think>", "close": "</think>"},
        "tool_calls": {
            "open": "<tool_call>",
            "close": "</tool_call>",
            "content": "json",
            "repeats": True,
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close": "<|im_end|>"},
    },
}


def test_the_checkpoints_own_description(tmp_path, caplog):
    folder = tmp_path / "model"
    shutil.copytree(MINI, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "response_template": QWEN3}))
    found = model_regions(Tokenizer.from_dir(folder))
    assert (found.found.calls, found.found.reasoning) == ("response_template", "response_template")
    assert found.spec.calls.call == ObjectCall()
    assert found.spec.reasoning.opener == "<think>"
    odd = {"fields": {"tool_calls": {"open_pattern": "<(a|b)>", "close": "</x>", "content": "json"}}}
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "response_template": odd}))
    assert model_regions(Tokenizer.from_dir(folder)).found.calls == "table"
    assert "response_template of tokenizer_config.json is ignored" in caplog.text


@pytest.mark.parametrize(
    ("calls", "expected"),
    [
        (
            {"open_pattern": r"<tool_call>\s*<function=(?P<name>[^>]+)>", "close": "</tool_call>", "content": "json",
             "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}},
            HeadedCall((Hole.NAME, ">")),
        ),
        (
            {"open_pattern": r"<function=(?P<name>\w+)>\n", "close": "</function>", "content": "xml-inline",
             "content_args": {"tag_pattern": r"<parameter=(?P<key>\w+)>\n(?P<value>.*?)\n</parameter>"},
             "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}},
            HeadedCall((Hole.NAME, ">\n"), "</function>", ArgumentForm.TAGS,
                       Tags("<parameter=", ">\n", "\n</parameter>")),
        ),
        (
            {"open": "[TOOL_CALLS]", "content": "json", "transform_each": True,
             "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{arguments}"}}},
            ObjectCall(array=True),
        ),
    ],
)  # fmt: skip
def test_calls_of_a_description(calls, expected):
    assert spec_of_response_template({"fields": {"tool_calls": calls}}).calls.call == expected


def test_the_template_that_is_rendered_is_compiled_once(monkeypatch):
    """By the renderer of a server and by the search for regions: compiling is most of what the two cost."""
    parsed = []
    parse = ChatSandbox.parse

    def counted(sandbox, source):
        parsed.append(source)
        return parse(sandbox, source)

    monkeypatch.setattr(ChatSandbox, "parse", counted)
    model = tokenizer("{{ messages[0].content }} compiled once")
    assert (
        ChatRenderer(model).render(ChatAsk(messages=[{"role": "user", "content": "a"}])).text.startswith("a")
    )
    assert model_regions(model).spec.calls is None
    assert len(parsed) == 1
