"""The pull loop: every part reaches the sink once and unchanged, and a wrong checkpoint is refused before."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.specs import BF16, decoder_spec
from helpers.weight_files import linear, vector, write
from quire.loader import Checkpoint, LoadRules, LoadSummary, RandomWeights, load
from quire.loader.source import TensorInfo
from quire.program.lower import lower
from quire.program.tensors import Param, Part
from quire.spec import ModelSpec
from quire.types import CheckpointError

RNG = np.random.default_rng(0)


class Collector:
    """A sink that assembles parameters and refuses rows put twice or out of place."""

    def __init__(self) -> None:
        self.arrays: dict[str, np.ndarray] = {}
        self.rows: dict[str, list[int]] = {}
        self.puts: list[tuple[str, int, int]] = []

    def put(self, param: Param, row_offset: int, data: np.ndarray, dtype: str) -> None:
        shape = (param.rows,) if param.kind == "vector" else (param.rows, param.cols)
        out = self.arrays.setdefault(param.name, np.zeros(shape, data.dtype))
        assert data.flags.c_contiguous
        assert data.flags.aligned
        assert data.dtype == {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}[dtype]
        out[row_offset : row_offset + len(data)] = data
        self.rows.setdefault(param.name, []).extend(range(row_offset, row_offset + len(data)))
        self.puts.append((param.name, row_offset, len(data)))


PARAMS = [
    linear("qkv", ("q", 6, 4), ("k", 2, 4), ("v", 2, 4)),
    vector("norm", ("n", 4)),
    vector("qkv.bias", ("q.bias", 6), ("k.bias", 2), ("v.bias", 2)),
]
TENSORS: dict[str, np.ndarray] = {
    "q": RNG.standard_normal((6, 4), np.float32),
    "k": RNG.standard_normal((2, 4), np.float32).astype(np.float16),
    "v": RNG.integers(0, 0x7F80, (2, 4), np.uint16),
    "n": np.ones(4, np.float32),
    "q.bias": RNG.standard_normal(6, np.float32),
    "k.bias": RNG.standard_normal(2, np.float32),
    "v.bias": RNG.standard_normal(2, np.float32),
}
SAME = {**TENSORS, "k": TENSORS["k"].astype(np.float32), "v": np.zeros((2, 4), np.float32)}


def loaded(
    folder: Path, tensors: Mapping[str, np.ndarray], params: list[Param] = PARAMS, **options: Any
) -> tuple[Collector, LoadSummary]:
    write(folder / "model.safetensors", tensors, pad=options.pop("pad", 0))
    sink = Collector()
    with Checkpoint(folder) as checkpoint:
        return sink, load(params, checkpoint, sink, **options)


def refused(folder: Path, tensors: Mapping[str, np.ndarray], **options: Any) -> str:
    """The message of a refusal; nothing may have reached the sink before it."""
    write(folder / "model.safetensors", tensors)
    sink = Collector()
    with Checkpoint(folder) as checkpoint, pytest.raises(CheckpointError) as caught:
        load(PARAMS, checkpoint, sink, **options)
    assert not sink.puts
    return str(caught.value)


@pytest.mark.parametrize("pad", [0, 1, 2, 3])
def test_parts_are_stacked_in_order(tmp_path: Path, pad: int) -> None:
    """Also when the data part starts at an odd byte, which the format allows."""
    steps: list[tuple[int, int]] = []
    sink, summary = loaded(tmp_path, SAME, pad=pad, progress=lambda done, total: steps.append((done, total)))
    assert np.array_equal(sink.arrays["qkv"], np.concatenate([SAME["q"], SAME["k"], SAME["v"]]))
    biases = np.concatenate([SAME["q.bias"], SAME["k.bias"], SAME["v.bias"]])
    assert np.array_equal(sink.arrays["qkv.bias"], biases)
    for param in PARAMS:
        assert sorted(sink.rows[param.name]) == list(range(param.rows))
    total = sum(tensor.nbytes for tensor in SAME.values())
    assert summary == LoadSummary(total, 7, ("F32",), ())
    assert [done for done, _ in steps] == sorted(done for done, _ in steps)
    assert steps[-1] == (total, total)


def test_formats_may_be_mixed(tmp_path: Path) -> None:
    write(tmp_path / "model.safetensors", TENSORS)
    seen: list[tuple[str, bytes]] = []

    class Bytes:
        def put(self, param: Param, row_offset: int, data: np.ndarray, dtype: str) -> None:
            seen.append((dtype, data.tobytes()))

    with Checkpoint(tmp_path) as checkpoint:
        summary = load(PARAMS, checkpoint, Bytes())
    assert summary.dtypes == ("BF16", "F16", "F32")
    formats = [("F32", "q"), ("F16", "k"), ("BF16", "v")]
    assert seen[:3] == [(dtype, TENSORS[name].tobytes()) for dtype, name in formats]


def test_large_tensors_come_in_row_blocks(tmp_path: Path) -> None:
    big = RNG.standard_normal((1500, 4), np.float32)
    params = [linear("w", ("a", 900, 4), ("b", 600, 4))]
    sink, _ = loaded(tmp_path, {"a": big[:900], "b": big[900:]}, params, block_bytes=600 * 4 * 4)
    assert sink.puts == [("w", 0, 512), ("w", 512, 388), ("w", 900, 512), ("w", 1412, 88)]
    assert np.array_equal(sink.arrays["w"], big)


def test_missing_tensors(tmp_path: Path) -> None:
    without = {name: tensor for name, tensor in SAME.items() if name not in {"k", "n"}}
    assert refused(tmp_path, without) == "the checkpoint lacks 2 tensors: k, n"
    assert "7 tensors: q, k, v, n, q.bias and 2 more" in refused(tmp_path, {"x": SAME["n"]})


def test_tensors_that_the_model_does_not_use(tmp_path: Path) -> None:
    message = refused(tmp_path, {**SAME, "o.bias": SAME["n"]})
    assert "does not imply" in message
    assert "1 tensor: o.bias" in message
    _, summary = loaded(tmp_path, {**SAME, "old.inv_freq": SAME["n"]}, rules=LoadRules((r"old\..*",)))
    assert summary.skipped == ("old.inv_freq",)
    assert "xold.inv_freq" in refused(
        tmp_path, {**SAME, "xold.inv_freq": SAME["n"]}, rules=LoadRules((r"old\..*",))
    )


def test_wrong_shape(tmp_path: Path) -> None:
    message = refused(tmp_path, {**SAME, "q": SAME["q"].T.copy()})
    assert message == "tensor q: shape [4, 6], but the config implies [6, 4]"
    assert "tensor n: shape [4, 1]" in refused(tmp_path, {**SAME, "n": SAME["n"][:, None]})


def test_wrong_format(tmp_path: Path) -> None:
    assert "tensor n: dtype F64 is not one of BF16, F16, F32" in refused(tmp_path, {**SAME, "n": np.ones(4)})
    assert "dtype I64" in refused(tmp_path, {**SAME, "n": np.ones(4, np.int64)})


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_nonfinite_values_are_named(tmp_path: Path, value: float) -> None:
    bad = SAME["k"].copy()
    bad[1, 2] = value
    with pytest.raises(CheckpointError, match=r"tensor k: element \[1, 2\] is NaN or infinite"):
        loaded(tmp_path, {**SAME, "k": bad})


def test_nonfinite_position_counts_from_the_tensor(tmp_path: Path) -> None:
    bad = np.zeros((700, 4), np.uint16)
    bad[600, 3] = 0xFF80
    with pytest.raises(CheckpointError, match=r"tensor a: element \[600, 3\]"):
        loaded(tmp_path, {"a": bad}, [linear("w", ("a", 700, 4))], block_bytes=1)


TIED = LoadRules(twins={"q": "head"})


def test_tied_twin_must_be_equal(tmp_path: Path) -> None:
    _, summary = loaded(tmp_path, {**SAME, "head": SAME["q"]}, rules=TIED)
    assert summary.skipped == ("head",)
    for other in (SAME["q"] + 1, SAME["q"].astype(np.float16), SAME["n"]):
        message = refused(tmp_path, {**SAME, "head": other}, rules=TIED)
        assert "tensor head differs from q" in message
        assert "tie_word_embeddings" in message


def test_tied_twin_serves_when_it_is_the_only_one(tmp_path: Path) -> None:
    tensors = {("head" if name == "q" else name): tensor for name, tensor in SAME.items()}
    sink, summary = loaded(tmp_path, tensors, rules=TIED)
    assert np.array_equal(sink.arrays["qkv"][:6], SAME["q"])
    assert summary.skipped == ()


def tiny(tied: bool) -> ModelSpec:
    spec = decoder_spec(40, 8, 12, (2, 1, 4), [0, 0], tied=tied)
    return replace(spec, ignored=(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",))


def checkpoint_of(spec: ModelSpec) -> dict[str, np.ndarray]:
    weights = RandomWeights(lower(spec, BF16).params)
    return {name: weights.read(name) for name in weights.names()}


def test_rules_of_a_spec(tmp_path: Path) -> None:
    spec = tiny(tied=True)
    tensors = checkpoint_of(spec)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    tensors["model.layers.1.self_attn.rotary_emb.inv_freq"] = np.ones(2, np.float32)
    _, summary = loaded(tmp_path, tensors, list(lower(spec, BF16).params), rules=LoadRules.of(spec))
    assert sorted(summary.skipped) == ["lm_head.weight", "model.layers.1.self_attn.rotary_emb.inv_freq"]


def test_hints(tmp_path: Path) -> None:
    spec = tiny(tied=False)
    params = list(lower(spec, BF16).params)
    tensors = checkpoint_of(spec)
    tensors.pop("lm_head.weight")
    with pytest.raises(CheckpointError, match="is tie_word_embeddings = true missing in the config"):
        loaded(tmp_path, tensors, params, rules=LoadRules.of(spec))
    base = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    with pytest.raises(CheckpointError, match=r"lack the 'model\.' prefix"):
        loaded(tmp_path, base, params, rules=LoadRules.of(spec))


def test_nothing_is_read_before_all_is_checked() -> None:
    """A source that cannot be read still shows errors in its names."""

    class Unreadable:
        def names(self) -> list[str]:
            return ["q", "k", "v", "n"]

        def info(self, name: str) -> TensorInfo:
            return TensorInfo(name, "F32", {"q": (6, 4), "n": (4,)}.get(name, (2, 4)))

        def read(self, name: str, start: int = 0, stop: int | None = None) -> np.ndarray:
            raise AssertionError("read")

        def release(self, name: str) -> None:
            raise AssertionError("release")

    with pytest.raises(CheckpointError, match=r"lacks 3 tensors: q\.bias"):
        load(PARAMS, Unreadable(), Collector())


def test_rows_of_a_larger_tensor_and_a_vector_that_is_stored_as_a_matrix(tmp_path: Path) -> None:
    """q, k and v in one tensor, a norm of each head as a matrix, and a norm stored as the difference from one."""
    fused = RNG.standard_normal((2000, 4), np.float32)
    heads = RNG.standard_normal((3, 5), np.float32).astype(np.float16)
    centred = RNG.integers(0, 0x3F80, 6, np.uint16)
    params = [
        Param("q", "linear", (Part("qkv", 1200, 4, first=0, stored=(2000, 4)),), "f32"),
        Param(
            "kv", "linear", tuple(Part("qkv", 400, 4, first=n, stored=(2000, 4)) for n in (1200, 1600)), "f32"
        ),
        Param("heads", "vector", (Part("heads", 15, stored=(3, 5)),), "f32"),
        Param("norm", "vector", (Part("norm", 6, added=1.0),), "f32"),
    ]
    seen: list[tuple[int, int]] = []
    tensors = {"qkv": fused, "heads": heads, "norm": centred}
    sink, summary = loaded(
        tmp_path, tensors, params, progress=lambda *step: seen.append(step), block_bytes=4096
    )
    np.testing.assert_array_equal(np.concatenate([sink.arrays["q"], sink.arrays["kv"]]), fused)
    np.testing.assert_array_equal(sink.arrays["heads"], heads.reshape(-1))
    widened = (centred.astype(np.uint32) << 16).view(np.float32)
    np.testing.assert_array_equal(sink.arrays["norm"], np.float32(1) + widened)
    total = fused.nbytes + heads.nbytes + centred.nbytes
    assert seen[-1] == (total, total)
    assert (summary.nbytes, summary.tensors) == (total, 3)


def test_a_fused_tensor_of_another_size_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "model.safetensors", {"qkv": np.zeros((9, 4), np.float32)})
    params = [Param("q", "linear", (Part("qkv", 6, 4, stored=(10, 4)),), "f32")]
    with Checkpoint(tmp_path) as checkpoint, pytest.raises(CheckpointError, match=r"\[9, 4\].*\[10, 4\]"):
        load(params, checkpoint, Collector())


def test_nan_in_rows_of_a_larger_tensor_is_named_by_its_place_there(tmp_path: Path) -> None:
    data = np.zeros((10, 4), np.float32)
    data[7, 2] = np.nan
    write(tmp_path / "model.safetensors", {"qkv": data})
    params = [Param("kv", "linear", (Part("qkv", 4, 4, first=6, stored=(10, 4)),), "f32")]
    with Checkpoint(tmp_path) as checkpoint, pytest.raises(CheckpointError, match=r"qkv: element \[7, 2\]"):
        load(params, checkpoint, Collector())


def test_names_with_another_beginning(tmp_path: Path) -> None:
    tensors = {f"text.model.{name}": array for name, array in SAME.items()} | {
        "tower.x": np.ones(2, np.float32)
    }
    rules = LoadRules(ignored=(r"tower\..*",), prefixes=(("text.model.", ""), ("text.", "other.")))
    sink, summary = loaded(tmp_path, tensors, rules=rules)
    np.testing.assert_array_equal(sink.arrays["norm"], SAME["n"])
    assert summary.skipped == ("tower.x",)
    write(tmp_path / "model.safetensors", {"text.model.q": SAME["q"], "q": SAME["q"]})
    with Checkpoint(tmp_path) as checkpoint, pytest.raises(CheckpointError, match=r"text\.model\.q and q"):
        load(PARAMS, checkpoint, Collector(), rules=rules)
