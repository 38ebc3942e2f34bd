"""Reading adapters: the numbers and scales of PEFT folders and GGUF files, under the names of the base."""

from __future__ import annotations

import hashlib
import math
import os
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from helpers.adapters import PREFIX, RANK, Q, base_spec, gguf_adapter, numbers, pair, peft_folder
from helpers.gguf_files import permute
from quire.config.shipped import shipped_adapters
from quire.lora import leaf_hash
from quire.lora.base_modules import BaseModules
from quire.lora.leaf_hash import LEAF, LeafHash, Memory
from quire.lora.read import find_adapter, open_adapter, read_adapter, reading, room_of
from quire.quant.floats import floats, from_float32
from quire.spec.facts import read_model
from quire.types import CheckpointError
from quire.util.files import identity_of

LAYER = "model.layers.0."


@pytest.fixture(scope="module")
def llama() -> BaseModules:
    return BaseModules.of(base_spec())


def test_numbers_and_scale(tmp_path: Path, llama: BaseModules) -> None:
    tensors = pair(Q)
    adapter = read_adapter(peft_folder(tmp_path / "v1.5", tensors), llama)
    low = adapter.parts[Q]
    np.testing.assert_array_equal(low.a, tensors[f"{PREFIX}{Q}.lora_A.weight"])
    np.testing.assert_array_equal(low.b, tensors[f"{PREFIX}{Q}.lora_B.weight"])
    assert (adapter.name, adapter.rank, low.scale, low.magnitude) == ("v1.5", RANK, 6 / RANK, None)
    assert not adapter.modules_to_save


@pytest.mark.parametrize("dtype", ["F16", "BF16"])
def test_formats_of_numbers(dtype: str, tmp_path: Path, llama: BaseModules) -> None:
    exact = {name: np.round(array * 8) / 8 for name, array in pair(Q).items()}
    stored = {name: from_float32(array, dtype) for name, array in exact.items()}
    low = read_adapter(peft_folder(tmp_path / "a", stored), llama).parts[Q]
    np.testing.assert_array_equal(floats(low.a), exact[f"{PREFIX}{Q}.lora_A.weight"])
    np.testing.assert_array_equal(floats(low.b), exact[f"{PREFIX}{Q}.lora_B.weight"])


def test_what_is_kept_does_not_depend_on_its_file(tmp_path: Path, llama: BaseModules) -> None:
    stored = {name: from_float32(array, "BF16") for name, array in pair(Q).items()}
    folder = peft_folder(tmp_path / "a", stored)
    adapter = read_adapter(folder, llama)
    expected, kept = floats(adapter.parts[Q].b).copy(), adapter.kept()
    weights = folder / "adapter_model.safetensors"
    with weights.open("r+b") as file:  # written over in place, as others do it
        file.seek(weights.stat().st_size - 8)
        file.write(b"\xff" * 8)
    np.testing.assert_array_equal(floats(kept.parts[Q].b), expected)


def test_rank_stabilized(tmp_path: Path, llama: BaseModules) -> None:
    folder = peft_folder(tmp_path / "a", pair(Q), use_rslora=True)
    assert read_adapter(folder, llama).parts[Q].scale == 6 / math.sqrt(RANK)


def test_patterns_are_those_of_peft(tmp_path: Path, llama: BaseModules) -> None:
    """The first key that is the end of a name counts, whether it is a name or an expression."""
    names = [Q, LAYER + "self_attn.v_proj", LAYER + "mlp.up_proj", LAYER + "mlp.down_proj"]
    sizes = [(64, 64, 2), (32, 64, 3), (96, 64, 5), (64, 96, RANK)]
    tensors: dict[str, np.ndarray] = {}
    for name, (out, inputs, rank) in zip(names, sizes, strict=True):
        tensors |= pair(name, out, inputs, rank)
    folder = peft_folder(
        tmp_path / "a", tensors,
        rank_pattern={"layers.0.self_attn.q_proj": 2, "q_proj": 7, r"mlp\.up_.*": 5, "v_proj": 3, "proj": 9},
        alpha_pattern={r"^model\.layers\.\d+\.mlp\.up_proj": 10, "up_proj": 1, "v_proj": 12},
    )  # fmt: skip
    parts = read_adapter(folder, llama).parts
    assert [parts[name].scale for name in names] == [6 / 2, 12 / 3, 10 / 5, 6 / RANK]


def test_magnitudes(tmp_path: Path, llama: BaseModules) -> None:
    magnitude = numbers(5, 64)
    folder = peft_folder(
        tmp_path / "a", pair(Q) | {f"{PREFIX}{Q}.lora_magnitude_vector": magnitude}, use_dora=True
    )
    np.testing.assert_array_equal(read_adapter(folder, llama).parts[Q].magnitude, magnitude)


def test_embeddings(tmp_path: Path, llama: BaseModules) -> None:
    """Rows of the table are rows of `b`."""
    a, b = numbers(1, RANK, 128), numbers(2, 64, RANK)
    name = "model.embed_tokens"
    tensors = {f"{PREFIX}{name}.lora_embedding_A": a, f"{PREFIX}{name}.lora_embedding_B": b}
    low = read_adapter(peft_folder(tmp_path / "a", tensors), llama).parts[name]
    np.testing.assert_allclose(low.b @ low.a, (b @ a).T, rtol=1e-6)


def test_whole_modules(tmp_path: Path, llama: BaseModules) -> None:
    tensors = pair(Q) | {
        f"{PREFIX}lm_head.weight": numbers(3, 128, 64),
        f"{PREFIX}model.embed_tokens.base_layer.weight": numbers(4, 128, 64),
    }
    folder = peft_folder(tmp_path / "a", tensors, modules_to_save=["lm_head"])
    whole = read_adapter(folder, llama).modules_to_save
    assert whole["lm_head"].shape == (128, 64)
    np.testing.assert_array_equal(whole["lm_head"][0:128], tensors[f"{PREFIX}lm_head.weight"])
    np.testing.assert_array_equal(whole["model.embed_tokens"][70:200], numbers(4, 128, 64)[70:])


def test_the_bytes_are_known_before_anything_is_read(tmp_path: Path, llama: BaseModules) -> None:
    tensors = pair(Q) | {f"{PREFIX}lm_head.weight": numbers(3, 128, 64)}
    folder = peft_folder(tmp_path / "a", tensors, modules_to_save=["lm_head"])
    needed = 4 * RANK * 128  # the whole matrix is read later, in blocks
    assert read_adapter(folder, llama, max_bytes=needed).rank == RANK
    with pytest.raises(CheckpointError, match=r"needs 2.00 KiB in float32, more than the limit"):
        read_adapter(folder, llama, max_bytes=needed - 1)


def test_parts_of_a_fused_linear(tmp_path: Path) -> None:
    """Pairs for q and v of a checkpoint that stores both in one matrix become one pair with zeros between, for whose
    ranks an engine has room unasked."""
    spec = base_spec("phi3")
    base = BaseModules.of(spec)
    fused = LAYER + "self_attn.qkv_proj"
    q, v = pair(Q), pair(LAYER + "self_attn.v_proj", 32, 64, 2, seed=3)
    folder = peft_folder(tmp_path / "a", q | v, rank_pattern={"v_proj": 2})
    (low,) = read_adapter(folder, base).parts.values()
    delta = low.scale * low.b @ low.a
    of_q, of_v = (list(tensors.values()) for tensors in (q, v))
    np.testing.assert_allclose(delta[:64], 6 / RANK * of_q[1] @ of_q[0], rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(delta[64:96], 0)
    np.testing.assert_allclose(delta[96:], 3 * of_v[1] @ of_v[0], rtol=1e-5, atol=1e-6)
    assert low.rank == RANK + 2
    assert room_of([str(folder)], spec) == (RANK + 2, ())
    whole = read_adapter(peft_folder(tmp_path / "b", pair(fused, 128)), base)
    assert whole.parts[fused].b.shape == (128, RANK)


def expert(of: str, e: int, name: str) -> str:
    return f"{LAYER}{of}.{e}.{name}"


def test_experts_one_by_one(tmp_path: Path) -> None:
    base = BaseModules.of(base_spec("qwen3_moe"))
    name = expert("mlp.experts", 2, "up_proj")
    assert read_adapter(peft_folder(tmp_path / "a", pair(name, 24)), base).parts.keys() == {name}


@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral", "gpt_oss"])
def test_experts_in_one_tensor(kind: str, tmp_path: Path) -> None:
    """PEFT: delta[e, o, i] = Σ_r B[o, r · experts + e] · A[e · rank + r, i], of gates and ups in one matrix."""
    base = BaseModules.of(base_spec(kind))
    module, width = LAYER + "mlp.experts", {"qwen3_moe": 24, "mixtral": 96, "gpt_oss": 48}[kind]
    up = (numbers(1, 3 * RANK, 64), numbers(2, 2 * width, 3 * RANK))
    down = (numbers(3, 3 * RANK, width), numbers(4, 64, 3 * RANK))
    tensors = {
        f"{PREFIX}{module}.base_layer.lora_A.weight": up[0], f"{PREFIX}{module}.base_layer.lora_B.weight": up[1],
        f"{PREFIX}{module}.lora_A.weight": down[0], f"{PREFIX}{module}.lora_B.weight": down[1],
    }  # fmt: skip
    targets = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    parts = read_adapter(peft_folder(tmp_path / "a", tensors, target_parameters=targets), base).parts
    assert len(parts) == 9
    names = base.spec.names
    for e in range(3):
        deltas = [
            6 / RANK * np.einsum("ore,eri->eoi", b.reshape(len(b), RANK, 3), a.reshape(3, RANK, -1))[e]
            for a, b in (up, down)
        ]
        rows = (
            (deltas[0][0::2], deltas[0][1::2])
            if kind == "gpt_oss"
            else (deltas[0][:width], deltas[0][width:])
        )
        for name, delta in zip(
            (names.expert_gate, names.expert_up, names.expert_down), (*rows, deltas[1]), strict=True
        ):
            low = parts[name.format(i=0, e=e)]
            np.testing.assert_allclose(low.scale * low.b @ low.a, delta, rtol=1e-4, atol=1e-5)


def test_first_releases_of_peft_had_sides_of_experts_swapped(tmp_path: Path) -> None:
    base = BaseModules.of(base_spec("qwen3_moe"))
    a, b = numbers(1, 3 * RANK, 64), numbers(2, 24, 3 * RANK)  # of down, [64, 24]
    module = LAYER + "mlp.experts"
    tensors = {f"{PREFIX}{module}.lora_A.weight": a, f"{PREFIX}{module}.lora_B.weight": b}
    folder = peft_folder(tmp_path / "a", tensors, target_parameters=["mlp.experts.down_proj"])
    low = read_adapter(folder, base).parts[expert("mlp.experts", 1, "down_proj")]
    delta = np.einsum("or,ri->io", b.reshape(24, RANK, 3)[:, :, 1], a.reshape(3, RANK, 64)[1])
    np.testing.assert_allclose(low.b @ low.a, delta, rtol=1e-4, atol=1e-5)


def test_a_router_has_two_names(tmp_path: Path) -> None:
    base = BaseModules.of(base_spec("mixtral"))
    folder = peft_folder(tmp_path / "a", pair(LAYER + "mlp.gate", 3))
    assert read_adapter(folder, base).parts.keys() == {LAYER + "block_sparse_moe.gate"}


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model.", "model."])
def test_names_of_multimodal_models(prefix: str, tmp_path: Path) -> None:
    """Releases of transformers differ."""
    base = BaseModules.of(base_spec("gemma3"))
    folder = peft_folder(tmp_path / "a", pair(Q.replace("model.", prefix, 1)))
    assert read_adapter(folder, base).parts.keys() == {Q}


def test_a_gguf_adapter_is_the_same_as_the_folder(tmp_path: Path, llama: BaseModules) -> None:
    """Rows of B are permuted where a converter permutes those of the matrix; an embedding has its sides swapped."""
    k, down = LAYER + "self_attn.k_proj", LAYER + "mlp.down_proj"
    pairs = pair(Q) | pair(k, 32, seed=5) | pair(down, 64, 96, seed=7)
    a, b = numbers(1, RANK, 128), numbers(2, 64, RANK)
    embedding = {
        f"{PREFIX}model.embed_tokens.lora_embedding_A": a,
        f"{PREFIX}model.embed_tokens.lora_embedding_B": b,
    }
    found = read_adapter(peft_folder(tmp_path / "a", pairs | embedding), llama)
    values = list(pairs.values())
    tensors = {
        "blk.0.attn_q.weight.lora_a": values[0], "blk.0.attn_q.weight.lora_b": permute(values[1], 4),
        "blk.0.attn_k.weight.lora_a": values[2], "blk.0.attn_k.weight.lora_b": permute(values[3], 2),
        "blk.0.ffn_down.weight.lora_a": values[4], "blk.0.ffn_down.weight.lora_b": values[5],
        "token_embd.weight.lora_a": np.ascontiguousarray(a.T), "token_embd.weight.lora_b": b,
    }  # fmt: skip
    other = read_adapter(gguf_adapter(tmp_path / "a.gguf", tensors), llama)
    assert other.parts.keys() == found.parts.keys()
    for name, low in found.parts.items():
        assert other.parts[name].scale == low.scale
        np.testing.assert_array_equal(other.parts[name].a, low.a)
        np.testing.assert_array_equal(other.parts[name].b, low.b)
    assert other.digest != found.digest


def test_a_gguf_adapter_of_experts(tmp_path: Path) -> None:
    base = BaseModules.of(base_spec("qwen3_moe"))
    a, b = numbers(1, 3, RANK, 64), numbers(2, 3, 24, RANK)
    tensors = {"blk.1.ffn_up_exps.weight.lora_a": a, "blk.1.ffn_up_exps.weight.lora_b": b}
    path = gguf_adapter(
        tmp_path / "a.gguf", tensors, general__architecture="qwen3moe", adapter__lora__alpha=None
    )
    parts = read_adapter(path, base).parts
    assert len(parts) == 3
    for e in range(3):
        low = parts[f"model.layers.1.mlp.experts.{e}.up_proj"]
        np.testing.assert_array_equal(low.a, a[e])
        np.testing.assert_array_equal(low.b, b[e])
        assert low.scale == 1.0  # llama.cpp's without an alpha


def test_the_digest_is_that_of_the_file_and_the_config(tmp_path: Path, llama: BaseModules) -> None:
    digests = {
        read_adapter(peft_folder(tmp_path / str(i), pair(Q, seed=seed), **config), llama).digest
        for i, (seed, config) in enumerate([(0, {}), (0, {}), (1, {}), (0, {"lora_alpha": 7})])
    }
    assert len(digests) == 3


@pytest.mark.parametrize("size", [0, 1, LEAF - 1, LEAF, 3 * LEAF + 5, 9 * LEAF])
def test_the_digest_of_leaves(size: int, tmp_path: Path) -> None:
    """Whoever asks for which bytes first."""
    content = numbers(1, size // 4 + 1).tobytes()[:size]
    path = tmp_path / "file"
    path.write_bytes(content)
    leaves = [hashlib.sha256(content[first : first + LEAF]).digest() for first in range(0, size, LEAF)]
    expected = hashlib.sha256(b"4 %d head" % size + b"".join(leaves)).hexdigest()
    for asked in ([], [size], [1, LEAF, LEAF + 1, size + LEAF], range(0, size, LEAF)):
        with closing(LeafHash(path)) as hashing, path.open("rb") as file:
            for end in asked:
                hashing.reach(end)
            assert hashing.digest(b"head", identity_of(file)) == expected


def test_what_rested_is_hashed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until it is written to, whatever its time of writing says then."""
    path, memory = tmp_path / "file", Memory()
    path.write_bytes(bytes(3 * LEAF))

    def digest(head: bytes = b"head") -> tuple[bool, str]:
        with closing(LeafHash(path, memory)) as hashing, path.open("rb") as file:
            return hashing.known is None, hashing.digest(head, identity_of(file))

    _, fresh = digest()
    assert digest() == (True, fresh), "what was written to just now may be written to again in the same tick"
    monkeypatch.setattr(leaf_hash, "REST_NS", -(10**9))
    assert digest() == (True, fresh)
    assert digest() == (False, fresh)
    with pytest.raises(CheckpointError, match="what lies beside it changed"):
        digest(b"tail")
    before = path.stat()
    with path.open("r+b") as file:
        file.write(b"x")
    while path.stat().st_ctime_ns == before.st_ctime_ns:  # the clock may be coarse
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    hashed, other = digest()
    assert hashed
    assert other != fresh
    assert digest() == (False, other)


def test_a_file_that_changes_while_it_is_read(tmp_path: Path, llama: BaseModules) -> None:
    """Written over in place, cut short, or put in the place of the one that is open."""
    folder = peft_folder(tmp_path / "a", pair(Q))
    weights, other = folder / "adapter_model.safetensors", peft_folder(tmp_path / "b", pair(Q, seed=1))
    content = weights.read_bytes()
    for change in (lambda: weights.write_bytes(content), lambda: os.truncate(weights, len(content) - 4)):
        with reading(folder, llama) as found:
            dict(found.each())
            change()
            os.utime(weights, ns=(0, weights.stat().st_mtime_ns + 1))  # a clock may be coarser than this test
            with pytest.raises(CheckpointError, match="the file changed while it was read"):
                _ = found.digest
        weights.write_bytes(content)
    before = read_adapter(folder, llama)
    with reading(folder, llama) as found:
        (other / weights.name).replace(weights)
        np.testing.assert_array_equal(floats(dict(found.each())[Q].a), floats(before.parts[Q].a))
        assert found.digest == before.digest
    assert read_adapter(folder, llama).digest != before.digest


@pytest.mark.parametrize("name", sorted(shipped_adapters()))
def test_shipped_adapters(name: str) -> None:
    assert name.startswith("quire-mini:")
    folder = find_adapter(name)
    adapter = read_adapter(folder, read_model(folder.parents[1] / "quire-mini").spec, name=name)
    assert (adapter.name, adapter.rank, len(adapter.parts)) == (name, 8, 8 * 7)
    with open_adapter(folder) as file:
        facts = file.facts()
    assert (facts.base, facts.method, facts.alpha) == ("quire-mini", "LoRA", (16.0,))
