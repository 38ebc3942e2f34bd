"""Byte-level BPE trained on generated text, saved as the files of Hugging Face tokenizers.

Text is cut into words as by Qwen2, so the tokenizer has a name in GGUF. Digits are separate tokens: arithmetic is
learned digit by digit. Merges are learned from smaller pieces than words: a space is merged with a lower-case word, but
nothing with a capital letter, and no mark with a letter. So a name has the same tokens in prose and inside JSON quotes,
which makes it easy to copy. No merge crosses pieces, so both cuts give the same tokens.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from .corpus.draw import Split
from .corpus.mixture import stream
from .rendering import END_OF_TEXT, IM_END, IM_START, segments
from .shape import MAX_POSITIONS, VOCAB

SPECIAL = (END_OF_TEXT, IM_START, IM_END)
# Marks that the model writes or reads as text: kept when special tokens are skipped.
MARKS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<tools>", "</tools>")
TEMPLATE = Path(__file__).with_name("chat_template.jinja")
# Qwen2's word expression as it is published, which GGUF calls "qwen2".
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Within a word, merges are learned inside these pieces alone.
PIECES = r"'(?i:s|t|re|ve|m|ll|d)$| ?(?!\p{Lu})[\p{L}\p{M}]+|\p{L}[\p{L}\p{M}]*| ?[^\s\p{L}\p{M}]+[\r\n]*|\s+"


def train(texts: Iterator[str], vocab: int = VOCAB) -> Tokenizer:
    """A tokenizer of exactly `vocab` entries. Raises ValueError when the text has too few merges for that."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _cut(WORDS, PIECES)
    tokenizer.decoder = decoders.ByteLevel()
    added = [AddedToken(t, special=True, normalized=False) for t in SPECIAL]
    added += [AddedToken(t, special=False, normalized=False) for t in MARKS]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab - len(added),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.pre_tokenizer = _cut(WORDS)
    tokenizer.add_special_tokens(added[: len(SPECIAL)])
    tokenizer.add_tokens(added[len(SPECIAL) :])
    if tokenizer.get_vocab_size() != vocab:
        raise ValueError(f"vocab: the text gives {tokenizer.get_vocab_size()} entries, not {vocab}")
    return tokenizer


def _cut(*expressions: str) -> pre_tokenizers.PreTokenizer:
    splits = [pre_tokenizers.Split(Regex(e), behavior="isolated") for e in expressions]
    return pre_tokenizers.Sequence(
        [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )


def training_text(seed: int, conversations: int) -> Iterator[str]:
    """Rendered text without its marks, which have their own entries."""
    for made in islice(stream(seed, Split.TRAIN), conversations):
        text = "".join(s.text for s in segments(made))
        for mark in (*SPECIAL, *MARKS):
            text = text.replace(mark, "\n")
        yield text


def save(tokenizer: Tokenizer, folder: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json, chat_template.jinja and generation_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    template = TEMPLATE.read_text().removesuffix("\n")
    (folder / "chat_template.jinja").write_text(template)
    config = {
        "add_bos_token": False,
        "add_prefix_space": False,
        "bos_token": None,
        "chat_template": template,
        "clean_up_tokenization_spaces": False,
        "eos_token": IM_END,
        "errors": "replace",
        "model_max_length": MAX_POSITIONS,
        "pad_token": END_OF_TEXT,
        "split_special_tokens": False,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": None,
    }
    _write(folder / "tokenizer_config.json", config)
    end, pad = id_of(tokenizer, IM_END), id_of(tokenizer, END_OF_TEXT)
    generation = {"do_sample": False, "eos_token_id": [end, pad], "pad_token_id": pad}
    _write(folder / "generation_config.json", generation)


def id_of(tokenizer: Tokenizer, token: str) -> int:
    """The id of an entry. Raises ValueError when there is none."""
    found = tokenizer.token_to_id(token)
    if found is None:
        raise ValueError(f"tokenizer: no entry {token!r}")
    return found


def load(folder: Path) -> Tokenizer:
    """The tokenizer of a saved folder."""
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def _write(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="output folder")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--conversations", type=int, default=40_000)
    parser.add_argument("--vocab", type=int, default=VOCAB)
    args = parser.parse_args()
    save(train(training_text(args.seed, args.conversations), args.vocab), args.folder)


if __name__ == "__main__":
    main()
