"""The tokenizer against transformers' AutoTokenizer on the same folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken
from transformers import AutoTokenizer

from quire.text.tokenizer import Tokenizer
from quire.text.tokenizer_files import LoadBudget, check_regex
from quire.types import CheckpointError, RequestError

from .builders import QWEN_SPLIT, byte_level, sentencepiece_bpe, write_folder

KINDS = [
    "gpt2",
    "qwen",
    "llama-new",
    "llama-old",
    "mistral",
    "gemma",
    "plain-file",
    "unigram",
    "word-piece",
    "suffix",
]
SPECIAL_TEXTS = [
    "<|im_start|>",
    "<|im_end|>",
    "<|endoftext|>",
    "<tool_call>",
    "<s>",
    "</s>",
    "[INST]",
    "[/INST]",
    "▁",
]

text = st.lists(
    st.one_of(
        st.text(max_size=12),
        st.sampled_from(
            [*SPECIAL_TEXTS, " ", "  ", "\n", "\t", "\0", "the quick", "é", "👍🏽", "👩‍👩‍👧", "<0x41>"]
        ),
    ),
    max_size=8,
).map("".join)
bounded = settings(max_examples=60)


@pytest.fixture(scope="session")
def pairs(folders: dict[str, Path]) -> dict[str, tuple[Tokenizer, object]]:
    return {
        kind: (Tokenizer.from_dir(path), AutoTokenizer.from_pretrained(str(path)))
        for kind, path in folders.items()
    }


@pytest.mark.parametrize("kind", KINDS)
def test_encode_and_decode_equal_transformers(pairs, kind):
    ours, theirs = pairs[kind]

    @bounded
    @given(text, st.booleans())
    def check(sample, add):
        ids = theirs.encode(sample, add_special_tokens=add)
        assert ours.encode(sample, add_special_tokens=add) == ids
        for skip in (False, True):
            expected = theirs.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
            assert ours.decode(ids, skip_special_tokens=skip) == expected

    check()


@pytest.mark.parametrize("kind", KINDS)
def test_decode_of_random_ids_equals_transformers(pairs, kind):
    ours, theirs = pairs[kind]

    @bounded
    @given(st.lists(st.integers(0, ours.vocab_size + 5), max_size=30), st.booleans())
    def check(ids, skip):
        expected = theirs.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
        assert ours.decode(ids, skip_special_tokens=skip) == expected

    check()


@pytest.mark.parametrize("kind", KINDS)
def test_sizes_and_named_tokens_equal_transformers(pairs, kind):
    ours, theirs = pairs[kind]
    assert ours.vocab_size == len(theirs)
    assert ours.highest_id == max(theirs.get_vocab().values())
    assert ours.special_tokens == theirs.special_tokens_map
    assert (ours.bos_token_id, ours.eos_token_id) == (theirs.bos_token_id, theirs.eos_token_id)
    everything = list(range(ours.vocab_size))
    assert ours.pieces(everything) == theirs.convert_ids_to_tokens(everything)
    assert set(theirs.all_special_ids) <= ours.special_ids


@pytest.mark.parametrize("kind", ["gpt2", "qwen", "llama-new", "mistral", "gemma", "plain-file"])
def test_special_text_can_be_encoded_as_text(pairs, kind):
    ours, theirs = pairs[kind]

    @bounded
    @given(text)
    def check(sample):
        ids = ours.encode(sample, add_special_tokens=False, parse_special=False)
        added = set(theirs.added_tokens_decoder)
        assert not added & set(ids) - {theirs.unk_token_id}
        if not any(token in sample for token in theirs.added_tokens_encoder):
            assert ids == theirs.encode(sample, add_special_tokens=False)

    check()


def test_special_text_as_text_still_gets_its_beginning_token(pairs):
    ours, theirs = pairs["mistral"]
    ids = ours.encode("a [INST] b", parse_special=False)
    assert ids[0] == theirs.bos_token_id
    assert ours.token_to_id("[INST]") not in ids
    assert ours.decode(ids) == "a [INST] b"


@pytest.mark.parametrize("kind", ["gpt2", "qwen", "llama-new", "llama-old", "mistral", "gemma"])
def test_guarded_encoding_reads_control_tokens_in_own_spans_only(pairs, kind):
    ours, _ = pairs[kind]
    control, end = ("[INST]", "</s>") if kind not in ("gpt2", "qwen") else ("<|im_start|>", "<|im_end|>")
    chat = f"{control} say {end} and {control}{end} now{end}tail"
    own = ((0, len(control)), (chat.rindex(end), chat.rindex("tail")))
    ids = ours.encode_guarded(chat, own)
    added = [token_id for token_id in ids if token_id in ours.special_ids]
    assert added == [ours.token_to_id(control), ours.token_to_id(end)]
    assert ours.decode(ids, skip_special_tokens=False).replace(" ", "") == chat.replace(" ", "")
    assert ours.encode_guarded(chat, ((0, len(chat)),)) == ours.encode(chat, add_special_tokens=False)
    # The stretch between the two real control tokens is tokenized in one piece, as text in a text.
    inner = ids[ids.index(added[0]) + 1 : ids.index(added[1])]
    assert "".join(ours.pieces(inner)).count("▁▁") == 0


@pytest.mark.parametrize("by_role", [False, True], ids=["no-role", "role"])
@pytest.mark.parametrize("in_config", [None, False, True], ids=["absent", "ordinary", "special"])
@pytest.mark.parametrize("in_file", [False, True], ids=["file-ordinary", "file-special"])
def test_a_token_is_special_that_is_so_in_any_file(tmp_path, in_file, in_config, by_role):
    """Gemma 3's <mask>: special by its role, or in one of two files that disagree."""
    backend = byte_level()
    (backend.add_special_tokens if in_file else backend.add_tokens)(["<mask>"])
    number = backend.token_to_id("<mask>")
    config: dict[str, object] = {"mask_token": "<mask>"} if by_role else {}
    if in_config is not None:
        flags = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
        config["added_tokens_decoder"] = {str(number): {"content": "<mask>", "special": in_config, **flags}}
    folder = write_folder(tmp_path, backend, tokenizer_class="PreTrainedTokenizerFast", **config)
    ours, theirs = Tokenizer.from_dir(folder), AutoTokenizer.from_pretrained(folder)
    ids = [*ours.encode("a b"), number, *ours.encode(" c")]
    detokenizer = ours.detokenizer()
    expected = theirs.decode(ids, skip_special_tokens=True)
    assert ours.decode(ids) == detokenizer.push(ids) + detokenizer.finish() == expected
    assert ("<mask>" in expected) == (not (in_file or in_config or by_role))
    assert ours.decode(ids, skip_special_tokens=False) == theirs.decode(ids) == "a b<mask> c"


def test_the_bytes_of_all_tokens(pairs):
    for ours, _ in pairs.values():
        size = ours.highest_id + 3  # an engine's vocabulary may be larger
        found, control = ours.all_bytes(size), ours.control_ids
        assert len(found) == size
        for token_id in range(size):
            assert found[token_id] == (b"" if token_id in control else ours.token_bytes(token_id))
        assert control


def test_token_bytes_spell_the_text(pairs):
    for kind in ("gpt2", "qwen"):
        ours, _ = pairs[kind]
        sample = "Größe 你好 👍🏽 <|im_end|>\0"
        ids = ours.encode(sample)
        assert b"".join(map(ours.token_bytes, ids)) == sample.encode()
    ours, _ = pairs["mistral"]
    ids = ours.encode("Größe 你好 👍🏽 𐍈", add_special_tokens=False)
    assert b"".join(map(ours.token_bytes, ids)) == " Größe 你好 👍🏽 𐍈".encode()
    assert ours.token_bytes(ours.token_to_id("<0x0A>")) == b"\n"
    assert ours.token_bytes(ours.vocab_size + 7) == b""
    with pytest.raises(RequestError, match="token_id"):
        ours.token_bytes(-1)


def test_lone_surrogates_and_bad_ids_are_request_errors(pairs):
    ours, _ = pairs["gpt2"]
    with pytest.raises(RequestError, match="surrogate"):
        ours.encode("a\ud800b")
    for bad in (-1, 2**32):
        with pytest.raises(RequestError, match="token_ids"):
            ours.decode([bad])


def test_tokens_declared_only_in_the_config_are_added_like_transformers_does(tmp_path):
    backend = byte_level(QWEN_SPLIT)
    size = backend.get_vocab_size()
    folder = write_folder(
        tmp_path,
        backend,
        eos_token="<|im_end|>",
        pad_token="<|pad|>",
        image_token="<|image|>",
        extra_special_tokens=["<|extra|>"],
        tokenizer_class="PreTrainedTokenizerFast",
        added_tokens_decoder={
            str(size): {"content": "<think>", "special": False, "normalized": False, "lstrip": False},
            str(size + 1): {"content": "<|late|>", "special": True, "normalized": False, "rstrip": True},
        },
    )
    ours, theirs = Tokenizer.from_dir(folder), AutoTokenizer.from_pretrained(str(folder))
    sample = "a<think>b<|late|>  c<|pad|><|image|><|extra|>d"
    assert ours.encode(sample) == theirs.encode(sample)
    assert ours.special_tokens == theirs.special_tokens_map
    assert ours.decode(ours.encode(sample)) == theirs.decode(theirs.encode(sample), skip_special_tokens=True)


def test_special_tokens_map_is_read_when_the_config_declares_no_added_tokens(tmp_path):
    folder = write_folder(tmp_path, sentencepiece_bpe("first"), tokenizer_class="PreTrainedTokenizerFast")
    token = {"content": "</s>", "lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
    (folder / "special_tokens_map.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": token}))
    (folder / "added_tokens.json").write_text(json.dumps({"<extra>": 704}))
    ours, theirs = Tokenizer.from_dir(folder), AutoTokenizer.from_pretrained(str(folder))
    assert ours.special_tokens == theirs.special_tokens_map == {"bos_token": "<s>", "eos_token": "</s>"}
    assert ours.encode("a <extra> b") == theirs.encode("a <extra> b")


def test_truncation_and_padding_in_the_file_do_not_cut_prompts(tmp_path):
    backend = byte_level()
    backend.enable_truncation(max_length=3)
    backend.enable_padding(length=50)
    ours = Tokenizer.from_dir(write_folder(tmp_path, backend))
    assert ours.decode(ours.encode("the quick brown fox jumps")) == "the quick brown fox jumps"


@pytest.mark.parametrize(
    ("model_type", "merged"),
    [("llama", True), ("mistral", False), (None, True)],
    ids=["llama", "mistral", "none"],
)
def test_llama_class_pipeline_follows_the_model_type(tmp_path, model_type, merged):
    backend = sentencepiece_bpe("normalizer")
    folder = write_folder(
        tmp_path,
        backend,
        tokenizer_class="LlamaTokenizer",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
    )
    if model_type:
        (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    ours, theirs = Tokenizer.from_dir(folder), AutoTokenizer.from_pretrained(str(folder))
    sample = "the</s>the fox [INST]quick[/INST] dog"
    assert ours.encode(sample) == theirs.encode(sample)
    assert (ours.encode(sample) != list(backend.encode(sample).ids)) == merged


# -- templates in the folder ---------------------------------------------------------------------------------


def test_chat_templates_come_from_every_place_they_live(tmp_path):
    def templates(**config: object) -> dict[str, str]:
        return Tokenizer.from_dir(write_folder(tmp_path, byte_level(), **config)).chat_templates

    assert templates() == {}
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "from json"}))
    assert templates() == {"default": "from json"}
    assert templates(chat_template="config") == {"default": "config"}
    named = [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}]
    assert templates(chat_template=named) == {"default": "d", "tool_use": "t"}
    (tmp_path / "chat_template.jinja").write_text("file")
    assert templates(chat_template="config") == {"default": "file"}
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    assert templates(chat_template="config") == {"default": "file", "tool_use": "tools"}


# -- untrusted files -------------------------------------------------------------------------------


def test_missing_and_foreign_vocabularies_are_refused_by_name(tmp_path):
    with pytest.raises(CheckpointError, match="does not exist"):
        Tokenizer.from_dir(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json"):
        Tokenizer.from_dir(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"\n\x0e")
    with pytest.raises(CheckpointError, match=r"SentencePiece model \(tokenizer\.model\).*save_pretrained"):
        Tokenizer.from_dir(tmp_path)


def test_a_file_over_the_budget_is_refused_before_it_is_read(tmp_path):
    write_folder(tmp_path, byte_level())
    with pytest.raises(CheckpointError, match=r"tokenizer\.json has \d+ bytes, more than the limit of 1000"):
        Tokenizer.from_dir(tmp_path, LoadBudget(tokenizer_bytes=1000))
    with pytest.raises(CheckpointError, match="JSON elements, more than the limit of 100"):
        Tokenizer.from_dir(tmp_path, LoadBudget(commas=100))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "x" * 2000}))
    with pytest.raises(CheckpointError, match="chat template 'default' has 2000 characters"):
        Tokenizer.from_dir(tmp_path, LoadBudget(template_bytes=1000))
    (tmp_path / "tokenizer_config.json").write_text("[" * 100_000)
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json"):
        Tokenizer.from_dir(tmp_path)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{}",
        b"\xff\xfe",
        b'{"model": {"type": "BPE", "vocab": {"a": -1}, "merges": []}}',
        b'{"model": {"type": "BPE", "vocab": {"a": 0}, "merges": [["a", "b"]]}}',
        b'{"added_tokens": [], "normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}, '
        b'"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}}',
    ],
    ids=["empty", "object", "binary", "negative", "merge", "panic"],
)
def test_malformed_tokenizer_json_is_a_checkpoint_error(tmp_path, content):
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        Tokenizer.from_dir(tmp_path)


def test_absurd_ids_cost_nothing_and_are_refused(tmp_path):
    content = b'{"added_tokens": [], "model": {"type": "BPE", "vocab": {"a": 4000000000}, "merges": []}}'
    (tmp_path / "tokenizer.json").write_bytes(content)
    tokenizer = Tokenizer.from_dir(tmp_path)
    assert (tokenizer.vocab_size, tokenizer.highest_id) == (1, 4_000_000_000)
    assert tokenizer.pieces([4_000_000_000]) == ["a"]


@pytest.mark.parametrize(
    "config",
    [
        {"eos_token": 5},
        {"eos_token": {"text": "x"}},
        {"added_tokens_decoder": []},
        {"added_tokens_decoder": {"x": {"content": "a"}}},
        {"added_tokens_decoder": {"1": {"content": "a", "special": "yes"}}},
        {"extra_special_tokens": "abc"},
        {"chat_template": 7},
        {"chat_template": [{"name": "default"}]},
    ],
)
def test_malformed_config_is_a_checkpoint_error(tmp_path, config):
    write_folder(tmp_path, byte_level(), **config)
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json"):
        Tokenizer.from_dir(tmp_path)


BACKTRACKING = [
    r"(a+)+$",
    r"(a|aa)*b",
    r"(\w*)*!",
    r"((a?){2,})*c",
    r"(?:x+y*)+z",
    r"(a{1,5})+",
    r"(.|\n)*x",
    r"((a+)b)*",
]
EXPLODING = [r"a{100000}", r"(a{100}){100}", r"((a{20}){20}){20}", "a" * 9000]
PUBLISHED = [
    QWEN_SPLIT,
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+"
    r"|\s++$|\s*[\r\n]|\s+(?!\S)|\s",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*",
    r" ?[^(\s|[.,!?…。，、।۔،])]+",
    r"\d{1,3}(?=(?:\d{3})*\b)|[^\W\d]+",
    r"[一-龥぀-ゟ゠-ヿ]+",
    r"\s?\p{L}+|[^a&&[^b]]+|[]x]+|\p{N}",
]


@pytest.mark.parametrize("pattern", BACKTRACKING + EXPLODING)
def test_dangerous_patterns_are_refused(pattern):
    with pytest.raises(CheckpointError, match="regular expression"):
        check_regex(pattern)


@pytest.mark.parametrize("pattern", PUBLISHED)
def test_published_patterns_pass(pattern):
    check_regex(pattern)


@pytest.mark.parametrize("key", ["Regex", "\\u0052egex"])
def test_a_pattern_is_found_wherever_and_however_it_is_written(tmp_path, key):
    write_folder(tmp_path, byte_level(QWEN_SPLIT))
    file = tmp_path / "tokenizer.json"
    data = json.loads(file.read_text())
    data["pre_tokenizer"]["pretokenizers"][0]["pattern"] = {"Regex": "(a+)+$"}
    file.write_text(json.dumps(data).replace('"Regex"', f'"{key}"'))
    with pytest.raises(CheckpointError, match="backtrack"):
        Tokenizer.from_dir(tmp_path)


def test_added_tokens_never_lose_their_flags():
    token = AddedToken("<x>", rstrip=True, special=True)
    backend = byte_level()
    backend.add_special_tokens([token])
    ours = Tokenizer(backend)
    assert ours.encode("a<x>   b") == [*ours.encode("a"), ours.token_to_id("<x>"), *ours.encode("b")]
