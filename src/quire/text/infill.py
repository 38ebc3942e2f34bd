"""Fill-in-the-middle: the prompt that asks a code model for the text between a prefix and a suffix.

Bavarian et al. 2022 (arXiv 2207.14255). A model is trained with tokens of its own around both texts, in one of two
orders; `_FORMATS` lists those that are published.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from quire.records import dataclass
from quire.text.tokenizer import Tokenizer
from quire.types import RequestError


@dataclass(frozen=True, slots=True)
class _Format:
    """The tokens before the prefix, before the suffix and before the middle; `suffix_first` is the order.

    Without a `middle` token the answer follows the second text. `ends` may come after the middle in place of an
    end-of-sequence token.
    """

    prefix: str
    suffix: str
    middle: str = ""
    suffix_first: bool = False
    ends: tuple[str, ...] = ()


_FORMATS = (
    # Qwen2.5-Coder, Granite 4, CodeGemma
    _Format(
        "<|fim_prefix|>",
        "<|fim_suffix|>",
        "<|fim_middle|>",
        ends=("<|endoftext|>", "<|fim_pad|>", "<|file_sep|>", "<|repo_name|>", "<|file_separator|>"),
    ),
    # StarCoder, Granite code, Stable Code, CodeQwen1.5
    _Format(
        "<fim_prefix>",
        "<fim_suffix>",
        "<fim_middle>",
        ends=("<|endoftext|>", "<fim_pad>", "<file_sep>", "<filename>", "<reponame>", "<repo_name>"),
    ),
    _Format(
        "<fim-prefix>", "<fim-suffix>", "<fim-middle>", ends=("<|endoftext|>", "<fim-pad>")
    ),  # SantaCoder
    # DeepSeek-Coder, DeepSeek-V3
    _Format(
        "<\uff5cfim\u2581begin\uff5c>",
        "<\uff5cfim\u2581hole\uff5c>",
        "<\uff5cfim\u2581end\uff5c>",
        ends=("<\uff5cend\u2581of\u2581sentence\uff5c>",),
    ),
    _Format("\u2581<PRE>", "\u2581<SUF>", "\u2581<MID>", ends=("\u2581<EOT>",)),  # Code Llama
    _Format("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>", ends=("<|endoftext|>",)),  # GLM-4.5
    _Format("[PREFIX]", "[SUFFIX]", suffix_first=True),  # Codestral
)
_ROLES = ("prefix", "suffix", "middle")
# Tokens before the name of a repository and before that of a file, where the format has them (arXiv 2409.12186).
_REPOSITORY = ("<|repo_name|>", "<repo_name>", "<reponame>")
_FILE = ("<|file_sep|>", "<file_sep>")


@dataclass(frozen=True, slots=True)
class InfillTokens:
    """The ids of a tokenizer's format. `stop_ids` end the middle beside end-of-sequence tokens."""

    prefix: int
    suffix: int
    middle: int | None
    suffix_first: bool
    stop_ids: tuple[int, ...]

    def around(self, prefix: Sequence[int], suffix: Sequence[int]) -> list[int]:
        """The two texts with the format's tokens."""
        before, after = [self.prefix, *prefix], [self.suffix, *suffix]
        parts = after + before if self.suffix_first else before + after
        return parts if self.middle is None else [*parts, self.middle]


def infill_tokens(tokenizer: Tokenizer) -> InfillTokens:
    """The format of a tokenizer: tokens that its files name, or the first known ones that are in its vocabulary.

    Raises RequestError naming `suffix` when it has none.
    """
    prefix, suffix, middle = (tokenizer.special_tokens.get(f"{role}_token", "") for role in _ROLES)
    given = _Format(prefix, suffix, middle)
    for known in (given, *_FORMATS):
        before, after, last = (_id(tokenizer, token) for token in (known.prefix, known.suffix, known.middle))
        if before is None or after is None or (last is None and not known.suffix_first):
            continue
        ends = [end for form in (_FORMATS if known is given else (known,)) for end in form.ends]
        found = [before, after, last, *(_id(tokenizer, end) for end in ends)]
        stops = tuple(dict.fromkeys(number for number in found if number is not None))
        return InfillTokens(before, after, last, known.suffix_first, stops)
    raise RequestError("suffix", "the tokenizer of this model has no tokens to fill in the middle")


def fill_in_the_middle(
    tokenizer: Tokenizer, prefix: str, suffix: str, *, add_special_tokens: bool = True
) -> list[int]:
    """Token ids of the prompt whose answer is the text between `prefix` and `suffix`.

    With `add_special_tokens` it begins with the checkpoint's beginning-of-sequence token if its prompts do. Control
    tokens that the texts spell are plain text. Only the prefix may get the space that a SentencePiece vocabulary puts
    before a text.

    Raises RequestError naming `suffix` when the tokenizer has no such tokens, and as `Tokenizer.encode`.
    """
    tokens = infill_tokens(tokenizer)
    around = tokenizer.encode("") if add_special_tokens else []
    start = [number for number in around[:1] if number == tokenizer.bos_token_id]
    before, after = tokenizer.encode_guarded(prefix, ()), tokenizer.encode_inside(suffix)
    return start + tokens.around(before, after)


def _id(tokenizer: Tokenizer, token: str) -> int | None:
    return tokenizer.token_to_id(token) if token else None


@dataclass(frozen=True, slots=True, kw_only=True)
class InfillAsk:
    """A prefix and a suffix, other files of the project as pairs of name and text, and how the middle begins."""

    prefix: str
    suffix: str
    files: Sequence[tuple[str, str]] = ()
    opening: str = ""
    add_special_tokens: bool = True


class InfillPrompt(NamedTuple):
    """A prompt, and the tokens that end its middle beside end-of-sequence tokens."""

    token_ids: list[int]
    stop_ids: tuple[int, ...]


def infill_prompt(tokenizer: Tokenizer, ask: InfillAsk) -> InfillPrompt:
    """The prompt of an ask, as `fill_in_the_middle`. The other files come first, behind the tokens for a repository and
    its files where the tokenizer has them, else as plain text.
    """
    tokens = infill_tokens(tokenizer)
    between = fill_in_the_middle(tokenizer, ask.prefix, ask.suffix, add_special_tokens=ask.add_special_tokens)
    repository, file = (_first(tokenizer, names) for names in (_REPOSITORY, _FILE))
    begins = between[:1] if between[:1] == [tokenizer.bos_token_id] else []
    found = [*begins]
    if ask.files and repository is not None and file is not None:
        found += [repository, *tokenizer.encode_inside("project\n")]
        for name, text in ask.files:
            found += [file, *tokenizer.encode_inside(f"{name}\n{text}\n")]
        found += [file, *tokenizer.encode_inside("file\n")]
    else:
        for _, text in ask.files:
            found += tokenizer.encode_inside(f"{text}\n")
    opening = tokenizer.encode_inside(ask.opening) if ask.opening else []
    return InfillPrompt([*found, *between[len(begins) :], *opening], tokens.stop_ids)


def _first(tokenizer: Tokenizer, names: Sequence[str]) -> int | None:
    return next((number for name in names if (number := _id(tokenizer, name)) is not None), None)
