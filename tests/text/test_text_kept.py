"""Compiled tokenizers: the ids and texts of the whole ones, used only as they were written."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from quire.text import kept_tokenizers as kept
from quire.text.compiled import compile_tokenizer
from quire.text.sparse import SparseTokenizer
from quire.text.tokenizer import Tokenizer
from quire.util.kept import KeptFiles

from .builders import CHAT_SPECIAL, WORDS, byte_level

COMPILED = {"gpt2", "qwen", "llama-new", "llama-old", "mistral", "gemma", "plain-file"}
# What is hard about a text: control tokens, whole and cut; spaces and ends of line before them; bytes of what no
# token covers; text that normalizing changes.
PARTS = [*WORDS, *CHAT_SPECIAL, "<tool_call>", "<s>", "</s>", "<|im_", "end|>", "<0x41>", "▁", " ", "  ", "\n", "\r\n",
         "\t", "e\u0301", "ﬁ", "\u200d", "😀", "0123", "'s", "'S", "aaaa"]  # fmt: skip


def wait() -> None:
    """Until what is made beside the tests is made; what compiles begins what writes."""
    for name in ("quire-kept-tokenizer", "quire-kept-file", "quire-tokenizer"):
        for thread in threading.enumerate():
            if thread.name == name:
                thread.join()


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> KeptFiles:
    return KeptFiles(tmp_path_factory.mktemp("cache"), 2**30)


@pytest.fixture(scope="module")
def pairs(folders: dict[str, Path], cache: KeptFiles) -> dict[str, tuple[Tokenizer, Tokenizer]]:
    """Each tokenizer as the library builds it and from the cache, kept from building the whole one."""
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kept, "SMALLEST", 0)
        for name, folder in folders.items():
            whole = Tokenizer.from_dir(folder, cache=cache)
            wait()
            again = Tokenizer.from_dir(folder, cache=cache)
            if isinstance(again._backend, SparseTokenizer):
                again._backend._whole.used = lambda: None  # type: ignore[method-assign]
            found[name] = whole, again
    return found


def sparse(tokenizer: Tokenizer) -> SparseTokenizer:
    assert isinstance(tokenizer._backend, SparseTokenizer)
    return tokenizer._backend


def test_which_are_compiled(pairs: dict[str, tuple[Tokenizer, Tokenizer]]) -> None:
    found = [name for name, (_, again) in pairs.items() if isinstance(again._backend, SparseTokenizer)]
    assert set(found) == COMPILED


@given(st.data())
def test_same_ids_and_text(pairs: dict[str, tuple[Tokenizer, Tokenizer]], data: st.DataObject) -> None:
    names = [name for name, (_, again) in pairs.items() if isinstance(again._backend, SparseTokenizer)]
    whole, again = pairs[data.draw(st.sampled_from(names))]
    text = "".join(data.draw(st.lists(st.one_of(st.sampled_from(PARTS), st.text(max_size=12)), max_size=8)))
    special, parse = data.draw(st.booleans()), data.draw(st.booleans())
    ids = whole.encode(text, special, parse)
    assert again.encode(text, special, parse) == ids
    span = [(0, data.draw(st.integers(0, len(text))))]
    assert again.encode_guarded(text, span) == whole.encode_guarded(text, span)
    assert again.decode(ids) == whole.decode(ids)
    assert again.decode(ids, False) == whole.decode(ids, False)
    assert again.pieces(ids) == whole.pieces(ids)
    assert sparse(again)._whole.made is None


def test_same_facts(pairs: dict[str, tuple[Tokenizer, Tokenizer]]) -> None:
    for whole, again in pairs.values():
        for name in (
            "vocab_size",
            "highest_id",
            "special_ids",
            "control_ids",
            "special_tokens",
            "eos_token_id",
        ):
            assert getattr(again, name) == getattr(whole, name)
        for number in range(whole.highest_id + 3):
            assert again.pieces([number]) == whole.pieces([number])
            assert again.token_bytes(number) == whole.token_bytes(number)
        for token in ("the", "Ġthe", "▁the", "<|im_end|>", "</s>", "none such"):
            assert again.token_to_id(token) == whole.token_to_id(token)


def test_the_library_gets_few_tokens(folders: dict[str, Path], cache: KeptFiles, monkeypatch: Any) -> None:
    """Negative control for speed: a short text builds only a part of the vocabulary, once per text."""
    monkeypatch.setattr(kept, "SMALLEST", 0)
    again = Tokenizer.from_dir(folders["gpt2"], cache=cache)
    built: list[int] = []
    small = SparseTokenizer._small

    def counted(
        self: SparseTokenizer, vocab: dict[str, int], *rest: Any, **options: Any
    ) -> tokenizers.Tokenizer:
        built.append(len(vocab))
        return small(self, vocab, *rest, **options)

    monkeypatch.setattr(SparseTokenizer, "_small", counted)
    again.encode("the quick brown fox")
    assert built == [256, built[1]]
    assert built[1] < 60 < again.vocab_size


def test_the_second_text_begins_to_build_the_whole(
    folders: dict[str, Path], cache: KeptFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept, "SMALLEST", 0)
    again = Tokenizer.from_dir(folders["gpt2"], cache=cache)
    first = again.encode("the quick brown fox")
    assert sparse(again)._whole.made is None
    assert again.encode("the quick brown fox") == first
    wait()
    assert sparse(again)._whole.made is not None
    assert again.encode("the quick brown fox") == first
    assert again.encode("<|im_end|>", parse_special=False) != again.encode("<|im_end|>")
    long = Tokenizer.from_dir(folders["gpt2"], cache=cache)
    assert long.encode("the quick " * 1000) == again.encode("the quick " * 1000)
    assert sparse(long)._whole.made is not None


def test_tokens_that_were_made_to_collide_are_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = byte_level()
    assert compile_tokenizer(backend, bytes(32)) is not None
    monkeypatch.setattr("quire.text.compiled.crc32", lambda _: 7)
    assert compile_tokenizer(backend, bytes(32)) is None


DAMAGE: dict[str, Callable[[Path], object]] = {
    "a bit": lambda path: path.write_bytes(path.read_bytes()[:-9] + b"?" + path.read_bytes()[-8:]),
    "cut": lambda path: os.truncate(path, 5000),
    "empty": lambda path: os.truncate(path, 0),
    "others may write": lambda path: path.chmod(0o666),
    "a FIFO": lambda path: (path.unlink(), os.mkfifo(path)),
    "another one's": lambda path: os.replace(path.with_name("other"), path),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_made_again(
    folders: dict[str, Path], tmp_path: Path, damage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept, "SMALLEST", 0)
    cache = KeptFiles(tmp_path, 2**30)
    Tokenizer.from_dir(folders["qwen"], cache=cache)
    wait()
    (other,) = tmp_path.glob("*.tokenizer")
    other.rename(tmp_path / "other")
    whole = Tokenizer.from_dir(folders["gpt2"], cache=cache)
    wait()
    (path,) = tmp_path.glob("*.tokenizer")
    DAMAGE[damage](path)
    rebuilt = Tokenizer.from_dir(folders["gpt2"], cache=cache)
    wait()
    assert not isinstance(rebuilt._backend, SparseTokenizer)
    assert rebuilt.encode(WORDS[0]) == whole.encode(WORDS[0])
    assert isinstance(Tokenizer.from_dir(folders["gpt2"], cache=cache)._backend, SparseTokenizer)


def test_tokenizers_that_are_not_kept(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Tokenizer.from_dir(folders["gpt2"], cache=KeptFiles(tmp_path / "cache", 2**30))  # built as fast as found
    monkeypatch.setattr(kept, "SMALLEST", 0)
    Tokenizer.from_dir(folders["gpt2"])
    Tokenizer.from_dir(folders["gpt2"], cache=KeptFiles(tmp_path / "cache", 1000))  # over the limit
    (tmp_path / "blocked").write_text("not a folder")
    Tokenizer.from_dir(folders["gpt2"], cache=KeptFiles(tmp_path / "blocked", 2**30))
    wait()
    assert not (tmp_path / "cache").exists()
