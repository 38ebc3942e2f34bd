"""A tokenizer that makes much of a little is refused when it is loaded, or its long texts are."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from quire.text.growth import MAX_GROWN_BYTES, Growth
from quire.text.tokenizer import Tokenizer
from quire.types import CheckpointError, RequestError

from .builders import byte_level, sentencepiece_bpe, unigram, word_piece

BOMB = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 1000}


def charsmap(longest: int) -> bytes:
    """SentencePiece's table of one mapping, which no text reaches."""
    trie = (0).to_bytes(4, "little")
    return len(trie).to_bytes(4, "little") + trie + b"x" * longest + b"\0"


def write(path: Path, **parts: object) -> Path:
    """A folder whose tokenizer.json has these parts; one that starts with an underscore stands after the model."""
    whole = json.loads(byte_level().to_str())
    late = {name.removeprefix("_"): parts.pop(name) for name in list(parts) if name.startswith("_")}
    for name in late:
        del whole[name]
    path.mkdir(exist_ok=True)
    (path / "tokenizer.json").write_text(json.dumps(whole | parts | late))
    return path


def sequence(*steps: object) -> dict[str, object]:
    return {"type": "Sequence", "normalizers": list(steps)}


@pytest.mark.parametrize(
    ("parts", "problem"),
    [
        ({"normalizer": sequence(BOMB, BOMB)}, "normalizer can make a text 1000000 times as long"),
        ({"normalizer": sequence(*[BOMB] * 200)}, "over a billion times as long"),
        (
            {"normalizer": {"normalizers": [{"pattern": {"String": "a"}, "content": "b" * 2000}]}},
            "2000 times",
        ),
        ({"_normalizer": sequence(BOMB, BOMB)}, "1000000 times as long"),
        ({"normalizer": {**BOMB, "pattern": {"Regex": "x*"}}}, "2001 times as long"),
        ({"normalizer": {**BOMB, "pattern": {"String": ""}}}, "2001 times as long"),
        ({"normalizer": {"type": "Prepend", "prepend": "a" * 2000}}, "2001 times as long"),
        ({"normalizer": sequence(*[{"type": "NFKD"}] * 4)}, "14641 times as long"),
        (
            {
                "normalizer": {
                    "type": "Precompiled",
                    "precompiled_charsmap": base64.b64encode(charsmap(5000)).decode(),
                }
            },
            "5000 times as long",
        ),
        (
            {
                "pre_tokenizer": {
                    "type": "Sequence",
                    "pretokenizers": [{"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True}]
                    * 20,
                }
            },
            "pre-tokenizer can make a text .* times as long",
        ),
        (
            {
                "decoder": {
                    "type": "Sequence",
                    "decoders": [{**BOMB, "pattern": {"String": "\u0120"}, "content": "\u0120" * 100}] * 3,
                }
            },
            "decoder can make a text 1000000 times as long",
        ),
        (
            {
                "post_processor": {
                    "type": "TemplateProcessing",
                    "single": [{"Sequence": {"id": "A", "type_id": 0}}] * 1000,
                    "pair": [
                        {"Sequence": {"id": "A", "type_id": 0}},
                        {"Sequence": {"id": "B", "type_id": 0}},
                    ],
                    "special_tokens": {},
                }
            },
            "post-processor repeats a text 1000 times",
        ),
        (
            {
                "post_processor": {
                    "type": "TemplateProcessing",
                    "single": [
                        {"SpecialToken": {"id": "x", "type_id": 0}},
                        {"Sequence": {"id": "A", "type_id": 0}},
                    ],
                    "pair": [
                        {"Sequence": {"id": "A", "type_id": 0}},
                        {"Sequence": {"id": "B", "type_id": 0}},
                    ],
                    "special_tokens": {"x": {"id": "x", "ids": [1] * 5000, "tokens": ["x"] * 5000}},
                }
            },
            "post-processor adds 5000 tokens",
        ),
    ],
)
def test_a_tokenizer_that_can_grow_a_text_without_sense_is_refused(tmp_path, parts, problem):
    with pytest.raises(CheckpointError, match=problem):
        Tokenizer.from_dir(write(tmp_path, **parts))


def test_escapes_in_the_key_hide_nothing(tmp_path):
    file = write(tmp_path, normalizer=sequence(BOMB, BOMB)) / "tokenizer.json"
    file.write_text(file.read_text().replace('"normalizer"', '"n\\u006frmalizer"'))
    with pytest.raises(CheckpointError, match="1000000 times as long"):
        Tokenizer.from_dir(tmp_path)


def test_added_tokens_are_normalized_when_they_are_read(tmp_path):
    """So what they could become is bounded before the library reads them."""
    long = [{"id": 900, "content": "a" * 100_000, "normalized": True, "special": False}]
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
    added = json.loads(byte_level().to_str())["added_tokens"] + [{**long[0], **flags}]
    with pytest.raises(CheckpointError, match="added tokens of 100058 characters are too long"):
        Tokenizer.from_dir(write(tmp_path, normalizer=BOMB, added_tokens=added))
    config = {"added_tokens_decoder": {"900": {"content": "a" * 100_000, "normalized": True}}}
    folder = write(tmp_path, normalizer={**BOMB, "content": "a" * 250})
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="added tokens of 100000 characters are too long"):
        Tokenizer.from_dir(tmp_path)


def test_a_text_that_could_become_too_long_is_refused_unseen(tmp_path):
    tokenizer = Tokenizer.from_dir(write(tmp_path, normalizer={**BOMB, "content": "a" * 250}))
    limit = MAX_GROWN_BYTES // 500  # ByteLevel doubles
    assert len(tokenizer.encode("b" * limit)) > 1000
    assert len(tokenizer.encode("a")) > 1
    for refused in (lambda text: tokenizer.encode(text), lambda text: tokenizer.encode_guarded(text, ())):
        with pytest.raises(RequestError, match=f"text: {limit + 1} bytes exceed the limit of {limit}"):
            refused("b" * (limit + 1))


def test_published_kinds_have_room():
    """The pipelines of T5 and XLM-R grow most: all their texts of 100,000 bytes pass."""
    text = "ab " * 33_000
    for backend in [
        byte_level(nfc=True),
        word_piece(),
        unigram(),
        *map(sentencepiece_bpe, ("normalizer", "first")),
    ]:
        assert Tokenizer(backend).encode(text)
    steps = [normalizers.Precompiled(charsmap(33)), normalizers.Replace(Regex(" {2,}"), " ")]
    xlm = normalizers.Sequence(steps).__getstate__()
    Growth(xlm, pre_tokenizers.Metaspace().__getstate__(), None, None).check(text)


_strings = st.text("a \u00e9\u2581", max_size=3)
_some = _strings.filter(len)  # the library loses count, and panics, after a pattern that matches nothing
_steps = st.one_of(
    st.builds(normalizers.Replace, _some | st.sampled_from(["a+", ".", "[^a]"]).map(Regex), _strings),
    st.builds(normalizers.Prepend, _some),
    st.sampled_from(
        [
            *(
                normalizers.NFC(),
                normalizers.NFD(),
                normalizers.NFKC(),
                normalizers.NFKD(),
                normalizers.Lowercase(),
            ),
            *(
                normalizers.BertNormalizer(),
                normalizers.ByteLevel(),
                normalizers.StripAccents(),
                normalizers.Nmt(),
            ),
        ]
    ),
)
_cuts = st.sampled_from(
    [
        pre_tokenizers.ByteLevel(add_prefix_space=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        pre_tokenizers.Metaspace(),
        pre_tokenizers.Metaspace(replacement="\U0001f600", split=False),
        pre_tokenizers.Whitespace(),
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.Split("a", "isolated"),
    ]
)
_text = st.text(
    st.sampled_from("a b1.\u0390\ufdfa\uac01\U0001d160\u0130\u3400\u00e9") | st.characters(codec="utf-8"),
    max_size=20,
)


@settings(max_examples=200)
@given(st.lists(_steps, max_size=3), st.lists(_cuts, max_size=3), _text)
def test_the_bound_holds_for_every_text(steps, cuts, text):
    normalizer, cut = normalizers.Sequence(steps), pre_tokenizers.Sequence(cuts)
    try:
        growth = Growth(normalizer.__getstate__(), cut.__getstate__(), None, None)
    except CheckpointError:
        return
    normalized = normalizer.normalize_str(text)
    size = len(text.encode())
    assert len(normalized.encode()) <= growth.normalizer * max(size, 1)
    words = cut.pre_tokenize_str(normalized)
    assert sum(len(word.encode()) for word, _ in words) <= growth.factor * max(size, 1)


def test_parts_of_the_library_that_do_not_grow_pass():
    backend = Backend(models.WordLevel({"a": 0}, unk_token="a"))
    for post in (
        processors.RobertaProcessing(("a", 0), ("a", 0)),
        processors.Sequence([processors.ByteLevel(), processors.BertProcessing(("a", 0), ("a", 0))]),
    ):
        backend.post_processor = post
        assert Tokenizer(backend).encode("a") == [0, 0, 0]
    for decoder in (
        decoders.CTC(),
        decoders.Sequence(
            [decoders.Replace("_", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip()]
        ),
    ):
        backend.decoder = decoder
        assert Tokenizer(backend).decode([0]) == "a"
