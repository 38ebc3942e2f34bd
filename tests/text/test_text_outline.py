"""The outline of a tokenizer: what the built one says, read without its merges."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from quire.text.outline import folder_outline
from quire.text.tokenizer import Tokenizer
from quire.types import CheckpointError

from .builders import byte_level, write_folder


def test_the_outline_agrees_with_the_tokenizer(folders: dict[str, Path]) -> None:
    for kind, path in folders.items():
        outline, built = folder_outline(path), Tokenizer.from_dir(path)
        assert (outline.size, outline.highest_id) == (built.vocab_size, built.highest_id), kind
        assert outline.chat_templates == built.chat_templates
        assert outline.kind == json.loads((path / "tokenizer.json").read_text())["model"]["type"]


@pytest.mark.parametrize("order", [("model", "added_tokens"), ("added_tokens", "model")])
@pytest.mark.parametrize("indent", [None, 2])
def test_members_in_any_order(
    folders: dict[str, Path], tmp_path: Path, order: tuple[str, ...], indent: int | None
) -> None:
    folder = Path(shutil.copytree(folders["gpt2"], tmp_path / "x"))
    whole = json.loads((folder / "tokenizer.json").read_text())
    whole["model"] = dict(sorted(whole["model"].items()))  # merges before type and vocab
    values = {key: whole[key] for key in order} | whole
    (folder / "tokenizer.json").write_text(json.dumps(values, indent=indent))
    assert folder_outline(folder) == folder_outline(folders["gpt2"])


def test_tokens_that_only_side_files_name(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "x", byte_level(), eos_token="<a new end>", pad_token="<new padding>")
    built = Tokenizer.from_dir(folder)
    outline = folder_outline(folder)
    assert built.eos_token_id == built.vocab_size - 2
    assert (outline.size, outline.highest_id) == (built.vocab_size, built.highest_id)


def test_merges_are_not_read(folders: dict[str, Path], tmp_path: Path) -> None:
    """What makes it quick: text that no parser takes, where the merges stand."""
    folder = Path(shutil.copytree(folders["gpt2"], tmp_path / "x"))
    text = (folder / "tokenizer.json").read_text()
    assert text.count('"merges"') == 1
    (folder / "tokenizer.json").write_text(text[: text.index('"merges"')] + '"merges": [nonsense]}}')
    assert folder_outline(folder) == folder_outline(folders["gpt2"])
    with pytest.raises(CheckpointError):
        Tokenizer.from_dir(folder)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not valid JSON"),
        (b"{}", "no model"),
        (b"[1]", "not valid JSON"),
        (b'{"model": 3}', "not valid JSON"),
        (b'{"model": {"vocab": {"a": 0}}', "not valid JSON"),
        (
            b'{"added_tokens": [], "model": {"type": "BPE", "vocab": {"a": 0}, "merges": [["a"',
            "unexpected end",
        ),
        (b'{"model": {"type": "BPE", "vocab": {"a": -1}}}', "model.vocab"),
        (b'{"model": {"type": "BPE", "vocab": [["a", 0.5], 7]}}', "model.vocab"),
        (b'{"added_tokens": [{"id": 0}], "model": {"vocab": {}}}', "no content"),
        (b'{"added_tokens": [{"content": "a", "id": "b"}], "model": {"vocab": {}}}', "no id"),
        (b'{"model": ' + b"[" * 100_000, "not valid JSON"),
        (b'{"a": ' + b"[" * 100_000, "not valid JSON"),
    ],
)
def test_malformed_files_are_checkpoint_errors(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        folder_outline(tmp_path)
