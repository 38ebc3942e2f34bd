"""Whether a small model will do for a request: logistic regression over the words and the size of what is asked.

The same features are made of a labelled line (`quire train-router`, offline/difficulty_training) and of a request, and
the model is a file of names and numbers that can be read. Pure: no clock, no numpy. See docs/router.md, decisions/0183.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import msgspec

from quire.records import dataclass

_MOST_TEXT = 2000  # characters of the question, and of the system prompt, whose words are looked at
_PIECE = re.compile(r"\d+|[^\W\d_]+|[^\w\s]")
_TEXTS = frozenset(("text", "input_text", "output_text"))
# Items of /v1/responses that are no messages, and as whose turn they count.
_ITEMS = {"function_call": "assistant", "reasoning": "assistant", "function_call_output": "tool"}

AskedFeatures = dict[str, float]


class DifficultyModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What was learned: the probability that the small model suffices is the logistic function of `bias` and the sum of
    feature times weight. `threshold` is where a request counts as easy, `report` what was measured."""

    format: Literal["quire difficulty 1"]
    threshold: float
    bias: float
    weights: dict[str, float]
    report: dict[str, Any] = {}

    def suffices(self, features: Mapping[str, float]) -> float:
        """The probability that the small model suffices."""
        weights = self.weights
        total = self.bias + sum(weights[name] * value for name, value in features.items() if name in weights)
        return 1 / (1 + math.exp(-max(-700.0, min(700.0, total))))


def read_difficulty(data: bytes) -> DifficultyModel:
    """The model of a file. Raises ValueError."""
    try:
        model = msgspec.json.decode(data, type=DifficultyModel)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"is not a file of `quire train-router`: {error}") from None
    numbers = (model.threshold, model.bias, *model.weights.values())
    if not all(map(math.isfinite, numbers)) or not 0 <= model.threshold <= 1:
        raise ValueError("its numbers are not finite, or its threshold is not in [0, 1]")
    return model


@dataclass(frozen=True, slots=True)
class DifficultyJudgement:
    """What was decided for a request: by which rule, with which probability that `target` was to be the small one."""

    rule: str
    target: str
    suffices: float


@dataclass(frozen=True, slots=True)
class DifficultyRule:
    """Easy requests go to `easy`, from a probability of `threshold` on; others, and those of which nothing is known, to
    `hard`."""

    model: DifficultyModel
    easy: str
    hard: str
    threshold: float

    def judge(self, rule: str, features: AskedFeatures | None) -> DifficultyJudgement:
        """Where a request with these features goes; None: they are unknown."""
        suffices = 0.0 if features is None else self.model.suffices(features)
        easy = features is not None and suffices >= self.threshold
        return DifficultyJudgement(rule, self.easy if easy else self.hard, suffices)


def features_of(body: Mapping[str, Any]) -> AskedFeatures | None:
    """The features of a request in the form of OpenAI's or Anthropic's APIs; None if it asks for more than texts say,
    or for nothing.

    Fields that are looked at: messages, input, prompt, instructions, system, tools.
    """
    given = body.get("messages", body.get("input", body.get("prompt")))
    messages = [{"role": "user", "content": given}] if isinstance(given, str) else given
    if not isinstance(messages, Sequence) or not messages:
        return None
    texts, roles = [_text(each) for each in messages], [_role(each) for each in messages]
    system = _text({"role": "system", "content": body.get("system") or body.get("instructions")})
    if any(each is None for each in texts) or system is None:
        return None
    question, sizes = "", len(system)
    for role, text in zip(roles, texts, strict=True):
        assert text is not None
        sizes += len(text)
        if role in {"system", "developer"}:
            system += text
        elif role == "user":
            question = text
    if not question.strip():
        return None
    found: AskedFeatures = {f"last {roles[-1]}": 1.0}
    pieces = _pieces(question)
    found |= dict.fromkeys(pieces, 1.0)
    found |= {f"{one} {two}": 1.0 for one, two in itertools.pairwise(pieces)}
    found |= dict.fromkeys((f"system: {each}" for each in _pieces(system)), 1.0)
    tools, begins = body.get("tools"), question[:_MOST_TEXT]
    found |= {
        "size of question": math.log1p(len(question)), "size of all": math.log1p(sizes),
        "size of numbers": math.log1p(sum(map(str.isdigit, begins))), "lines": math.log1p(begins.count("\n")),
        "turns": math.log1p(len(messages)), "tools": math.log1p(len(tools) if isinstance(tools, list) else 0),
    }  # fmt: skip
    return found


def _role(message: Any) -> str | None:
    """Whose turn a message or an item is; None if that is not known."""
    if not isinstance(message, Mapping):
        return None
    role = message.get("role", _ITEMS.get(str(message.get("type"))))
    return role if isinstance(role, str) else None


def _text(message: Any) -> str | None:
    """The text of a message or an item; None if it has anything else."""
    if _role(message) is None:
        return None
    content = message.get("content") if "role" in message else message.get("output")
    if content is None:  # calls of tools alone
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        return None
    parts = [
        part["text"]
        if isinstance(part, Mapping) and str(part.get("type")) in _TEXTS and isinstance(part.get("text"), str)
        else None
        for part in content
    ]
    return None if any(part is None for part in parts) else "\n".join(map(str, parts))


def _pieces(text: str) -> list[str]:
    """Words in small letters, signs, and for each number how many digits it has."""
    return [
        f"{min(len(each), 9)} digits" if each.isdigit() else each.lower()
        for each in _PIECE.findall(text[:_MOST_TEXT])
    ]  # fmt: skip


AskedFor = Callable[[], AskedFeatures | None]  # made when a rule needs them
