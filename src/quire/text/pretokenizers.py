"""Word expressions of byte-level BPE tokenizers, by their GGUF names.

BPE never merges across words, so ids depend on the split. An entry does what the tokenizer.json of those models does:
splitting by expressions, separating digits, Unicode normalization. The names are those of llama.cpp
(`tokenizer.ggml.pre`), except for embedding models, vocabularies that are not byte-level, EXAONE MoE and AFMoE.
"""

from __future__ import annotations

from typing import Any

from tokenizers import Regex, pre_tokenizers

from quire.records import dataclass

_SPACES = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_ENGLISH = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"


def _words(digits: str, letters: str = r"\p{L}") -> str:
    """Contractions, letters with one leading sign, `digits`, signs and line ends, spaces."""
    letter = f"[{letters}]" if letters.count("p") > 1 else letters
    return rf"{_ENGLISH}|[^\r\n\p{{L}}\p{{N}}]?{letter}+|{digits}| ?[^\s{letters}\p{{N}}]+[\r\n]*{_SPACES}"


def _cased(digits: str, contraction: str = "", ends: str = r"[\r\n/]*", without: str = "") -> str:
    """The same with a split before a capital letter inside a word; paths keep their slashes."""
    lead, upper, lower = r"[^\r\n\p{L}\p{N}]?", f"[{_UPPER}{without}]", f"[{_LOWER}{without}]"
    return (
        rf"{lead}{upper}*{lower}+{contraction}|{lead}{upper}+{lower}*{contraction}"
        rf"|{digits}| ?[^\s\p{{L}}\p{{N}}]+{ends}{_SPACES}"
    )


_LLAMA3 = _words(r"\p{N}{1,3}")
_QWEN2 = _words(r"\p{N}")
_QWEN35 = _words(r"\p{N}", letters=r"\p{L}\p{M}")
_SEED = rf"{_ENGLISH}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+{_SPACES}"
_BAILING = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_GPT4O = _cased(r"\p{N}{1,3}", f"{_ENGLISH}?")
_TEKKEN = _cased(r"\p{N}")
_KIMI = r"\p{Han}+|" + _cased(r"\p{N}{1,3}", f"{_ENGLISH}?", r"[\r\n]*", r"&&[^\p{Han}]")
_CJK = r"[一-龥぀-ゟ゠-ヿ]+"
_PUNCTUATED = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+"
)
_DEEPSEEK3 = _PUNCTUATED + r"[\r\n]*" + _SPACES
_HAN_HANGUL = r"[一-龥ࠀ-一가-퟿]+"
# Letters with case, as listed by the first DeepSeek models.
_CASED = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373"
    "\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a"
    "-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b"
    "-\u1d77\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d"
    "\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0"
    "-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a"
    "-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb"
    "-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00"
    "-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb"
    "\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)
_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"
_PARTS = r"[^\n]+|[\n]+"


@dataclass(frozen=True, slots=True)
class Words:
    """One word expression. `splits`: expressions applied in order, each match being a word; empty: GPT-2's. `digits`
    separates every digit first. `ignore_merges`: a word that is a token is taken without merging. `add_bos`: a text
    starts with the beginning-of-sequence token by default.
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


def _ways(names: str, words: Words) -> dict[str, Words]:
    return dict.fromkeys(names.split(), words)


_THREES = r"\p{N}{1,3}"
_V3 = Words((_THREES, _CJK, _DEEPSEEK3))
WORDS: dict[str, Words] = {
    **_ways("gpt-2 mpt olmo jais phi-2 trillion granite-docling gigachat a.x-4.0 mellum exaone4", Words()),
    **_ways("smollm starcoder refact codeshell exaone minerva-7b mellum2", Words(digits=True)),
    "command-r": Words(digits=True, nfc=True),
    **_ways(
        "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2",
        Words((_LLAMA3,), ignore_merges=True, add_bos=True),
    ),
    **_ways("dbrx smaug-bpe chatglm-bpe", Words((_LLAMA3,))),
    **_ways("glm4 glm5", Words((_LLAMA3,), ignore_merges=True)),
    **_ways("qwen2 f2llmv2", Words((_QWEN2,), nfc=True)),
    **_ways("deepseek-r1-qwen stablelm2 hunyuan kormo megrez solar-open grok-2", Words((_QWEN2,))),
    "qwen35": Words((_QWEN35,), nfc=True),
    "tekken": Words((_TEKKEN,), ignore_merges=True, add_bos=True),
    **_ways("gpt-4o kanana2 talkie minimax-m2", Words((_GPT4O,))),
    "llama4": Words((_GPT4O,), ignore_merges=True, add_bos=True),
    **_ways("tiny_aya cohere2moe", Words((r"\d{1,3}(?=(?:\d{3})*\b)", _GPT4O), nfc=True)),
    "kimi-k2": Words((_KIMI,)),
    **_ways("deepseek-v3 hunyuan-dense joyai-llm hy_v4", _V3),
    "spark2_5": Words((_THREES, _CJK, _PUNCTUATED + r"|[\r\n]|\s+(?!\S)|\s+", r"\p{N}")),
    "deepseek-coder": Words((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _HAN_HANGUL, r"\p{N}")),
    "deepseek-llm": Words((
        r"[\r\n]", rf"\s?[{_CASED}]+", r"\s?[!-/:-~！-／：-～‘-‟\u3000-。]+", r"\s+$", _HAN_HANGUL, r"\p{N}",
    )),
    "youtu": Words((
        r"[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|" + _CJK, _cased(r"\p{N}", f"{_ENGLISH}?"),
    ), ignore_merges=True),
    **_ways("bailingmoe bailingmoe2 llada-moe", Words((_BAILING,))),
    "seed-coder": Words((_SEED,)),
    "minicpm5": Words((_THREES, _words(r"\p{N}+")), ignore_merges=True),
    "laguna": Words((_PARTS, _QWEN2)),
    "ufakzeka": Words((_QWEN2.removeprefix(f"{_ENGLISH}|"),)),
    "superbpe": Words((r"\p{N}+", r"(?=(\d{3})+(?!\d))")),
    **_ways("bloom poro-chat gpt3-finnish", Words((_BLOOM,))),
    "viking": Words((_BLOOM, r"\p{N}")),
    "falcon": Words((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]")),
    "jais-2": Words((_LLAMA3.removesuffix(r"|\s+(?!\S)|\s+") + "".join(
        rf"|\s{{{count}}}(?!\S)" for count in (512, 256, 128, 64, 32, 16, 8, 4, "1,2")
    ) + r"|\s{1}",)),
    "default": Words((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
}  # fmt: skip
