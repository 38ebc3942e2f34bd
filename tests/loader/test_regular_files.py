"""Files of a model folder or a cache that are no regular files: refused at once, by name."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from quire.loader import fingerprint
from quire.loader.gguf_file import GGUFFile
from quire.loader.safetensors import SafetensorsFile
from quire.loader.scan import file_digests
from quire.text.tokenizer_files import read_bounded
from quire.types import CheckpointError
from quire.util.files import open_regular
from quire.util.strict_json import read_small_file

READERS: dict[str, Callable[[Path], object]] = {
    "open_regular": open_regular,
    "config": lambda path: read_small_file(path, 100),
    "tokenizer": lambda path: read_bounded(path, 100),
    "safetensors": SafetensorsFile,
    "gguf": GGUFFile,
    "fingerprint": lambda path: fingerprint([path]),
    "digests": file_digests,
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("kind", ["fifo", "folder", "device", "link to a fifo"])
def test_refused(reader: str, kind: str, tmp_path: Path) -> None:
    path = tmp_path / "file"
    if kind == "folder":
        path.mkdir()
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "fifo":
        os.mkfifo(path)
    else:
        os.mkfifo(tmp_path / "fifo")
        path.symlink_to("fifo")
    with pytest.raises(CheckpointError, match=r"^file: not a regular file$"):
        READERS[reader](path)


def test_a_file_that_becomes_a_fifo_while_it_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was looked at before opening does not count."""
    path = tmp_path / "file"
    os.mkfifo(path)
    regular = os.stat(__file__)
    monkeypatch.setattr(Path, "stat", lambda *_, **__: regular)
    monkeypatch.setattr(os, "stat", lambda *_, **__: regular)
    for read in READERS.values():
        with pytest.raises(CheckpointError, match="not a regular file"):
            read(path)
