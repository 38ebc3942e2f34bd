"""The parts of an answer: what clients see of its text, its reasoning and its calls."""

from __future__ import annotations

import enum

from quire import records


class PartKind(enum.StrEnum):
    """What a part of an answer is: text, reasoning, the name of a function that is called, or its arguments."""

    TEXT = "text"
    REASONING = "reasoning"
    CALL = "call"
    ARGUMENTS = "arguments"


@records.dataclass(slots=True)
class AnswerPart:
    """The next piece of an answer. `call` numbers the call that a CALL opens and ARGUMENTS continue; `call_id` is the
    CALL's.
    """

    kind: PartKind
    text: str
    call: int = 0
    call_id: str = ""


@records.dataclass(slots=True)
class ToolCall:
    """A call of a function; `arguments` is a JSON object as text."""

    id: str
    name: str
    arguments: str
