"""The text of a branch, plain or a conversation, and how it becomes a prompt."""

from __future__ import annotations

from functools import cached_property

from quire.records import dataclass
from quire.text.chat_renderer import ChatAsk, ChatRenderer
from quire.text.tokenizer import Tokenizer
from quire.types import RequestError

Range = tuple[int, int]


class Transcript:
    """Plain text, or turns, of which the last may be open."""

    def __init__(self) -> None:
        self.turns: list[dict[str, str]] = []
        self.role: str | None = None  # of the open turn
        self.text = ""  # of the open turn, or the plain text
        self.own: tuple[Range, ...] = ()  # ranges of `text` that the program wrote, not the model

    def copy(self) -> Transcript:
        """The same text, to go on with in another branch."""
        made = Transcript()
        made.turns, made.role, made.text, made.own = [*self.turns], self.role, self.text, self.own
        return made

    @property
    def is_plain(self) -> bool:
        return not self.turns and self.role is None

    def check_open(self, what: str) -> None:
        """Raise RequestError between turns."""
        if self.turns and self.role is None:
            raise RequestError(
                "role", f"{what} cannot stand between turns; put it inside one, as in assistant(…)"
            )

    def add(self, text: str, *, own: bool) -> None:
        """Append text. Raises RequestError between the turns of a conversation."""
        self.check_open("text")
        if own:
            self.own = joined(self.own, (len(self.text), len(self.text) + len(text)))
        self.text += text

    def start(self, role: str) -> None:
        """Open a turn. Raises RequestError inside a turn and after plain text."""
        if self.role is not None:
            raise RequestError("role", f"a turn of {role} cannot start inside one of {self.role}")
        if self.text:
            raise RequestError("role", f"a turn of {role} cannot follow plain text")
        self.role = role

    def end(self) -> None:
        """Complete the open turn."""
        assert self.role is not None
        self.turns.append({"role": self.role, "content": self.text})
        self.role, self.text, self.own = None, "", ()


@dataclass(frozen=True, slots=True)
class PromptText:
    """A prompt; control tokens are read in the ranges `own` only. The model's own start comes before plain text."""

    text: str
    own: tuple[Range, ...]
    plain: bool


class PromptWriter:
    """Makes prompts of transcripts, for one model. Several threads may use it.

    Raises RequestError for a model without a tokenizer.
    """

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        if tokenizer is None:
            raise RequestError("llm", "this model folder has no tokenizer, which a program needs")
        self._tokenizer = tokenizer

    @cached_property
    def _chat(self) -> ChatRenderer:
        return ChatRenderer(self._tokenizer)

    @cached_property
    def _lead(self) -> list[int]:
        """The tokens that the checkpoint adds before a text."""
        whole, plain = self._tokenizer.encode("a"), self._tokenizer.encode("a", add_special_tokens=False)
        return whole[: next((i for i in range(len(whole)) if whole[i : i + len(plain)] == plain), 0)]

    def render(self, transcript: Transcript) -> PromptText:
        """The text that a model would continue: of an open turn of the assistant, after the template's opening of it.

        Raises RequestError when the template refuses the turns.
        """
        role, turns, text = transcript.role, transcript.turns, transcript.text
        if transcript.is_plain:
            return PromptText(text, transcript.own, plain=True)
        if role in {None, "assistant"}:
            chat = self._chat.render(ChatAsk(messages=turns, add_generation_prompt=role is not None))
            return PromptText(chat.text + text, chat.own, plain=False)
        turns = [*turns, {"role": str(role), "content": text}]
        ask = ChatAsk(messages=turns, add_generation_prompt=False, continue_final_message=True)
        chat = self._chat.render(ask)
        return PromptText(chat.text, chat.own, plain=False)

    def encode(self, prompt: PromptText, more: str = "") -> list[int]:
        """Token ids of a prompt with `more` text of the program, tokenized as one text."""
        text, own = prompt.text + more, prompt.own
        if not prompt.plain:
            return self._tokenizer.encode_guarded(text, own)
        return self._lead + self._tokenizer.encode_guarded(text, joined(own, (len(prompt.text), len(text))))


def joined(ranges: tuple[Range, ...], after: Range) -> tuple[Range, ...]:
    """Ranges in order and one after them, which may continue the last."""
    if after[0] == after[1]:
        return ranges
    if ranges and ranges[-1][1] == after[0]:
        return (*ranges[:-1], (ranges[-1][0], after[1]))
    return (*ranges, after)
