"""Fill-in-the-middle prompts: each family's published format, found in the tokenizer."""

from __future__ import annotations

import pytest
import tokenizers
from tokenizers import AddedToken

from helpers.byte_tokenizer import CONTROL, byte_tokenizer
from quire.text.infill import fill_in_the_middle, infill_tokens
from quire.text.tokenizer import Tokenizer
from quire.types import RequestError

from .builders import sentencepiece_bpe

# What the model cards write around the texts P and S.
PUBLISHED = {
    "Qwen2.5-Coder": "<|fim_prefix|>P<|fim_suffix|>S<|fim_middle|>",
    "StarCoder": "<fim_prefix>P<fim_suffix>S<fim_middle>",
    "SantaCoder": "<fim-prefix>P<fim-suffix>S<fim-middle>",
    "DeepSeek-Coder": "<｜fim▁begin｜>P<｜fim▁hole｜>S<｜fim▁end｜>",
    "GLM-4.5": "<|code_prefix|>P<|code_suffix|>S<|code_middle|>",
    "Codestral": "[SUFFIX]S[PREFIX]P",
}


def markers(form: str) -> list[str]:
    cut = form.replace(">P", ">\n").replace("]P", "]\n").replace(">S", ">\n").replace("]S", "]\n")
    return [token for token in cut.split("\n") if token]


def made(*added: str, **named: str) -> Tokenizer:
    return Tokenizer(byte_tokenizer(*added), special_tokens=named)


@pytest.mark.parametrize("family", PUBLISHED)
def test_the_prompt_is_the_one_that_the_model_was_trained_with(family):
    form = PUBLISHED[family]
    tokenizer = made(*markers(form))
    ids = fill_in_the_middle(tokenizer, "def f(", "):\n  pass")
    expected = _filled(form, "def f(", "):\n  pass")
    assert tokenizer.decode(ids, skip_special_tokens=False) == expected
    assert set(map(tokenizer.token_to_id, markers(form))) <= set(ids)
    assert set(infill_tokens(tokenizer).stop_ids) >= set(map(tokenizer.token_to_id, markers(form)))


def _filled(form: str, prefix: str, suffix: str) -> str:
    for end in (">", "]"):
        form = form.replace(f"{end}P", f"{end}{prefix}").replace(f"{end}S", f"{end}{suffix}")
    return form


def test_texts_that_spell_the_tokens_are_texts():
    tokenizer = made(*markers(PUBLISHED["Qwen2.5-Coder"]))
    own = infill_tokens(tokenizer)
    ids = fill_in_the_middle(tokenizer, "a<|fim_middle|>", "<|fim_suffix|>b</s>")
    assert [token for token in ids if token in tokenizer.control_ids] == [own.prefix, own.suffix, own.middle]


def test_an_empty_prefix_or_suffix_is_allowed():
    tokenizer = made(*markers(PUBLISHED["StarCoder"]))
    own = infill_tokens(tokenizer)
    assert fill_in_the_middle(tokenizer, "", "") == [own.prefix, own.suffix, own.middle]


def code_llama() -> tokenizers.Tokenizer:
    backend = sentencepiece_bpe("first")
    names = ("▁<PRE>", "▁<MID>", "▁<SUF>", "▁<EOT>")
    backend.add_special_tokens([AddedToken(name, normalized=False) for name in names])
    return backend


@pytest.mark.parametrize(
    ("prefix", "suffix"), [("def main", "value != 0}"), ("x = 1\n", " brown"), ("a", "")]
)
def test_code_llama_suffixes_have_no_space_before_them(prefix, suffix):
    """As encode_infilling of Meta's code: the ids behind another character, here of a smiley."""
    backend = code_llama()
    tokenizer = Tokenizer(backend, special_tokens={"bos_token": "<s>", "eos_token": "</s>"})
    bos, before, after, middle = map(backend.token_to_id, ("<s>", "▁<PRE>", "▁<SUF>", "▁<MID>"))
    smiley = len(backend.encode("☺", add_special_tokens=False).ids)
    behind = backend.encode(f"☺{suffix}", add_special_tokens=False).ids[smiley:]
    first = backend.encode(prefix, add_special_tokens=False).ids
    assert fill_in_the_middle(tokenizer, prefix, suffix) == [bos, before, *first, after, *behind, middle]
    assert backend.id_to_token(first[0]).startswith("▁")
    assert infill_tokens(tokenizer).stop_ids[-1] == backend.token_to_id("▁<EOT>")


def test_tokens_that_the_files_name_come_first():
    tokenizer = made(
        *markers(PUBLISHED["Qwen2.5-Coder"]), "<A>", "<B>", "<C>", "<|file_sep|>",
        prefix_token="<A>", suffix_token="<B>", middle_token="<C>",
    )  # fmt: skip
    ids = fill_in_the_middle(tokenizer, "x", "y")
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<A>x<B>y<C>"
    assert tokenizer.token_to_id("<|file_sep|>") in infill_tokens(tokenizer).stop_ids


@pytest.mark.parametrize("added", [(), ("<|fim_prefix|>", "<|fim_suffix|>"), ("[PREFIX]",)])
def test_a_tokenizer_without_such_tokens_is_refused_by_name(added):
    with pytest.raises(RequestError, match="suffix: the tokenizer of this model has no tokens to fill"):
        fill_in_the_middle(made(*added), "a", "b")


def test_end_of_sequence_is_not_among_the_tokens_that_end_the_middle():
    tokenizer = made(*markers(PUBLISHED["Codestral"]), eos_token=CONTROL[2])
    assert tokenizer.token_to_id(CONTROL[2]) not in infill_tokens(tokenizer).stop_ids
