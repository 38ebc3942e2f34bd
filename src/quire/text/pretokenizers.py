"""How byte-level BPE tokenizers cut a text into words, by the name that GGUF files give each way.

BPE never merges across a cut, so ids depend on it. A way is what the tokenizer.json of the models of that name
does: expressions to split by, digits taken apart, Unicode normalization.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tokenizers import Regex, pre_tokenizers

_SPACES = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_ENGLISH = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


def _words(digits: str) -> str:
    """Contractions, letters with one leading sign, `digits`, signs, line ends, spaces."""
    return rf"{_ENGLISH}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*{_SPACES}"


def _cased(digits: str, contraction: str = "") -> str:
    """The same with a cut before a capital letter inside a word; paths keep their slashes."""
    lead = r"[^\r\n\p{L}\p{N}]?"
    return (
        rf"{lead}{_UPPER}*{_LOWER}+{contraction}|{lead}{_UPPER}+{_LOWER}*{contraction}"
        rf"|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*{_SPACES}"
    )


_LLAMA3 = _words(r"\p{N}{1,3}")
_QWEN2 = _words(r"\p{N}")
_GPT4O = _cased(r"\p{N}{1,3}", f"{_ENGLISH}?")
_TEKKEN = _cased(r"\p{N}")
_DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*" + _SPACES
)


@dataclass(frozen=True, slots=True)
class Words:
    """One way. `splits`: expressions that cut one after another, each match a word of its own; empty: GPT-2's.
    `digits` cuts every digit off first. `ignore_merges`: a word that is a token is not merged up to it.
    `add_bos`: a text starts with the beginning-of-sequence token unless the file says otherwise.
    """

    splits: tuple[str, ...] = ()
    digits: bool = False
    nfc: bool = False
    ignore_merges: bool = False
    add_bos: bool = False

    def pre_tokenizer(self) -> Any:
        steps: list[Any] = [pre_tokenizers.Split(Regex(split), "isolated") for split in self.splits]
        if self.digits:
            steps.append(pre_tokenizers.Digits(individual_digits=True))
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not self.splits))
        return steps[0] if len(steps) == 1 else pre_tokenizers.Sequence(steps)


_GPT2 = Words()
_DIGITS = Words(digits=True)
WORDS: dict[str, Words] = {
    "gpt-2": _GPT2, "mpt": _GPT2, "olmo": _GPT2, "jais": _GPT2, "phi-2": _GPT2,
    "smollm": _DIGITS, "starcoder": _DIGITS, "refact": _DIGITS, "codeshell": _DIGITS, "exaone": _DIGITS,
    "minerva-7b": _DIGITS, "command-r": Words(digits=True, nfc=True),
    "llama-bpe": Words((_LLAMA3,), ignore_merges=True, add_bos=True),
    "llama3": Words((_LLAMA3,), ignore_merges=True, add_bos=True),
    "llama-v3": Words((_LLAMA3,), ignore_merges=True, add_bos=True),
    "dbrx": Words((_LLAMA3,)), "smaug-bpe": Words((_LLAMA3,)), "chatglm-bpe": Words((_LLAMA3,)),
    "glm4": Words((_LLAMA3,)),
    "qwen2": Words((_QWEN2,), nfc=True), "deepseek-r1-qwen": Words((_QWEN2,)),
    "stablelm2": Words((_QWEN2,)), "hunyuan": Words((_QWEN2,)),
    "tekken": Words((_TEKKEN,), ignore_merges=True, add_bos=True),
    "gpt-4o": Words((_GPT4O,)), "llama4": Words((_GPT4O,), ignore_merges=True, add_bos=True),
    "deepseek-v3": Words((r"\p{N}{1,3}", r"[一-龥぀-ゟ゠-ヿ]+", _DEEPSEEK3)),
    "deepseek-coder": Words((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"[一-龥ࠀ-一가-퟿]+", r"\p{N}")),
}  # fmt: skip
