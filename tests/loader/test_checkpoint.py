"""Checkpoint folders: single files, shards, and every way in which index and shards can disagree."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from helpers.weight_files import raw, write, write_index, write_shards
from quire.loader import Checkpoint
from quire.loader.checkpoint import MAX_SHARDS
from quire.types import CheckpointError

A, B, C = np.ones((2, 3), np.float32), np.zeros(4, np.uint16), np.full((5, 1), 2, np.float16)
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def test_single_file(tmp_path: Path) -> None:
    write(tmp_path / "model.safetensors", {"a": A, "b": B})
    with Checkpoint(tmp_path) as checkpoint:
        assert sorted(checkpoint.names()) == ["a", "b"]
        assert checkpoint.info("b").dtype == "BF16"
        assert np.array_equal(checkpoint.read("a", 1), A[1:])
        checkpoint.release("a")
        with pytest.raises(KeyError):
            checkpoint.info("c")
    assert list(checkpoint.names()) == []


def test_shards(tmp_path: Path) -> None:
    write_shards(tmp_path, [{"a": A, "b": B}, {"c": C}])
    with Checkpoint(tmp_path) as checkpoint:
        assert sorted(checkpoint.names()) == ["a", "b", "c"]
        assert np.array_equal(checkpoint.read("c"), C)


def test_shards_written_by_transformers(tmp_path: Path) -> None:
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2
    )
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    with Checkpoint(tmp_path) as checkpoint:
        for name, tensor in model.state_dict().items():
            assert checkpoint.read(name).tobytes() == tensor.view(torch.int16).numpy().tobytes()


def test_links_as_hub_caches_have_them(tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots"
    blobs.mkdir()
    snapshot.mkdir()
    write_shards(blobs, [{"a": A}, {"c": C}])
    for file in list(blobs.iterdir()):
        target = file.rename(blobs / f"{hash(file.name):x}")
        (snapshot / file.name).symlink_to(Path("../blobs") / target.name)
    with Checkpoint(snapshot) as checkpoint:
        assert sorted(checkpoint.names()) == ["a", "c"]


def test_missing_shard(tmp_path: Path) -> None:
    write_shards(tmp_path, [{"a": A}, {"c": C}])
    (tmp_path / SECOND).unlink()
    with pytest.raises(CheckpointError, match=f"shard {SECOND} is missing"):
        Checkpoint(tmp_path)
    (tmp_path / SECOND).symlink_to(tmp_path / "blob-not-downloaded")
    with pytest.raises(CheckpointError, match=f"shard {SECOND} is missing"):
        Checkpoint(tmp_path)


def test_index_and_shards_disagree(tmp_path: Path) -> None:
    weight_map = write_shards(tmp_path, [{"a": A}, {"c": C}])
    for changed, message in (
        ({**weight_map, "x": FIRST}, f"tensor 'x' is not in {FIRST}"),
        ({"a": FIRST, "c": FIRST}, f"tensor 'c' is not in {FIRST}"),
        ({"a": FIRST, "c": SECOND, "x": SECOND}, f"tensor 'x' is not in {SECOND}"),
    ):
        write_index(tmp_path, changed)
        with pytest.raises(CheckpointError, match=message):
            Checkpoint(tmp_path)
    write(tmp_path / SECOND, {"c": C, "extra": A})
    write_index(tmp_path, weight_map)
    with pytest.raises(CheckpointError, match=r"tensor 'extra' is not in model\.safetensors\.index\.json"):
        Checkpoint(tmp_path)


def test_tensor_in_two_shards(tmp_path: Path) -> None:
    write_shards(tmp_path, [{"a": A}, {"a": A, "c": C}])
    write_index(tmp_path, {"a": FIRST, "c": SECOND})
    with pytest.raises(CheckpointError, match=f"tensor 'a' is in both {FIRST} and {SECOND}"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize(
    "shard",
    [
        "../secret.safetensors", "/etc/x.safetensors", "a/b.safetensors", "a\\b.safetensors",
        "C:x.safetensors", "x\0.safetensors", "model.bin", "", "x" * 300 + ".safetensors",
        7, None, ["a.safetensors"],
    ],
)  # fmt: skip
def test_shard_names_cannot_leave_the_folder(tmp_path: Path, shard: object) -> None:
    write(tmp_path.parent / "secret.safetensors", {"a": A})
    write_index(tmp_path, {"a": shard})
    with pytest.raises(CheckpointError, match=r"weight_map of 'a': .* is not the plain name"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{}", "weight_map is not an object"),
        ('{"weight_map": {}}', "weight_map is not an object"),
        ('{"weight_map": ["a"]}', "weight_map is not an object"),
        ('{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}', "duplicate key 'a'"),
        ("[", "not valid JSON"),
    ],
)
def test_malformed_index(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"^model\.safetensors\.index\.json: ") as caught:
        Checkpoint(tmp_path)
    assert message in str(caught.value)


def test_too_many_shards(tmp_path: Path) -> None:
    write_index(tmp_path, {f"t{i}": f"{i}.safetensors" for i in range(MAX_SHARDS + 1)})
    with pytest.raises(CheckpointError, match=f"{MAX_SHARDS + 1} shards"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ([], ["neither model.safetensors nor model.safetensors.index.json"]),
        (["pytorch_model.bin"], ["pytorch_model.bin", "pickle", "never read"]),
        (["pytorch_model-1.bin", "pytorch_model-2.bin", "x.pt"], ["and 2 more", "pickle"]),
        (["consolidated.safetensors", "a.bin"], ["consolidated.safetensors", "transformers format"]),
    ],
)
def test_nothing_to_load(tmp_path: Path, files: list[str], words: list[str]) -> None:
    for name in files:
        (tmp_path / name).write_bytes(b"\x80\x04.")
    with pytest.raises(CheckpointError) as caught:
        Checkpoint(tmp_path)
    for word in words:
        assert word in str(caught.value)


def test_not_a_folder(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="not a folder"):
        Checkpoint(tmp_path / "absent")


def test_a_bad_shard_is_named(tmp_path: Path) -> None:
    write_shards(tmp_path, [{"a": A}, {"c": C}])
    (tmp_path / SECOND).write_bytes(raw({}, b"?"))
    with pytest.raises(CheckpointError, match=f"^{SECOND}: 1 trailing bytes"):
        Checkpoint(tmp_path)


def test_index_is_read_as_json_only(tmp_path: Path) -> None:
    """total_size and other metadata are not trusted for anything."""
    write(tmp_path / "x.safetensors", {"a": A})
    index = {"metadata": {"total_size": 2**70, "more": [1]}, "weight_map": {"a": "x.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with Checkpoint(tmp_path) as checkpoint:
        assert list(checkpoint.names()) == ["a"]
