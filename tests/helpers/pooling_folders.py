"""Folders of tiny models with pooling, with a WordPiece tokenizer and the files of sentence-transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

from helpers.checkpoints import VOCAB
from helpers.encoders import TinyEncoder, save_encoder, tiny_encoder

CLS, SEP = 2, 3  # no padding token of any of the models
_LETTERS = "abcdefghijklmnopqrstuvwxyz"


def word_tokenizer() -> Tokenizer:
    """[CLS] words [SEP], or [CLS] words [SEP] words [SEP] with segments; words become single letters."""
    tokens = [
        "[PAD]",
        "<pad>",
        "[CLS]",
        "[SEP]",
        "[UNK]",
        *_LETTERS,
        *(f"##{letter}" for letter in _LETTERS),
        *".,?!:",
    ]
    assert len(tokens) <= VOCAB
    made = Tokenizer(models.WordPiece({token: i for i, token in enumerate(tokens)}, unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer()
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", CLS), ("[SEP]", SEP)],
    )
    made.add_special_tokens(["[PAD]", "<pad>", "[CLS]", "[SEP]", "[UNK]"])
    return made


def pooling_folder(model: TinyEncoder | str, folder: Path, **sentences: Any) -> tuple[Path, Any]:
    """`folder` with a tiny model and tokenizer, and transformers' model. `sentences`: pooling_mode, prompts, …"""
    folder.mkdir(parents=True, exist_ok=True)
    theirs = save_encoder(tiny_encoder(model) if isinstance(model, str) else model, folder)
    word_tokenizer().save(str(folder / "tokenizer.json"))
    if sentences:
        write_sentence_files(folder, **sentences)
    return folder, theirs


def write_sentence_files(
    folder: Path, mode: str = "mean_tokens", prompts: dict[str, str] | None = None, default: str | None = None,
    length: int = 0,
) -> None:  # fmt: skip
    """The files of sentence-transformers for a mode of pooling and a normalised vector."""
    kinds = ("Transformer", "Pooling", "Normalize")
    modules = [
        {
            "idx": i,
            "name": str(i),
            "path": "" if i == 0 else f"{i}_{kind}",
            "type": f"sentence_transformers.models.{kind}",
        }
        for i, kind in enumerate(kinds)
    ]
    (folder / "1_Pooling").mkdir(exist_ok=True)
    files: dict[str, Any] = {
        "modules.json": modules,
        "1_Pooling/config.json": {"word_embedding_dimension": 48, f"pooling_mode_{mode}": True},
        "config_sentence_transformers.json": {"prompts": prompts or {}, "default_prompt_name": default},
        "sentence_bert_config.json": {"max_seq_length": length or 64, "do_lower_case": False},
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
