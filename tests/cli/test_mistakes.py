"""What people have on disk by mistake: each command says which file it is and what to do, and writes nothing."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from helpers.gguf_files import write_model
from helpers.tokenizers import save_whole
from quire.cli.main import main

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
SECOND = "model-00002-of-00002.safetensors"
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"


def sharded(folder: Path) -> None:
    tensors = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    names, where = sorted(tensors), {}
    for number, part in enumerate((names[:10], names[10:]), 1):
        file = f"model-{number:05d}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, folder / file)
        where |= dict.fromkeys(part, file)
    (folder / INDEX).write_text(json.dumps({"weight_map": where}))


def no_shard(folder: Path) -> None:
    sharded(folder)
    (folder / SECOND).unlink()


def no_index(folder: Path) -> None:
    sharded(folder)
    (folder / INDEX).unlink()


def short_shard(folder: Path) -> None:
    sharded(folder)
    data = (folder / SECOND).read_bytes()
    (folder / SECOND).write_bytes(data[:-1000])


def foreign_index(folder: Path) -> None:
    sharded(folder)
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["model.norm.weight"] = "model-00009-of-00009.safetensors"
    (folder / INDEX).write_text(json.dumps(index))


def integers(folder: Path) -> None:
    tensors = load_file(folder / WEIGHTS)
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.int32)
    save_file(tensors, folder / WEIGHTS)


def another_model(folder: Path) -> None:
    edited(folder, intermediate_size=100)


def pickle(folder: Path) -> None:
    (folder / WEIGHTS).rename(folder / "pytorch_model.bin")


def pointer(folder: Path) -> None:
    (folder / WEIGHTS).write_text(POINTER)


def edited(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def unknown_method(folder: Path) -> None:
    edited(folder, quantization_config={"quant_method": "quip"})


def plain_but_said_quantized(folder: Path) -> None:
    edited(folder, quantization_config={"quant_method": "gptq", "bits": 4})


def unknown_model(folder: Path) -> None:
    edited(folder, model_type="llama4", architectures=["Llama4ForConditionalGeneration"])


def adapter(folder: Path) -> None:
    (folder / "config.json").rename(folder / "adapter_config.json")


def pipeline(folder: Path) -> None:
    (folder / "config.json").rename(folder / "model_index.json")


def page(folder: Path) -> None:
    (folder / "config.json").write_text("<!doctype html>")


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_whole("llama2", tmp_path_factory.mktemp("sound"))


MISTAKES: list[tuple[Callable[[Path], None], str]] = [
    (no_shard, f"shard {SECOND} is missing"),
    (no_index, f"{INDEX}, which assigns tensors to files, is missing"),
    (
        short_shard,
        f"{SECOND}: tensor 'model.layers.1.self_attn.v_proj.weight' extends 744 bytes past the end",
    ),
    (foreign_index, "shard model-00009-of-00009.safetensors is missing"),
    (integers, "tensor model.norm.weight: dtype I32 is not one of BF16, F16, F32"),
    (another_model, "shape [96, 64], but the config implies [100, 64]"),
    (pickle, "only pytorch_model.bin: pickle files can run code"),
    (pointer, "model.safetensors: is a Git LFS pointer and not the file itself"),
    (unknown_method, "quant_method = 'quip' is not supported; supported methods are gptq, awq"),
    (plain_but_said_quantized, "no tensor has the format of GPTQ"),
    (unknown_model, "model_type = 'llama4' is not supported: supported model types are llama"),
    (adapter, "no config.json; it contains an adapter"),
    (pipeline, "no config.json; it contains a diffusers pipeline"),
    (page, "config.json: not valid JSON"),
]


@pytest.mark.parametrize(("damage", "message"), MISTAKES, ids=lambda value: getattr(value, "__name__", ""))
def test_folders(
    sound: Path,
    tmp_path: Path,
    damage: Callable[[Path], None],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = Path(shutil.copytree(sound, tmp_path / "model"))
    damage(folder)
    check_commands(folder, tmp_path, message, capsys)


def check_commands(path: Path, tmp_path: Path, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """inspect tells (headers are enough for it), verify fails, generate and convert refuse."""
    for command, status in (
        (["inspect", str(path), "--no-measure"], None),
        (["verify", str(path), "--no-progress"], 1),
        (["generate", str(path), "--prompt-token-ids", "5"], 1),
        (["convert", str(path), str(tmp_path / "out"), "--quiet"], 1),
    ):
        found = main(command)
        told = capsys.readouterr()
        assert message in told.out + told.err, (command, told)
        assert status is None or found == status, command
        assert "Traceback" not in told.err
    assert not (tmp_path / "out").exists()


def cut(path: Path) -> Path:
    path.write_bytes(path.read_bytes()[:-5000])
    return path


def first_part(path: Path) -> Path:
    return path.rename(path.with_name("m-00001-of-00003.gguf"))


def several(path: Path) -> Path:
    shutil.copy(path, path.with_name("m-Q8_0.gguf"))
    path.rename(path.with_name("m-Q4_K_M.gguf"))
    return path.parent


def encoder(path: Path) -> Path:
    path.rename(path.with_name("mmproj-m.gguf"))
    return path.parent


def text(path: Path) -> Path:
    path.write_text("this is no model at all, whatever its name may say")
    return path


def lfs(path: Path) -> Path:
    path.write_text(POINTER)
    return path


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (cut, "extends 4744 bytes past the end of the file; the download may be incomplete"),
        (first_part, "m-00001-of-00003.gguf: m-00002-of-00003.gguf is missing in its folder"),
        (several, "2 GGUF models (m-Q4_K_M.gguf, m-Q8_0.gguf); specify the file"),
        (encoder, "mmproj-m.gguf is an image encoder"),
        (text, "x.gguf: not a GGUF file"),
        (lfs, "x.gguf: is a Git LFS pointer"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_gguf_files(
    sound: Path,
    tmp_path: Path,
    damage: Callable[[Path], Path],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "model").mkdir()
    path = damage(write_model(sound, tmp_path / "model" / "x.gguf", "llama"))
    check_commands(path, tmp_path, message, capsys)


def test_a_pointer_in_the_place_of_the_tokenizer(
    sound: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(shutil.copytree(sound, tmp_path / "model"))
    (folder / "tokenizer.json").write_text(POINTER)
    check_commands(folder, tmp_path, "tokenizer.json is a Git LFS pointer", capsys)


def test_a_text_without_a_tokenizer_is_refused_before_weights_are_read(
    sound: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(shutil.copytree(sound, tmp_path / "model"))
    (folder / "tokenizer.json").unlink()
    pointer(folder)
    assert main(["generate", str(folder), "--prompt", "Hi"]) == 1
    assert "has no tokenizer: pass token ids with --prompt-token-ids" in capsys.readouterr().err


def test_inspect_reads_no_numbers(sound: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A tied model that has its head as well: whether they are equal is for loading to see."""
    folder = Path(shutil.copytree(sound, tmp_path / "model"))
    edited(folder, tie_word_embeddings=True)
    assert main(["inspect", str(folder), "--no-measure"]) == 0
    assert "cannot be loaded" not in capsys.readouterr().out
    assert main(["generate", str(folder), "--prompt-token-ids", "5"]) == 1
    assert "lm_head.weight differs from model.embed_tokens.weight" in capsys.readouterr().err
