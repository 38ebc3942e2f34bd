"""Conversations as text: the output of the chat template, divided where learning starts and stops."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from .corpus.conversation import Conversation, Turn

IM_START = "<|im_start|>"
IM_END = "<|im_end|>"
END_OF_TEXT = "<|endoftext|>"
GENERATION_PROMPT = f"{IM_START}assistant\n"
_TOOLS_HEAD = "# Tools\n\nYou may call these functions:\n<tools>\n"
_TOOLS_TAIL = (
    "</tools>\n\nTo call one, write a JSON object like this:\n"
    '<tool_call>\n{"name": "...", "arguments": {...}}\n</tool_call>'
)


@dataclass(frozen=True, slots=True)
class Segment:
    """A piece of the rendered text. `learn`: the model should write it (the answer and its end mark)."""

    text: str
    learn: bool


def segments(conversation: Conversation) -> list[Segment]:
    """The rendered conversation; the texts joined equal the chat template's output."""
    if not conversation.turns:
        return [Segment(conversation.text + END_OF_TEXT, learn=True)]
    return _render(conversation.turns, conversation.tools)


def prompt(conversation: Conversation, turn: int) -> str:
    """The text before assistant turn `turn`, which the model reads."""
    before = _render(conversation.turns[:turn], conversation.tools)
    return "".join(s.text for s in before) + GENERATION_PROMPT


def answer(turn: Turn) -> str:
    """The text of an assistant turn, which the model writes, without the end mark."""
    parts = [turn.content] if turn.content else []
    for call in turn.calls:
        arguments = json.dumps(call.arguments, ensure_ascii=False)
        parts.append(f'<tool_call>\n{{"name": "{call.name}", "arguments": {arguments}}}\n</tool_call>')
    return "\n".join(parts)


def _render(turns: list[Turn], tools: list[dict[str, Any]]) -> list[Segment]:
    out: list[Segment] = []
    rest = turns
    first = turns[0].content if turns and turns[0].role == "system" else None
    if first is not None:
        rest = turns[1:]
    if tools:
        lines = "".join(json.dumps(tool, ensure_ascii=False) + "\n" for tool in tools)
        head = "" if first is None else first + "\n\n"
        first = head + _TOOLS_HEAD + lines + _TOOLS_TAIL
    if first is not None:
        out.append(Segment(f"{IM_START}system\n{first}{IM_END}\n", learn=False))
    for turn in rest:
        if turn.role == "assistant":
            out.append(Segment(GENERATION_PROMPT, learn=False))
            out.append(Segment(answer(turn) + IM_END, learn=True))
            out.append(Segment("\n", learn=False))
        elif turn.role == "tool":
            body = f"<tool_response>\n{turn.content}\n</tool_response>"
            out.append(Segment(f"{IM_START}tool\n{body}{IM_END}\n", learn=False))
        else:
            out.append(Segment(f"{IM_START}{turn.role}\n{turn.content}{IM_END}\n", learn=False))
    return out
