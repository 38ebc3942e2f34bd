"""quire tokenize: the tokens of each kind of tokenizer are those of the library that trained it."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import sentencepiece
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from helpers.tokenizers import save_whole
from quire.cli.main import main

CORPUS = [f"the quick brown fox jumps over {n} lazy dogs; it's naïve, é and 你好!" for n in range(60)]
TEXTS = ["the quick brown fox", " it's  naïve, over 17 lazy dogs", "unseen words: zyxwv 🦊", "你好 the dogs!"]
Own = Callable[[str], list[int]]


def byte_level_bpe(folder: Path) -> Own:
    """As GPT-2's and Llama 3's, trained by the tokenizers library."""
    made = tokenizers.ByteLevelBPETokenizer()
    made.train_from_iterator(CORPUS, vocab_size=400, show_progress=False)
    made.save(str(folder / "tokenizer.json"))
    return lambda text: made.encode(text).ids


def word_piece(folder: Path) -> Own:
    """As BERT's, trained by the tokenizers library; a token before and after each text."""
    made = tokenizers.BertWordPieceTokenizer(lowercase=True)
    made.train_from_iterator(CORPUS, vocab_size=150, show_progress=False)
    made.save(str(folder / "tokenizer.json"))
    return lambda text: made.encode(text).ids


def sentencepiece_unigram(folder: Path) -> Own:
    """As XLM-RoBERTa's: a model of the sentencepiece library, written as tokenizer.json."""
    data = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS), model_writer=data, vocab_size=90, model_type="unigram",
        normalization_rule_name="identity", hard_vocab_limit=False, minloglevel=2,
    )  # fmt: skip
    own = sentencepiece.SentencePieceProcessor(model_proto=data.getvalue())
    pieces = [(own.id_to_piece(i), own.get_score(i)) for i in range(own.get_piece_size())]
    made = tokenizers.Tokenizer(models.Unigram(pieces, unk_id=own.unk_id(), byte_fallback=False))
    made.normalizer = normalizers.Sequence(
        [normalizers.Strip(), normalizers.Replace(tokenizers.Regex(" {2,}"), " ")]
    )
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Metaspace()
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", own.bos_id()), ("</s>", own.eos_id())]
    )
    made.add_special_tokens(["<s>", "</s>"])
    made.save(str(folder / "tokenizer.json"))
    return lambda text: [own.bos_id(), *own.encode(text), own.eos_id()]


@pytest.fixture(
    scope="module", params=[byte_level_bpe, word_piece, sentencepiece_unigram], ids=lambda f: f.__name__
)
def kind(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Own]:
    folder = tmp_path_factory.mktemp("tokenizer")
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 512, "hidden_size": 32,
              "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "rms_norm_eps": 1e-6,
              "max_position_embeddings": 64, "torch_dtype": "float32"}  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes(b"")  # no weight is read
    return folder, request.param(folder)


def printed(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    assert main(["tokenize", *map(str, words), "--quiet"]) == 0
    return capsys.readouterr().out


def test_tokens_are_those_of_the_trainer(kind: tuple[Path, Own], capsys: pytest.CaptureFixture[str]) -> None:
    folder, own = kind
    for text in TEXTS:
        found = json.loads(printed(capsys, folder, "--prompt", text, "--json"))
        assert found["tokens"] == own(text)
        assert (
            found["count"] == len(found["token_strs"]) == int(printed(capsys, folder, "-p", text, "--count"))
        )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_whole("llama3.1", tmp_path_factory.mktemp("llama"))


def test_lines_and_the_way_back(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = printed(capsys, folder, "-p", "Hi you", "--no-add-special-tokens").splitlines()
    ids = [line.split("\t")[0] for line in lines]
    assert "".join(json.loads(line.split("\t")[1]) for line in lines) == "Hi you"
    assert printed(capsys, folder, "--prompt-token-ids", ",".join(ids)) == "Hi you\n"
    assert json.loads(printed(capsys, folder, "--prompt-token-ids", ",".join(ids), "--json")) == {
        "prompt": "Hi you"
    }
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hi you"))
    assert printed(capsys, folder, "-p", "-", "--no-add-special-tokens").splitlines() == lines
    chat = json.loads(printed(capsys, folder, "-p", "Hi", "--chat", "--json"))
    assert chat["count"] > len(ids)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--prompt-token-ids", "1,x"], "prompt-token-ids: must be integers separated by commas"),
        (["--prompt-token-ids", "99999"], "prompt-token-ids: 99999 is not a token id below"),
        (["-p", "a", "--chat", "--no-add-special-tokens"], "chat: its template writes all special tokens"),
    ],
)
def test_mistakes(words: list[str], message: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tokenize", str(folder), *words]) == 1
    assert message in capsys.readouterr().err
