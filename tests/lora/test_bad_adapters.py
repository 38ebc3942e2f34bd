"""Bad adapter files: each is refused by name, before its numbers are read, and hostile headers allocate nothing."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.adapters import PREFIX, RANK, Q, base_spec, gguf_adapter, numbers, pair, peft_folder
from helpers.weight_files import entry, raw
from quire.lora.base_modules import BaseModules
from quire.lora.read import find_adapter, inside, open_adapter, read_adapter
from quire.types import CheckpointError, QuireError

LAYER = "model.layers.0."
A, B = f"{PREFIX}{Q}.lora_A.weight", f"{PREFIX}{Q}.lora_B.weight"
DORA = f"{PREFIX}{Q}.lora_magnitude_vector"
HEAD = f"{PREFIX}lm_head.weight"


@pytest.fixture(scope="module")
def llama() -> BaseModules:
    return BaseModules.of(base_spec())


CONFIGS: list[tuple[dict[str, Any], str]] = [
    ({"peft_type": "IA3"}, "peft_type = 'IA3' is not supported: only LORA"),
    ({"peft_type": "LOHA"}, "peft_type = 'LOHA' is not supported"),
    ({"peft_type": "ADALORA"}, "peft_type = 'ADALORA' is not supported"),
    ({"peft_type": None}, "peft_type: is missing"),
    ({"lora_bias": True}, "lora_bias = True is not supported"),
    ({"bias": "all"}, "bias = 'all' is not supported"),
    ({"use_qalora": True}, "use_qalora = True is not supported"),
    ({"trainable_token_indices": [3]}, r"trainable_token_indices = \[3\] is not supported"),
    ({"layer_replication": [[0, 2]]}, "layer_replication = .* is not supported"),
    ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens = .* is not supported"),
    ({"megatron_config": {"a": 1}}, "megatron_config = .* is not supported"),
    ({"loftq_config": {"loftq_bits": 4}}, "loftq_config = .* is not supported"),
    ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights = .* changed the weights of the base"),
    ({"init_lora_weights": "olora"}, "init_lora_weights = 'olora' is not supported"),
    ({"use_bdlora": {"nblocks": 2}}, "use_bdlora = .* not known here"),
    ({"kasa_config": {"beta": 1}}, "kasa_config = .* not known here"),
    ({"something_new": "x"}, "something_new = 'x' is not supported: it is not known here"),
    ({"r": 257}, r"r: 257 is not in \[1, 256\]"),
    ({"r": 0}, r"r: 0 is not in \[1, 256\]"),
    ({"r": 4.0}, "r: 4.0 is not an integer"),
    ({"r": 8}, "rank 4, but r and rank_pattern of the config imply 8"),
    ({"lora_alpha": float("nan")}, r"lora_alpha: nan is not in"),
    ({"lora_alpha": 1e300}, r"lora_alpha: 1e\+300 is not in"),
    ({"lora_alpha": "x"}, "lora_alpha: 'x' is not a number"),
    ({"use_rslora": 1}, "use_rslora: 1 is not true or false"),
    ({"use_dora": True}, "its lora_magnitude_vector is missing"),
    ({"rank_pattern": {"q_proj": 300}}, r"rank_pattern: q_proj: 300 is not in \[1, 256\]"),
    ({"rank_pattern": {"(a+)+q": 4}}, "rank_pattern: .* is not a regular expression of at most"),
    ({"rank_pattern": {".*.*.*q": 4}}, "rank_pattern: .* is not a regular expression of at most"),
    ({"rank_pattern": {"[": 4}}, r"rank_pattern: '\[' is not a regular expression"),
    ({"rank_pattern": {f"a{i}.*": 4 for i in range(65)}}, "65 regular expressions, more than the limit of 64"),
    ({"alpha_pattern": 3}, "alpha_pattern: 3 is not an object"),
    ({"layers_to_transform": [1]}, "layers_to_transform: has no layer 0"),
    ({"layers_to_transform": -1}, r"layers_to_transform: -1 is not in"),
    ({"target_parameters": ["self_attn.q_proj.other"]}, "target_parameters: 'self_attn.q_proj.other' is not supported"),
    ({"target_modules": [], "modules_to_save": "lm_head"}, "modules_to_save: 'lm_head' is not a list of strings"),
]  # fmt: skip


@pytest.mark.parametrize(("config", "message"), CONFIGS)
def test_configs(config: dict[str, Any], message: str, tmp_path: Path, llama: BaseModules) -> None:
    with pytest.raises(QuireError, match=message):
        read_adapter(peft_folder(tmp_path / "a", pair(Q), **config), llama)


def bad(array: np.ndarray, value: float) -> np.ndarray:
    array[1, 2] = value
    return array


TENSORS: list[tuple[Callable[[], dict[str, np.ndarray]], dict[str, Any], str]] = [
    (dict, {}, "has no tensors"),
    (lambda: {A: numbers(0, RANK, 64)}, {}, "lacks lora_B"),
    (lambda: {B: numbers(0, 64, RANK)}, {}, "lacks lora_A"),
    (lambda: {DORA: numbers(0, 64)}, {"use_dora": True}, "lacks lora_A"),
    (lambda: pair(Q) | {DORA: numbers(0, 64)}, {}, "is there, but use_dora is false"),
    (lambda: pair(Q) | {DORA: numbers(0, 63)}, {"use_dora": True}, r"shape \[63\], but B has 64 rows"),
    (lambda: pair(Q, rank=257), {"r": 256}, r"rank 257 is not in \[1, 256\]"),
    (lambda: pair(Q) | {B: numbers(0, 64, 5)}, {}, "rank 5, but r and rank_pattern of the config imply 4"),
    (lambda: pair(Q) | {A: numbers(0, 4)}, {}, r"shape \[4\] is not that of a matrix"),
    (lambda: pair(Q) | {A: numbers(0, 4, 64).astype(np.float64)}, {}, "dtype F64 is not one of"),
    (lambda: pair(Q) | {A: np.zeros((4, 64), np.int64)}, {}, "dtype I64 is not one of"),
    (lambda: pair(Q, 64, 32), {}, r"for \[out, in\] = \[64, 32\], but the model has \[64, 64\]: .* another base"),
    (lambda: pair(Q, 65), {}, r"for \[out, in\] = \[65, 64\], but the model has \[64, 64\]"),
    (lambda: pair("model.layers.2.self_attn.q_proj"), {}, "the model has no linear 'model.layers.2"),
    (lambda: pair(LAYER + "self_attn.qkv_proj"), {}, "the model has no linear .*qkv_proj"),
    (lambda: pair("model.vision_tower.q_proj"), {}, "the model has no linear"),
    (lambda: pair(LAYER + "input_layernorm"), {}, "the model has no linear"),
    (lambda: {"model.layers.0.q.lora_A.weight": numbers(0, 4, 64)}, {}, "does not begin with base_model.model."),
    (lambda: pair(Q) | {f"{PREFIX}{Q}.lora_C.weight": numbers(0, 4, 4)}, {}, "is no part of LoRA or DoRA"),
    (lambda: pair(Q) | {f"{PREFIX}{Q}.bias": numbers(0, 64)}, {}, "is no part of LoRA or DoRA and no weight"),
    (lambda: pair(Q) | {f"{PREFIX}{Q}.weight": numbers(0, 64, 64)}, {}, "is not one of modules_to_save"),
    (lambda: pair(Q) | {A.replace("lora_A.", "lora_A.default."): numbers(0, 4, 64)}, {}, "are the same part"),
    (lambda: pair(f"{Q}.base_layer"), {}, "is wrapped more often than target_parameters say"),
    (lambda: pair(Q) | {f"{PREFIX}{Q}.lora_embedding_A": numbers(0, 4, 64)}, {}, "lacks lora_embedding_B"),
    (lambda: pair(Q) | {HEAD: numbers(0, 130, 64)}, {"modules_to_save": ["lm_head"]},
     r"shape \[130, 64\], but the model has \[128, 64\]"),
    (lambda: {f"{PREFIX}model.norm.weight": numbers(0, 64)}, {"modules_to_save": ["norm"]}, "the model has no linear"),
    (lambda: {f"{PREFIX}{Q}.weight": numbers(0, 64, 64)}, {"modules_to_save": ["q_proj"]},
     "modules_to_save: .* is not supported: only lm_head and model.embed_tokens"),
    (lambda: {HEAD: numbers(0, 128, 64), HEAD.replace(".weight", ".base_layer.weight"): numbers(0, 128, 64)}, {},
     "is a second matrix for lm_head"),
    (lambda: pair(Q) | {B: bad(numbers(0, 64, 4), np.nan)}, {}, r"lora_B.weight': element \[1, 2\] is NaN or infinite"),
    (lambda: pair(Q) | {A: bad(numbers(0, 4, 64), np.inf)}, {}, r"lora_A.weight': element \[1, 2\] is NaN or infinite"),
    (lambda: {HEAD: bad(numbers(0, 128, 64), -np.inf)}, {}, r"lm_head.weight': element \[1, 2\] is NaN or infinite"),
]  # fmt: skip


@pytest.mark.parametrize(("tensors", "config", "message"), TENSORS)
def test_tensors(
    tensors: Callable[[], dict[str, np.ndarray]], config: dict[str, Any], message: str, tmp_path: Path,
    llama: BaseModules,
) -> None:  # fmt: skip
    with pytest.raises(QuireError, match=message):
        read_adapter(peft_folder(tmp_path / "a", tensors(), **config), llama)


def test_ranks_above_that_of_the_engine(tmp_path: Path, llama: BaseModules) -> None:
    with pytest.raises(CheckpointError, match=r"q_proj: rank 4 is not in \[1, 3\]"):
        read_adapter(peft_folder(tmp_path / "a", pair(Q)), llama, max_rank=3)


def test_parts_of_a_fused_linear(tmp_path: Path) -> None:
    base = BaseModules.of(base_spec("phi3"))
    both = pair(Q) | pair(LAYER + "self_attn.qkv_proj", 128)
    with pytest.raises(CheckpointError, match="qkv_proj is changed as a whole and by part"):
        read_adapter(peft_folder(tmp_path / "a", both), base)
    folder = peft_folder(tmp_path / "b", pair(Q) | {DORA: numbers(0, 64)}, use_dora=True)
    with pytest.raises(CheckpointError, match="DoRA of a part of a fused linear is not supported"):
        read_adapter(folder, base)
    ranks = pair(Q, rank=200) | pair(LAYER + "self_attn.v_proj", 32, rank=200)
    with pytest.raises(CheckpointError, match=r"qkv_proj: rank 400 is not in \[1, 256\]"):
        read_adapter(peft_folder(tmp_path / "c", ranks, r=200), base)


def test_stacked_experts(tmp_path: Path) -> None:
    base = BaseModules.of(base_spec("qwen3_moe"))
    module = f"{PREFIX}{LAYER}mlp.experts"

    def folder(name: str, experts: int, inputs: int, out: int, **config: Any) -> Path:
        tensors = {
            f"{module}.lora_A.weight": numbers(0, experts * RANK, inputs),
            f"{module}.lora_B.weight": numbers(0, out, experts * RANK),
        }
        return peft_folder(tmp_path / name, tensors, target_parameters=["mlp.experts.down_proj"], **config)

    with pytest.raises(CheckpointError, match="4 experts, but the model has 3"):
        read_adapter(folder("a", 4, 24, 64), base)
    with pytest.raises(CheckpointError, match=r"for \[out, in\] = \[64, 25\], but the model has \[64, 24\]"):
        read_adapter(folder("b", 3, 25, 64), base)
    square = BaseModules.of(base_spec("qwen3_moe", moe_intermediate_size=64))
    with pytest.raises(CheckpointError, match="are square: which side is A's is not said by"):
        read_adapter(folder("c", 3, 64, 64, peft_version="0.19.0.dev0@abc"), square)
    assert read_adapter(folder("d", 3, 64, 64, peft_version="0.19.1"), square).rank == RANK


def test_pickles_and_missing_files(tmp_path: Path, llama: BaseModules) -> None:
    folder = peft_folder(tmp_path / "a", pair(Q), name="adapter_model.bin")
    with pytest.raises(
        CheckpointError, match=r"adapter_model.bin: pickle files can run code and are never read"
    ):
        read_adapter(folder, llama)
    (folder / "adapter_model.bin").unlink()
    with pytest.raises(CheckpointError, match=r"no adapter_model.safetensors in the folder"):
        read_adapter(folder, llama)
    with pytest.raises(CheckpointError, match="does not exist"):
        read_adapter(tmp_path / "none", llama)
    (tmp_path / "adapter.bin").write_bytes(b"x")
    with pytest.raises(CheckpointError, match=r"an adapter is a folder with .* or a .gguf file"):
        read_adapter(tmp_path / "adapter.bin", llama)
    with pytest.raises(CheckpointError, match="no adapter folder or file; shipped are quire-mini:haiku"):
        find_adapter("quire-mini:none")
    no_config = peft_folder(tmp_path / "b", pair(Q))
    (no_config / "adapter_config.json").unlink()
    with pytest.raises(CheckpointError, match=r"adapter_config.json: No such file"):
        read_adapter(no_config, llama)


@pytest.mark.parametrize(
    "name", ["", "/etc", "../a", "b/../../a", "b\\a", "a\x00", "out", "out/file", ".", "x" * 5000, "loop"]
)
def test_names_lead_nowhere_else(name: str, tmp_path: Path) -> None:
    root = tmp_path / "adapters"
    root.mkdir()
    (root / "out").symlink_to(tmp_path)
    (root / "loop").symlink_to("loop")
    with pytest.raises(CheckpointError, match=r"is not the name of an adapter|leads out of"):
        inside(root, name)
    assert inside(root, "team/pirate") == root / "team" / "pirate"


def test_files_of_an_adapter_lead_nowhere_else(tmp_path: Path, llama: BaseModules) -> None:
    secret, root = peft_folder(tmp_path / "secret", pair(Q)), tmp_path / "adapters"
    folder = peft_folder(root / "a", pair(Q))
    assert read_adapter(folder, llama, root=root).parts
    for file in ("adapter_model.safetensors", "adapter_config.json"):
        (folder / file).unlink()
        (folder / file).symlink_to(secret / file)
        with pytest.raises(CheckpointError, match=f"{file} leads out of"):
            read_adapter(folder, llama, root=root)
        (folder / file).unlink()
        (folder / file).write_bytes((secret / file).read_bytes())
    (root / "b").symlink_to(secret)
    with pytest.raises(CheckpointError, match="leads out of"):
        read_adapter(root / "b", llama, root=root)


BLOCK = {
    "blk.0.attn_q.weight.lora_a": numbers(0, RANK, 64),
    "blk.0.attn_q.weight.lora_b": numbers(1, 64, RANK),
}
GGUF: list[tuple[dict[str, np.ndarray], dict[str, Any], str]] = [
    ({}, {}, "has no tensors"),
    (BLOCK, {"general__type": "model"}, "general.type: is not adapter: this is a model"),
    (BLOCK, {"general__type": None}, "general.type: is not adapter"),
    (BLOCK, {"adapter__type": "control_vector"}, "adapter.type = 'control_vector' is not supported"),
    (BLOCK, {"general__architecture": "gpt2"}, "general.architecture = 'gpt2' is not supported"),
    (BLOCK, {"adapter__lora__alpha": -1.0}, r"adapter.lora.alpha: -1.0 is not in"),
    (BLOCK, {"adapter__alora__invocation_tokens": np.zeros(1, np.uint32)}, "activated LoRA is not implemented"),
    ({"blk.0.attn_q.weight.lora_a": numbers(0, RANK, 64)}, {}, "lacks blk.0.attn_q.weight.lora_b"),
    (BLOCK | {"blk.0.attn_q.weight": numbers(0, 64, 64)}, {}, "its name does not end in .weight.lora_a or"),
    (BLOCK | {"blk.0.attn_q.weight.lora_b": numbers(1, 64, 5)}, {}, "are not those of A and B"),
    (BLOCK | {"blk.0.attn_q.weight.lora_b": numbers(1, 65, RANK)}, {}, "65 rows are not pairs in 4 heads"),
    (BLOCK | {"blk.0.attn_q.weight.lora_a": numbers(0, RANK, 65)}, {}, r"\[64, 65\], but the model has \[64, 64\]"),
    (BLOCK | {"blk.0.attn_q.weight.lora_a": numbers(0, 257, 64)}, {}, r"rank 257 is not in \[1, 256\]"),
    ({name.replace("blk.0", "blk.2"): x for name, x in BLOCK.items()}, {}, "the model has no such matrix"),
    ({name.replace("attn_q", "attn_v_b"): x for name, x in BLOCK.items()}, {}, "the model has no such matrix"),
    ({name.replace("attn_q", "attn_other"): x for name, x in BLOCK.items()}, {}, "the model has no such matrix"),
    ({name: x[None] for name, x in BLOCK.items()}, {}, "of its matrix is not that of the model"),
    (BLOCK | {"blk.0.attn_q.weight.lora_a": bad(numbers(0, RANK, 64), np.nan)}, {}, "has NaN or infinite elements"),
]  # fmt: skip


@pytest.mark.parametrize(("tensors", "metadata", "message"), GGUF)
def test_gguf(
    tensors: dict[str, np.ndarray], metadata: dict[str, Any], message: str, tmp_path: Path, llama: BaseModules
) -> None:
    with pytest.raises(QuireError, match=message):
        read_adapter(gguf_adapter(tmp_path / "a.gguf", tensors, **metadata), llama)


def test_headers_that_promise_more_than_the_file_has(tmp_path: Path, llama: BaseModules) -> None:
    """Sizes of terabytes are refused by the length of the file; the engine's limit by the header alone."""
    folder = peft_folder(tmp_path / "a", pair(Q))
    file = folder / "adapter_model.safetensors"
    file.write_bytes(
        raw({A: entry("F32", [4, 2**40], 0, 2**44), B: entry("F32", [64, 4], 2**44, 2**44 + 1024)})
    )
    with pytest.raises(CheckpointError, match=r"extends .* bytes past the end of the file"):
        read_adapter(folder, llama)
    file.write_bytes(struct.pack("<Q", 2**40) + b"{}")
    with pytest.raises(CheckpointError, match="exceeds the limit"):
        read_adapter(folder, llama)
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "x": "y" * 2**22}))
    with pytest.raises(CheckpointError, match="larger than the limit of 4194304 bytes"):
        read_adapter(folder, llama)


@pytest.mark.parametrize("count", [60, pytest.param(300, marks=pytest.mark.models)])
def test_damaged_headers_raise_nothing_else(tmp_path: Path, llama: BaseModules, count: int) -> None:
    """Files with a few bytes changed are read, or refused with a QuireError."""
    random = np.random.default_rng(0)
    folder = peft_folder(tmp_path / "a", pair(Q), rank_pattern={"x": 3})
    path = gguf_adapter(tmp_path / "a.gguf", BLOCK)
    refused = 0
    for file, adapter, reach in (
        (folder / "adapter_model.safetensors", folder, 330),
        (folder / "adapter_config.json", folder, 200),
        (path, path, 400),
    ):
        whole = file.read_bytes()
        for _ in range(count):
            data = bytearray(whole[: random.integers(1, len(whole))] if random.random() < 0.1 else whole)
            for place in random.integers(0, min(reach, len(data)), random.integers(1, 4)):
                data[place] = random.choice([0, 255, 34, 44, 49, 57, 91, 123, random.integers(256)])
            file.write_bytes(data)
            try:
                with open_adapter(adapter) as opened:
                    opened.targets()
                read_adapter(adapter, llama)
            except QuireError:
                refused += 1
        file.write_bytes(whole)
    assert 1.2 * count < refused < 3 * count
