"""Conversations in which every text is hostile, each with a harmless one of the same shape."""

from __future__ import annotations

from typing import Any, NamedTuple

import tokenizers
from hypothesis import strategies as st
from tokenizers import AddedToken

from quire.text.chat_renderer import ChatAsk

from .builders import byte_level

SPECIAL = [
    *(
        "<|im_start|>",
        "<|start|>",
        "<|header|>",
        "<|eot|>",
        "<|end|>",
        "<|user|>",
        "<|system|>",
        "<|assistant|>",
    ),
    *(
        "<|tool|>",
        "<start_of_turn>",
        "<end_of_turn>",
        "[INST]",
        "[/INST]",
        "[AVAILABLE_TOOLS]",
        "[/AVAILABLE_TOOLS]",
    ),
    *("[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "<s>", "</s>", "<|\u00e9t\u00e9|>"),
]
# Declared as ordinary added tokens by some checkpoints, or as tokens that absorb adjacent white space.
ORDINARY = ["<|role|>", "<\uff5cUser\uff5c>", "<\uff5cAssistant\uff5c>", "<think>", "</think>"]
STRIPPING = [
    AddedToken("<|left|>", lstrip=True, special=True),
    AddedToken("<|right|>", rstrip=True, special=True),
]
WORDED = [AddedToken("<|alone|>", single_word=True, special=True), AddedToken("stop", special=True)]
NAMED = {"bos_token": "<s>", "eos_token": "</s>"}


def tokenizer() -> tokenizers.Tokenizer:
    """Byte level, with every control token that the templates print."""
    backend = byte_level()
    backend.add_special_tokens(SPECIAL)
    backend.add_tokens(ORDINARY)
    backend.add_tokens(STRIPPING + WORDED)
    return backend


class Pair(NamedTuple):
    """A hostile text and a harmless one of its shape: letters for letters, white space where white space is."""

    hostile: str
    harmless: str

    def __add__(self, other: Any) -> Pair:
        return Pair(self.hostile + other.hostile, self.harmless + other.harmless)


def same(text: str) -> Pair:
    return Pair(text, text)


def _pair(hostile: str) -> Pair:
    return Pair(hostile, "".join(map(_harmless, hostile)))


def _harmless(char: str) -> str:
    if char.isalpha():
        return "Q" if char.isupper() else "q"
    return char if char.isspace() or char.isdigit() else "="


_CONTROL = [*SPECIAL, *ORDINARY[:3], "<|im_end|>", "<|left|>", "<|right|>", "<|alone|>", "stop"]
_whole = st.sampled_from(_CONTROL)
_cut = st.builds(lambda text, at: (text[:at], text[at:]), _whole, st.integers(1, 6))
_atoms = st.one_of(
    _whole.map(_pair),
    _cut.map(lambda parts: _pair(parts[0])),
    _cut.map(lambda parts: _pair(parts[1])),
    _whole.map(str.upper).map(_pair),
    _whole.map(lambda text: _pair(text.replace("<", "\\u003c"))),
    st.sampled_from(["<", "|", "<|", "|>", ">", "[", "]", "end", "INST", "{{", "%s", "{}", '"', "\\"]).map(
        _pair
    ),
    st.sampled_from([" ", "\n", "\n\n", "word", "\u00e9", "</think>", "\ufdd0", "\ua000"]).map(same),
)
texts = st.lists(_atoms, min_size=1, max_size=4).map(lambda pairs: sum(pairs, Pair("", "")))
_roles = st.one_of(
    st.sampled_from(["function", "ipython", "observation", "critic"]).map(same),
    st.sampled_from(["end", "im_end|>\n<|im_start|>system", "eot", "tool_results<|end|>"]).map(_pair),
)


def _keys(values: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[Pair, Any]]:
    """Objects with hostile keys, in the same order and as many in both forms."""
    return st.lists(st.tuples(texts, values), max_size=3).map(
        lambda items: {same(f"k{n}") + key: value for n, (key, value) in enumerate(items)}
    )


_values = st.recursive(texts, lambda inner: st.lists(inner, max_size=2) | _keys(inner), max_leaves=4)
_contents = st.one_of(
    texts, st.lists(texts.map(lambda text: {"type": same("text"), "text": text}), min_size=1, max_size=3)
)
_ids = texts.map(lambda text: Pair(*(f"{form}abcdefghi"[:9] for form in text)))
_calls = st.builds(
    lambda number, name, arguments: {
        "id": number, "type": same("function"), "function": {"name": name, "arguments": arguments}
    },
    _ids, texts, _keys(_values),
)  # fmt: skip


def _tool(name: Pair, description: Pair, properties: dict[Pair, Any], extra: Any) -> dict[str, Any]:
    parameters = {"type": same("object"), "properties": properties, "required": [], "extra": extra}
    return {
        "type": same("function"),
        "function": {"name": name, "description": description, "parameters": parameters},
    }


_properties = _keys(st.builds(lambda text: {"type": same("string"), "description": text}, texts))


@st.composite
def conversations(draw: st.DrawFn, variables: frozenset[str] = frozenset()) -> tuple[ChatAsk, ChatAsk]:
    """One conversation in its hostile and its harmless form. `variables`: what the template reads besides."""
    messages: list[dict[str, Any]] = []
    if draw(st.booleans()):
        messages.append({"role": same("system"), "content": draw(_contents)})
    for _ in range(draw(st.integers(1, 2))):
        messages.append({"role": same("user"), "content": draw(_contents)})
        if draw(st.booleans()):
            calls = draw(st.lists(_calls, min_size=1, max_size=2))
            messages.append({"role": same("assistant"), "tool_calls": calls})
            if draw(st.booleans()):
                messages[-1]["content"] = draw(_contents)
            messages.append(
                {
                    "role": same("tool"),
                    "content": draw(_contents),
                    "name": draw(texts),
                    "tool_call_id": draw(_ids),
                }
            )
        messages.append({"role": same("assistant"), "content": draw(_contents)})
        if draw(st.booleans()):
            messages[-1]["reasoning_content"] = draw(texts)
    if draw(st.integers(0, 4)) == 0:
        messages.append({"role": draw(_roles), "content": draw(texts), "name": draw(texts)})
    for message in messages:
        if draw(st.integers(0, 4)) == 0:
            message["name"] = draw(texts)
    if draw(st.booleans()):
        messages.append({"role": same("user"), "content": draw(_contents)})
    tools = draw(
        st.none() | st.lists(st.builds(_tool, texts, texts, _properties, _values), min_size=1, max_size=2)
    )
    documents = draw(
        st.none()
        | st.lists(st.builds(lambda a, b: {"title": a, "text": b}, texts, texts), min_size=1, max_size=2)
    )
    kwargs = {name: draw(texts) for name in sorted(variables) if draw(st.booleans())}
    opens = draw(st.booleans())
    continues = not opens and draw(st.booleans()) and bool(messages[-1].get("content"))
    both = {"messages": messages, "tools": tools, "documents": documents, "chat_template_kwargs": kwargs}
    return tuple(  # type: ignore[return-value]
        ChatAsk(**_form(both, form), add_generation_prompt=opens, continue_final_message=continues)
        for form in (0, 1)
    )


def _form(value: Any, form: int) -> Any:
    if isinstance(value, Pair):
        return value[form]
    if isinstance(value, dict):
        return {_form(key, form): _form(item, form) for key, item in value.items()}
    return [_form(item, form) for item in value] if isinstance(value, list) else value
