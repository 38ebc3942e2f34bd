"""The parts of an answer, text, reasoning and calls, and what it took."""

from __future__ import annotations

import enum
from typing import NamedTuple

from quire import records

CALL_OUTCOMES = ("complete", "malformed", "cut")  # what became of a call: "cut" by the end of the answer


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


@records.dataclass(frozen=True, slots=True, kw_only=True)
class AnswerRegions:
    """Where in an answer its grammar holds, and how long the model may think: followed token by token in the engine
    process (structured.region_machine).

    `thinking`: the answer starts inside the thinking region. `opener` are the tokens that open that region; `closer` is
    the token that closes it, -1 where the model has none: it is then spelled as `closer_bytes`. `close` are the tokens
    that close the region when it has `budget` tokens. `triggers`: the grammar begins behind each of these tokens
    outside of thinking, and behind the first alone if `once`. Without them it begins with the answer, or behind the
    thinking that the prompt opened if there is a `closer`. `opens_first`: the region opens at the start of the
    answer or not at all.
    """

    thinking: bool = False
    opener: tuple[int, ...] = ()
    closer: int = -1
    closer_bytes: bytes = b""
    close: tuple[int, ...] = ()
    budget: int | None = None
    triggers: tuple[int, ...] = ()
    once: bool = False
    opens_first: bool = False


class RowDrafts(NamedTuple):
    """What became of the drafts of a row; `predicted` are those of the request's own prediction."""

    drafted: int
    accepted: int
    predicted: bool


@records.dataclass(slots=True)
class Usage:
    """Token counts of a request: cached_tokens of the prompt came from the prefix cache, reasoning_tokens are among
    completion_tokens. draft_tokens were run, of which accepted_draft_tokens were right; those of the request's
    prediction are counted again.
    """

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0
    draft_tokens: int = 0
    accepted_draft_tokens: int = 0
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0

    def count(self, drafts: RowDrafts) -> None:
        """Add the drafts of a row."""
        self.draft_tokens += drafts.drafted
        self.accepted_draft_tokens += drafts.accepted
        if drafts.predicted:
            self.accepted_prediction_tokens += drafts.accepted
            self.rejected_prediction_tokens += drafts.drafted - drafts.accepted


class PromptProgress(NamedTuple):
    """How far a prompt of `total` tokens is computed, `seconds` after that began: `processed` tokens, of which `cached`
    came from the prefix cache.
    """

    total: int
    cached: int
    processed: int
    seconds: float


@records.dataclass(slots=True)
class Timings:
    """Times in the life of a request, in monotonic seconds: arrival, first scheduled, first token, finished.

    `text` are the seconds that it took to make text, parts and events of its tokens; they are counted for traces only.
    """

    arrival: float = 0.0
    scheduled: float = 0.0
    first_token: float = 0.0
    finished: float = 0.0
    text: float = 0.0
