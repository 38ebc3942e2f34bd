"""Resolving a model argument, without a network."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from quire.loader import resolve_model
from quire.store.hub_listing import ALLOWED, IGNORED
from quire.types import CheckpointError


def test_a_folder_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "org" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert resolve_model("org/name") == Path("org/name")
    assert resolve_model(tmp_path) == tmp_path
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve_model("~/org") == tmp_path / "org"


@pytest.mark.parametrize(
    "name",
    [
        "./absent",
        "/absent/x",
        "a/b/c",
        "../x",
        "~/x",
        "a//b",
        "here/absent",
        "x.gguf",
        "here/x.safetensors",
        "a/",
    ],
)
def test_a_path_is_not_looked_up(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: pytest.fail("asked the hub"))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    with pytest.raises(CheckpointError, match=rf"^{re.escape(name)}: no such file or folder$"):
        resolve_model(name)


@pytest.mark.parametrize("name", ["org/na me", "-x/y", "org/..", "na--me"])
def test_names_that_cannot_be_repositories(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match="no such file or folder, and not a hub name"):
        resolve_model(name)


def test_no_name() -> None:
    with pytest.raises(CheckpointError, match="no model given"):
        resolve_model("")


def test_a_file_is_not_a_model(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"not a GGUF file; pass a .gguf file, or the folder"):
        resolve_model(tmp_path / "model.safetensors")


def test_hub_snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def snapshot_download(name: str, **options: Any) -> str:
        asked.update(options, name=name)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert resolve_model("org/model-1.5", revision="main") == tmp_path
    assert asked == {
        "name": "org/model-1.5",
        "revision": "main",
        "allow_patterns": ALLOWED,
        "ignore_patterns": IGNORED,
    }


def test_the_fetched_files() -> None:
    files = [
        "config.json", "generation_config.json", "model.safetensors", "model-00001-of-00002.safetensors",
        "model.safetensors.index.json", "tokenizer.json", "tokenizer.model", "chat_template.jinja",
        "merges.txt", "pytorch_model.bin", "consolidated.safetensors", "original/params.json",
        "onnx/model.safetensors", "modeling_x.py", "model.gguf", "README.md",
    ]  # fmt: skip
    kept = huggingface_hub.utils.filter_repo_objects(files, allow_patterns=ALLOWED, ignore_patterns=IGNORED)
    assert list(kept) == files[:9]


def test_offline_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A snapshot in the cache is found without a network; an absent one is a clear error."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--org--cached"
    snapshot = repository / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("a" * 40)
    (snapshot / "config.json").write_text("{}")
    with pytest.raises(
        CheckpointError, match="org/absent: no such file or folder, and the hub returned no such repository"
    ):
        resolve_model("org/absent")
    assert resolve_model("org/cached") == snapshot


@pytest.fixture
def cached_ggufs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository in the local cache with GGUF files; returns its snapshot."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--org--x-GGUF"
    snapshot = repository / "snapshots" / ("b" * 40)
    (snapshot / "BF16").mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("b" * 40)
    parts = [f"BF16/x-{n:05d}-of-00002.gguf" for n in (1, 2)]
    for name in ("config.json", "x-Q4_K_M.gguf", "x-Q4_K_S.gguf", "x.Q8_0.gguf", "mmproj-Q8_0.gguf", *parts):
        (snapshot / name).write_bytes(b"")
    return snapshot


@pytest.mark.parametrize(
    ("choice", "file"),
    [
        (":Q4_K_M", "x-Q4_K_M.gguf"), (":q4_k_s", "x-Q4_K_S.gguf"), (":Q8_0", "x.Q8_0.gguf"),
        (":bf16", "BF16/x-00001-of-00002.gguf"), (":x-Q4_K_M.gguf", "x-Q4_K_M.gguf"),
        ("/x-Q4_K_M.gguf", "x-Q4_K_M.gguf"), ("/BF16/x-00001-of-00002.gguf", "BF16/x-00001-of-00002.gguf"),
    ],
)  # fmt: skip
def test_a_gguf_file_of_the_cache(cached_ggufs: Path, choice: str, file: str) -> None:
    assert resolve_model(f"org/x-GGUF{choice}") == cached_ggufs / file


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("org/x-GGUF:Q5_K_M", "no file is 'Q5_K_M' in the local hub cache, which has .*x-Q4_K_M.gguf"),
        (
            "org/other:Q8_0",
            "org/other: no such file, and GGUF files of the hub are only read from the local cache",
        ),
        ("org/x-GGUF:../../x.gguf", "no such file or folder"),
        ("org/x-GGUF", "3 GGUF models .x-Q4_K_M.gguf, x-Q4_K_S.gguf, x.Q8_0.gguf.; specify the file"),
    ],
)
def test_a_gguf_file_that_is_not_there(cached_ggufs: Path, name: str, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        resolve_model(name)


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(CheckpointError, match="huggingface_hub is not installed"):
        resolve_model("org/name")
