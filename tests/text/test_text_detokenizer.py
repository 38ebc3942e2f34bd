"""Streaming adds up to the whole decode, never shows half a character, and shows text as soon as it is
certain.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models

from quire.text.detokenizer import ByteLevelDetokenizer, PieceDetokenizer, WindowedDetokenizer
from quire.text.tokenizer import Tokenizer
from quire.text.vocabulary import recognise_decoder
from quire.types import CheckpointError

EXACT = ["gpt2", "qwen", "llama-new", "llama-old", "mistral", "gemma", "plain-file"]
WINDOWED = ["unigram", "word-piece", "suffix"]
bounded = settings(max_examples=60)


@pytest.fixture(scope="session")
def all_tokenizers(folders: dict[str, Path]) -> dict[str, Tokenizer]:
    return {kind: Tokenizer.from_dir(path) for kind, path in folders.items()}


@st.composite
def id_chunks(draw: st.DrawFn, size: int) -> list[list[int]]:
    """Random ids, cut into steps. Byte tokens (the low ids of SentencePiece styles) come often."""
    one = st.one_of(st.integers(0, size + 5), st.integers(0, min(size, 262)))
    return draw(st.lists(st.lists(one, max_size=4), max_size=25))


def streamed(tokenizer: Tokenizer, chunks: list[list[int]], skip: bool) -> list[str]:
    detokenizer = tokenizer.detokenizer(skip_special_tokens=skip)
    deltas = [detokenizer.push(chunk) for chunk in chunks]
    return [*deltas, detokenizer.finish()]


@pytest.mark.parametrize("examples", [40, pytest.param(1000, marks=pytest.mark.long)])
@pytest.mark.parametrize("skip", [True, False], ids=["skip", "keep"])
@pytest.mark.parametrize("kind", EXACT + WINDOWED)
def test_deltas_of_random_ids_add_up_to_the_decode(all_tokenizers, kind, skip, examples):
    tokenizer = all_tokenizers[kind]

    @settings(max_examples=examples)
    @given(id_chunks(tokenizer.vocab_size))
    def check(chunks):
        whole = tokenizer.decode(
            [token_id for chunk in chunks for token_id in chunk], skip_special_tokens=skip
        )
        assert "".join(streamed(tokenizer, chunks, skip)) == whole

    check()


@pytest.mark.parametrize("kind", EXACT + WINDOWED)
def test_deltas_of_real_text_hold_no_broken_character(all_tokenizers, kind):
    tokenizer = all_tokenizers[kind]

    @bounded
    @given(st.text(max_size=40), st.booleans())
    def check(sample, one_by_one):
        ids = tokenizer.encode(sample)
        chunks = [[token_id] for token_id in ids] if one_by_one else [ids]
        deltas = streamed(tokenizer, chunks, True)
        whole = tokenizer.decode(ids)
        assert "".join(deltas) == whole
        if "\ufffd" not in whole:
            assert not any("\ufffd" in delta for delta in deltas)

    check()


@pytest.mark.parametrize("kind", EXACT)
def test_the_library_is_not_needed_for_the_usual_kinds(all_tokenizers, kind):
    detokenizer = all_tokenizers[kind].detokenizer()
    assert isinstance(detokenizer, ByteLevelDetokenizer | PieceDetokenizer)


@pytest.mark.parametrize("kind", WINDOWED)
def test_the_window_keeps_few_tokens(all_tokenizers, kind):
    tokenizer = all_tokenizers[kind]
    detokenizer = tokenizer.detokenizer()
    assert isinstance(detokenizer, WindowedDetokenizer)
    for token_id in tokenizer.encode("the quick brown fox jumps over a lazy dog " * 20):
        detokenizer.push([token_id])
        assert len(detokenizer._ids) <= 40


@pytest.mark.parametrize("kind", EXACT + WINDOWED)
def test_text_comes_out_with_its_token(all_tokenizers, kind):
    """Nothing is held without reason: after each token of plain words the text so far is out."""
    tokenizer = all_tokenizers[kind]
    ids = tokenizer.encode("the quick brown fox", add_special_tokens=False)
    detokenizer = tokenizer.detokenizer()
    shown = ""
    for count, token_id in enumerate(ids, 1):
        shown += detokenizer.push([token_id])
        assert shown == tokenizer.decode(ids[:count])


@pytest.mark.parametrize("kind", EXACT + WINDOWED)
def test_a_primed_detokenizer_continues_the_prompt(all_tokenizers, kind):
    """decode(prompt + output) = decode(prompt) + deltas, spaces at the seam included."""
    tokenizer = all_tokenizers[kind]
    ids = tokenizer.encode("the quick brown fox jumps over a lazy dog", add_special_tokens=False)
    for cut in range(len(ids) + 1):
        detokenizer = tokenizer.detokenizer()
        detokenizer.prime(ids[:cut])
        text = detokenizer.push(ids[cut:]) + detokenizer.finish()
        assert tokenizer.decode(ids[:cut]) + text == tokenizer.decode(ids)


def test_a_character_comes_out_with_its_last_byte(all_tokenizers):
    tokenizer = all_tokenizers["gpt2"]
    ids = tokenizer.encode("\U0001f9ff")  # not in the training text: bytes
    assert len(ids) >= 2
    assert streamed(tokenizer, [[token_id] for token_id in ids], True) == [
        "",
        *[""] * (len(ids) - 2),
        "\U0001f9ff",
        "",
    ]


def test_invalid_bytes_follow_the_library(all_tokenizers):
    """Byte level: one U+FFFD a maximal invalid part. SentencePiece style: one a byte for the whole run."""
    tokenizer = all_tokenizers["mistral"]
    run = [tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in (0x41, 0xF0, 0x9F, 0x98)]
    word = tokenizer.encode("the", add_special_tokens=False)
    assert streamed(tokenizer, [[token_id] for token_id in run] + [word], True) == [
        *[""] * 4,
        "\ufffd" * 4 + " the",
        "",
    ]
    assert streamed(tokenizer, [run], True) == ["", "\ufffd" * 4]
    level = all_tokenizers["gpt2"]
    by_bytes = {level.token_bytes(token_id): token_id for token_id in range(level.vocab_size)}
    ids = [by_bytes[bytes([byte])] for byte in (0x41, 0xF0, 0x9F, 0x98, 0x42, 0xFF)]
    assert "".join(streamed(level, [ids], True)) == level.decode(ids) == "A\ufffdB\ufffd"


def test_every_raw_byte_sequence_decodes_like_the_library(all_tokenizers):
    level, piece = all_tokenizers["gpt2"], all_tokenizers["gemma"]
    of_level = {level.token_bytes(token_id): token_id for token_id in range(level.vocab_size)}
    byte = st.one_of(
        st.integers(0, 255), st.sampled_from([0xC3, 0xE0, 0xED, 0xF0, 0xF4, 0x80, 0x9F, 0xA0, 0xBF, 0x90])
    )

    @settings(max_examples=300)
    @given(st.lists(byte, max_size=12))
    def check(values):
        for tokenizer, ids in (
            (level, [of_level[bytes([value])] for value in values]),
            (piece, [piece.token_to_id(f"<0x{value:02X}>") for value in values]),
        ):
            assert "".join(streamed(tokenizer, [[token_id] for token_id in ids], True)) == tokenizer.decode(
                ids
            )

    check()


# -- which decoders are taken apart ----------------------------------------------------------------

REPLACE = decoders.Replace("▁", " ")
RECOGNISED = {
    "byte-level": decoders.ByteLevel(),
    "sequence": decoders.Sequence([decoders.ByteLevel()]),
    "nested": decoders.Sequence([decoders.Sequence([REPLACE, decoders.ByteFallback()]), decoders.Fuse()]),
    "no-fuse": decoders.Sequence([REPLACE, decoders.ByteFallback()]),
    "bytes-only": decoders.ByteFallback(),
    "two-strips": decoders.Sequence(
        [REPLACE, decoders.ByteFallback(), decoders.Fuse(), decoders.Strip("x", 2, 0)]
    ),
    "two-replaces": decoders.Sequence(
        [REPLACE, decoders.Replace("e", "éé"), decoders.ByteFallback(), decoders.Fuse()]
    ),
}
LEFT_TO_THE_LIBRARY = {
    "none": None,
    "metaspace": decoders.Metaspace(),
    "strip-each": decoders.Sequence([REPLACE, decoders.ByteFallback(), decoders.Strip(" ", 1, 0)]),
    "replace-late": decoders.Sequence([decoders.ByteFallback(), REPLACE]),
    "bytes-then-metaspace": decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()]),
}


@pytest.mark.parametrize("name", [*RECOGNISED, *LEFT_TO_THE_LIBRARY])
def test_any_pipeline_streams_the_decoded_text(name):
    tokens = [
        "▁",
        "▁the",
        "the",
        "x",
        "▁x",
        "e▁",
        "é",
        "Ġ",
        "Ã",
        "©",
        " ",
        "xx",
        "<0x+1>",
        "<0xé>",
        "��",
        "a b",
    ]
    tokens += [f"<0x{byte:02X}>" for byte in (0x41, 0x20, 0xC3, 0xA9, 0xF0, 0x9F, 0x98, 0x80, 0xFF)]
    backend = tokenizers.Tokenizer(
        models.WordLevel({token: index for index, token in enumerate(tokens)}, "x")
    )
    decoder = {**RECOGNISED, **LEFT_TO_THE_LIBRARY}[name]
    if decoder is not None:
        backend.decoder = decoder
    backend.add_special_tokens(["<|special|>"])
    assert (recognise_decoder(None if decoder is None else decoder.__getstate__()) is not None) == (
        name in RECOGNISED
    )
    tokenizer = Tokenizer(backend)

    @bounded
    @given(st.lists(st.lists(st.integers(0, len(tokens)), max_size=3), max_size=30), st.booleans())
    def check(chunks, skip):
        whole = tokenizer.decode(
            [token_id for chunk in chunks for token_id in chunk], skip_special_tokens=skip
        )
        assert "".join(streamed(tokenizer, chunks, skip)) == whole

    check()


def test_a_panic_of_the_library_is_a_checkpoint_error():
    backend = tokenizers.Tokenizer(models.WordLevel({"": 0, "x": 1}, "x"))
    backend.decoder = decoders.Strip(" ", 0, 1)  # the library indexes before the start of an empty token
    tokenizer = Tokenizer(backend)
    assert recognise_decoder(backend.decoder.__getstate__()) is None
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        tokenizer.decode([0])


def test_a_prompt_that_ends_inside_a_character_does_not_lose_it(all_tokenizers):
    tokenizer = all_tokenizers["mistral"]
    detokenizer = tokenizer.detokenizer()
    detokenizer.prime([tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in (0xF0, 0x9F)])
    rest = [tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in (0x98, 0x80)]
    assert detokenizer.push(rest) + detokenizer.finish() == "😀"
