"""What the generator makes: conversations with the answers' checks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

Role = Literal["system", "user", "assistant", "tool"]


@dataclass(frozen=True, slots=True)
class Check:
    """How to grade an answer. `kind` names a function of `grading`; `data` is what it compares with."""

    kind: str
    data: Any


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call as the model writes it: arguments in the order they are written."""

    name: str
    arguments: dict[str, Any]

    def message(self) -> dict[str, Any]:
        return {"type": "function", "function": {"name": self.name, "arguments": self.arguments}}


@dataclass(frozen=True, slots=True)
class Turn:
    """One message. Only assistant turns are learned; `check` is set where the answer can be graded."""

    role: Role
    content: str
    calls: tuple[ToolCall, ...] = ()
    check: Check | None = None

    def message(self) -> dict[str, Any]:
        """The message as chat APIs spell it."""
        message: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.calls:
            message["tool_calls"] = [call.message() for call in self.calls]
        return message


@dataclass(slots=True)
class Conversation:
    """Turns of one chat, or, without turns, `text`: a plain document.

    `tools` are function descriptions in the OpenAI form. `keys` are the combinations that place it in its split.
    """

    domain: str
    turns: list[Turn] = field(default_factory=list)
    tools: list[dict[str, Any]] = field(default_factory=list)
    text: str = ""
    keys: tuple[str, ...] = ()

    def messages(self) -> list[dict[str, Any]]:
        return [turn.message() for turn in self.turns]


def system(content: str) -> Turn:
    return Turn("system", content)


def user(content: str) -> Turn:
    return Turn("user", content)


def assistant(content: str, check: Check | None = None) -> Turn:
    return Turn("assistant", content, check=check)
