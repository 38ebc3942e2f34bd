"""Chat templates: the same prompt as transformers' apply_chat_template, and clear errors."""

from __future__ import annotations

import copy
import dataclasses
from datetime import datetime
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from quire.text.chat_renderer import ChatAsk, ChatRenderer, ChatTemplate
from quire.text.tokenizer import Tokenizer
from quire.types import CheckpointError, RequestError

from .builders import byte_level

TEMPLATES = {path.stem: path.read_text() for path in (Path(__file__).parent / "templates").glob("*.jinja")}

SYSTEM = {"role": "system", "content": "  Be brief & <kind>.\n"}
USER = {"role": "user", "content": "What's 2+2?\n\tÉ 你好 👍🏽"}
ANSWER = {"role": "assistant", "content": "Four. "}
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {
            "id": "abcdefgh1",
            "type": "function",
            "function": {"name": "add", "arguments": {"b": 2, "a": "1 <é>"}},
        }
    ],
}
RESULT = {"role": "tool", "tool_call_id": "abcdefgh1", "name": "add", "content": '{"sum": 4}'}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds <two> numbers é",
            "parameters": {
                "type": "object",
                "properties": {
                    "b": {"type": "integer"},
                    "a": {"type": ["string", "null"]},
                    "o": {"type": "object"},
                },
                "required": ["a"],
            },
        },
    }
]
CONVERSATIONS = {
    "user": [USER],
    "system": [SYSTEM, USER],
    "turns": [SYSTEM, USER, ANSWER, USER],
    "tools": [USER, CALL, RESULT, {**ANSWER, "reasoning_content": "\nadd them\n"}],
    "long": [USER, ANSWER] * 20 + [USER],
    "thinking": [USER, {"role": "assistant", "content": "<think>hm</think>\n\nFour", "thinking": "hm"}, USER],
    "assistant-last": [USER, ANSWER],
}


@pytest.fixture(scope="module")
def reference() -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=byte_level(), bos_token="<|endoftext|>", eos_token="<|im_end|>"
    )


def ours(source: str, reference: PreTrainedTokenizerFast, ask: ChatAsk) -> str:
    return ChatTemplate(source, special_tokens=reference.special_tokens_map).render(ask).text


@pytest.mark.parametrize("generation", [True, False], ids=["open", "closed"])
@pytest.mark.parametrize("with_tools", [True, False], ids=["tools", "no-tools"])
@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("template", TEMPLATES)
def test_prompts_equal_transformers(reference, template, conversation, with_tools, generation):
    messages, tools = CONVERSATIONS[conversation], TOOLS if with_tools else None
    before = copy.deepcopy(messages)
    expected = reference.apply_chat_template(
        messages,
        tools=tools,
        chat_template=TEMPLATES[template],
        add_generation_prompt=generation,
        tokenize=False,
    )
    ask = ChatAsk(messages=messages, tools=tools, add_generation_prompt=generation)
    assert ours(TEMPLATES[template], reference, ask) == expected
    assert messages == before


CHATML, MACROS = ChatTemplate(TEMPLATES["chatml"]), ChatTemplate(TEMPLATES["macros"])


@settings(max_examples=50)
@given(st.lists(st.text(max_size=20), min_size=1, max_size=4), st.booleans())
def test_any_content_renders_as_in_transformers(reference, contents, generation):
    messages = [
        {"role": "user" if i % 2 == 0 else "assistant", "content": text} for i, text in enumerate(contents)
    ]
    for template in (CHATML, MACROS):
        expected = reference.apply_chat_template(
            messages, chat_template=template.source, add_generation_prompt=generation, tokenize=False
        )
        ask = ChatAsk(messages=messages, add_generation_prompt=generation)
        assert template.render(ask).text == expected


@pytest.mark.parametrize("template", ["chatml", "inst", "header"])
@pytest.mark.parametrize("content", ["Once upon", "Once upon  ", "  a\n", "x"])
def test_continuing_the_final_message_equals_transformers(reference, template, content):
    messages = [USER, {"role": "assistant", "content": content}]
    expected = reference.apply_chat_template(
        messages, chat_template=TEMPLATES[template], continue_final_message=True, tokenize=False
    )
    ask = ChatAsk(messages=messages, add_generation_prompt=False, continue_final_message=True)
    assert ours(TEMPLATES[template], reference, ask) == expected


def test_template_arguments_reach_the_template_and_unknown_ones_are_refused(reference):
    ask = ChatAsk(messages=[USER], chat_template_kwargs={"enable_thinking": False})
    assert ours(TEMPLATES["chatml"], reference, ask).endswith("<think>\n\n</think>\n\n")
    for name in ("tokenize", "messages", "chat_template", "enable_thought", "raise_exception_"):
        with pytest.raises(
            RequestError, match=r"chat_template_kwargs: '\w+' is not an argument.*enable_thinking"
        ):
            ours(TEMPLATES["chatml"], reference, ChatAsk(messages=[USER], chat_template_kwargs={name: True}))


def test_the_clock_is_given(reference):
    template = ChatTemplate(
        TEMPLATES["header"], special_tokens={"bos_token": "<s>"}, now=lambda: datetime(2026, 2, 3)
    )
    assert "Today Date: 03 Feb 2026\n" in template.render(ChatAsk(messages=[USER])).text
    fixed = ChatAsk(messages=[USER], chat_template_kwargs={"date_string": "1 May 2020"})
    assert "Today Date: 1 May 2020\n" in template.render(fixed).text


def test_the_hash_names_the_source():
    assert (
        ChatTemplate("a").template_hash == ChatTemplate("a").template_hash != ChatTemplate("b").template_hash
    )
    assert (
        ChatTemplate("").template_hash == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    )


def test_errors_are_the_same_as_in_transformers(reference):
    source = "{{ messages[0].content + messages[0].missing.deeper }}"
    with pytest.raises(Exception, match="has no attribute 'missing'"):
        reference.apply_chat_template([USER], chat_template=source, tokenize=False)
    with pytest.raises(RequestError, match=r"messages: the chat template cannot render them: .*'missing'"):
        ours(source, reference, ChatAsk(messages=[USER]))


# -- which template --------------------------------------------------------------------------------


def test_a_model_without_a_template_says_so():
    with pytest.raises(CheckpointError, match=r"no chat template.*use text completion"):
        ChatRenderer(Tokenizer(byte_level()))
    with pytest.raises(CheckpointError, match=r"\['rag'\] but none named 'default'"):
        ChatRenderer(Tokenizer(byte_level(), chat_templates={"rag": "x"}))


def test_the_tool_template_is_used_when_there_are_tools():
    tokenizer = Tokenizer(
        byte_level(), chat_templates={"default": "plain", "tool_use": "with tools", "rag": "{{"}
    )
    renderer = ChatRenderer(tokenizer)
    assert renderer.render(ChatAsk(messages=[USER])).text == "plain"
    assert renderer.render(ChatAsk(messages=[USER], tools=TOOLS)).text == "with tools"
    assert (
        ChatRenderer(tokenizer, template="given").render(ChatAsk(messages=[USER], tools=TOOLS)).text
        == "given"
    )


# -- content parts ---------------------------------------------------------------------------------

PARTS = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
LOOPING = "{% for m in messages %}{% for part in m.content %}[{{ part.text }}]{% endfor %}{% endfor %}"
EITHER = (
    "{% for m in messages %}{% set c = m['content'] | trim if m['content'] is string else m['content'] %}"
    "{% if c is string %}{{ c }}{% else %}{% for part in c %}<{{ part['text'] }}>{% endfor %}{% endif %}"
    "{% endfor %}"
)

# Kimi K2 reads it so: the only loop is over what a method call gave.
GETTING = (
    "{% macro render(msg) %}{% set c = msg.get('content') %}{% if c is string %}{{ c }}{% elif c is not none %}"
    "{% for part in c %}{{ part['text'] }}{% endfor %}{% endif %}{% endmacro %}"
    "{% for m in messages %}{{ render(m) }}{% endfor %}"
)


@pytest.mark.parametrize(
    ("source", "content", "expected"),
    [
        ("{{ messages[0].content }}", PARTS, "one\ntwo"),
        ("{{ messages[0].content }}", "text", "text"),
        (LOOPING, PARTS, "[one][two]"),
        (LOOPING, "text", "[text]"),
        (EITHER, PARTS, "<one><two>"),
        (EITHER, " text ", "text"),
        (GETTING, PARTS, "onetwo"),
        (GETTING, "text", "text"),
    ],
)
def test_content_takes_the_form_the_template_reads(source, content, expected):
    messages = [{"role": "user", "content": content}]
    assert ChatTemplate(source).render(ChatAsk(messages=messages)).text == expected


BLOCKS = """{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for block in m['content'] %}
{%- if block['type'] == 'text' %}{{ block['text'] }}{% elif block['type'] == 'thinking' -%}
[THINK]{{ block['thinking'] }}[/THINK]{% endif %}{% endfor %}{% endif %}|{% endfor %}"""
FIELDS = "{% for m in messages %}{{ m.content }}{% if m.thinking %}({{ m.reasoning_content }}){% endif %}|{% endfor %}"
THOUGHT = {"type": "thinking", "thinking": "so"}
THOUGHTS = {
    "type": "thinking",
    "thinking": [{"type": "text", "text": "s"}, {"type": "text", "text": "o"}],
    "closed": True,
}
ANSWERED = {"type": "text", "text": "42"}


@pytest.mark.parametrize(
    "said",
    [
        {"content": [THOUGHT, ANSWERED]},
        {"content": [THOUGHTS, ANSWERED]},
        {"content": "42", "reasoning_content": "so"},
        {"content": [ANSWERED], "reasoning": "so"},
    ],
)
@pytest.mark.parametrize(
    ("source", "expected"), [(BLOCKS, "ab|[THINK]so[/THINK]42|"), (FIELDS, "a\nb|42(so)|")]
)
def test_reasoning_takes_the_form_the_template_reads(source, expected, said):
    system = {"role": "system", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
    messages = [system, {"role": "assistant", **said}]
    assert ChatTemplate(source).render(ChatAsk(messages=messages)).text == expected


def test_thinking_of_a_system_message():
    messages = [{"role": "system", "content": [ANSWERED, THOUGHT]}]
    assert ChatTemplate(BLOCKS).render(ChatAsk(messages=messages)).text == "42[THINK]so[/THINK]|"
    assert ChatTemplate(FIELDS).render(ChatAsk(messages=messages)).text == "42\nso|"


CALL_TEXT = "{% set f = messages[1].tool_calls[0].function %}"


@pytest.mark.parametrize(
    "source",
    [
        "{{ '>>>' + f.name + '\n' + f['arguments'] }}",
        "{{ '<' ~ f.arguments ~ '>' }}",
        "{{ f.get('arguments') }}",
        "{% set args = f.arguments %}{{ args if args is string else args | tojson }}",
        "{% if f.arguments is mapping %}{{ f.arguments | items }}{% else %}{{ f.arguments }}{% endif %}",
    ],
)
def test_tool_call_arguments_stay_json_text_where_the_template_takes_it(reference, source):
    """As in transformers, which hands messages on unchanged."""
    call = copy.deepcopy(CALL)
    call["tool_calls"][0]["function"]["arguments"] = '{"b": 2,  "a": "\u00e9"}'
    del call["content"]
    expected = reference.apply_chat_template([USER, call], chat_template=CALL_TEXT + source, tokenize=False)
    assert ours(CALL_TEXT + source, reference, ChatAsk(messages=[USER, call])) == expected
    assert '{"b": 2,  "a": "\u00e9"}' in expected


@pytest.mark.parametrize(
    "source",
    [
        "{% for key, value in f.arguments | items %}{{ key }}{% endfor %}",
        "{% set args = f.arguments %}{% for key in args %}{{ key }}{% endfor %}",
        "{{ f.arguments.keys() | join }}",
        "{{ 'x' ~ f.arguments | tojson }}",
    ],
)
def test_tool_call_arguments_become_objects_where_the_template_needs_one(source):
    call = copy.deepcopy(CALL)
    as_object = ChatTemplate(CALL_TEXT + source).render(ChatAsk(messages=[USER, call]))
    call["tool_calls"][0]["function"]["arguments"] = '{"b": 2, "a": "1 <\u00e9>"}'
    assert ChatTemplate(CALL_TEXT + source).render(ChatAsk(messages=[USER, call])) == as_object


def test_tool_call_arguments_as_json_text_become_objects():
    source = "{{ messages[1].tool_calls[0].function.arguments | tojson }}"
    call = copy.deepcopy(CALL)
    call["tool_calls"][0]["function"]["arguments"] = '{"b": 2,  "a": "é"}'
    assert ChatTemplate(source).render(ChatAsk(messages=[USER, call])).text == '{"b": 2, "a": "é"}'
    call["tool_calls"][0]["function"]["arguments"] = ""
    assert ChatTemplate(source).render(ChatAsk(messages=[USER, call])).text == "{}"
    for bad in ("{", "[1]", "[" * 100_000):
        call["tool_calls"][0]["function"]["arguments"] = bad
        with pytest.raises(RequestError, match="message 1: tool call arguments"):
            ChatTemplate(source).render(ChatAsk(messages=[USER, call]))


@pytest.mark.parametrize(
    ("messages", "problem"),
    [
        ([], "must not be empty"),
        ("hello", "must be a list"),
        (["hello"], "message 0 must be an object"),
        ([{"content": "x"}], "message 0 has no role"),
        ([{"role": 3, "content": "x"}], "message 0 has no role"),
        ([{"role": "r" * 200, "content": "x"}], "role of 200 characters"),
        ([USER, {"role": "user"}], "message 1 has no content"),
        ([{"role": "assistant", "content": None}], "no content; only an assistant with tool_calls"),
        ([{"role": "user", "content": 5}], "content must be a string or a list"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "type 'image_url' is not supported"),
        ([{"role": "user", "content": [{"type": {}}]}], "type {} is not supported"),
        ([{"role": "user", "content": ["x"]}], "type None is not supported"),
        ([{"role": "user", "content": [{"type": "text", "text": 1}]}], "needs a string in 'text'"),
        ([{"role": "user", "content": [THOUGHT]}], "the role 'user' has no thinking"),
        ([{"role": "assistant", "content": [{"type": "thinking"}]}], "needs a string in 'thinking'"),
        ([{"role": "assistant", "content": [{**THOUGHT, "thinking": [THOUGHT]}]}], "consists of text parts"),
        ([{"role": "assistant", "tool_calls": {}}], "tool_calls must be a list"),
        ([{"role": "assistant", "tool_calls": ["x"]}], "a tool call must be an object"),
        ([{"role": "assistant", "tool_calls": [{"function": {}}]}], "needs a function with a name"),
        ([{"role": "user", "content": "x", "extra": {1, 2}}], "contains a set, which is not JSON data"),
        ([{"role": "user", "content": "x", "extra": {1: 2}}], "key 1 is not a string"),
        ([USER] * 20_001, "20001 messages exceed the limit"),
        ([{"role": "user", "content": "x" * (1 << 24)}], "more than 8388608 characters"),
    ],
)
def test_malformed_messages_are_named(messages, problem):
    with pytest.raises(RequestError, match="messages: .*" + problem):
        ChatTemplate("x").render(ChatAsk(messages=messages))


def test_deep_nesting_is_refused():
    nested: object = "x"
    for _ in range(100):
        nested = [nested]
    with pytest.raises(RequestError, match="nested more than 64 levels"):
        ChatTemplate("x").render(ChatAsk(messages=[{"role": "user", "content": "x", "extra": nested}]))


@pytest.mark.parametrize(
    ("ask", "field"),
    [
        (ChatAsk(messages=[USER], tools="x"), "tools"),
        (ChatAsk(messages=[USER], tools=["x"]), "tools"),
        (ChatAsk(messages=[USER], documents=[1]), "documents"),
        (ChatAsk(messages=[USER], documents=[{"text": "x"}]), "documents"),
        (ChatAsk(messages=[USER], reasoning_effort="low"), "^reasoning_effort"),
        (ChatAsk(messages=[USER], chat_template_kwargs={"reasoning_effort": "low"}), "^chat_template_kwargs"),
        (ChatAsk(messages=[USER], continue_final_message=True), "continue_final_message"),
        (
            ChatAsk(messages=[USER, CALL], add_generation_prompt=False, continue_final_message=True),
            "continue_final",
        ),
    ],
)
def test_malformed_asks_are_named(ask, field):
    with pytest.raises(RequestError, match=field):
        ChatTemplate("{{ messages[0].content }}").render(ask)


def test_a_template_that_refuses_the_messages_gives_its_own_words():
    with pytest.raises(RequestError, match=r"messages: the chat template refuses them: .*must alternate"):
        ChatTemplate(TEMPLATES["inst"], special_tokens={"bos_token": "<s>", "eos_token": "</s>"}).render(
            ChatAsk(messages=[USER, USER])
        )


def test_the_end_of_a_continued_message_is_found_as_a_json_escape_too():
    source = "{{ messages[0].content | tojson(ensure_ascii=true) }}"
    ask = ChatAsk(
        messages=[{"role": "user", "content": "\u00e9t\u00e9"}],
        add_generation_prompt=False,
        continue_final_message=True,
    )
    assert ChatTemplate(source).render(ask).text == '"\\u00e9t\\u00e9'
    used_up = {"role": "user", "content": "".join(map(chr, range(0xFDD0, 0xFDF0)))}
    with pytest.raises(RequestError, match="noncharacters"):
        ChatTemplate(source).render(dataclasses.replace(ask, messages=[used_up]))
