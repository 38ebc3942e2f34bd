"""What packing writes, against its definition (csrc/kernels.h) in numpy, byte by byte, on every instruction set."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.weight_files import write
from quire import _native
from quire.loader import Checkpoint, load
from quire.loader.source import Array
from quire.program.tensors import Param, Part
from quire.quant.groups import GroupCodes
from quire.types import CheckpointError

ISAS = _native.supported_isas()
DTYPES = {
    "f32": _native.DType.f32, "bf16": _native.DType.bf16, "f16": _native.DType.f16
}  # fmt: skip
SOURCES = {"F32": _native.DType.f32, "F16": _native.DType.f16, "BF16": _native.DType.bf16}
PANEL = 64
F32 = npt.NDArray[np.float32]


def stored(values: F32, source: str) -> Array:
    """Float32 numbers in the bits of a checkpoint's format."""
    if source == "F32":
        return values
    return values.astype(np.float16) if source == "F16" else to_bf16(values)


def to_f32(data: Array, source: str) -> F32:
    if source == "BF16":
        return (data.astype(np.uint32) << 16).view(np.float32)
    return data.astype(np.float32)


def to_bf16(values: F32) -> npt.NDArray[np.uint16]:
    bits = values.view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def panels(rows: Array, together: int) -> bytes:
    """Rows in panels of 64, `together` elements of a row side by side, zeros where there is no row or element."""
    n, k = rows.shape
    padded = np.zeros((-(-n // PANEL) * PANEL, -(-k // together) * together), rows.dtype)
    padded[:n, :k] = rows
    return padded.reshape(-1, PANEL, padded.shape[1] // together, together).transpose(0, 2, 1, 3).tobytes()


def defined(values: F32, dtype: str) -> bytes:
    """The bytes of a packed weight."""
    if dtype == "f32":
        return panels(values, 1)
    if dtype == "bf16":
        return panels(to_bf16(values), 2)
    # in each cache line the even features of sixteen rows, then the odd ones
    lines = np.frombuffer(panels(values.astype(np.float16), 2), np.uint16).reshape(-1, 16, 2)
    return lines.transpose(0, 2, 1).tobytes()


def pack(values: F32, dtype: str, source: str, isa: str, parts: list[int], scratch: Path) -> bytes:
    core = _native.Executor(isa, 2)
    core.add_param("w", _native.Param.panels(1, *values.shape, DTYPES[dtype]))
    core.allocate_weights()
    start = 0
    for rows in parts:
        data = np.ascontiguousarray(stored(values[start : start + rows], source))
        assert core.put("w", start, data.ctypes.data, SOURCES[source], rows, values.shape[1]) == -1
        start += rows
    with open(scratch, "w+b") as file:
        core.save_weights(file.fileno(), 0, -(-core.weight_bytes // _native.CHUNK_BYTES))
        return scratch.read_bytes()


@settings(max_examples=40)
@given(st.data())
def test_packing_is_its_definition(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    scratch = tmp_path_factory.getbasetemp() / "scratch"
    parts = data.draw(st.lists(st.integers(1, 150), min_size=1, max_size=3))
    cols = data.draw(st.one_of(st.integers(1, 40), st.integers(1, 700)))
    dtype, source = data.draw(st.sampled_from(sorted(DTYPES))), data.draw(st.sampled_from(sorted(SOURCES)))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    values = rng.standard_normal((sum(parts), cols), np.float32) * 10.0 ** rng.integers(
        -6, 3, (sum(parts), 1)
    )
    values[rng.random(len(values)) < 0.1] = 0
    values = to_f32(stored(values.astype(np.float32), source), source)
    expected = defined(values, dtype)
    for isa in ISAS:
        found = pack(values, dtype, source, isa, parts, scratch)
        assert found[: len(expected)] == expected
        assert not any(found[len(expected) :])


def test_every_half_precision_number_is_exact(tmp_path: Path) -> None:
    bits = np.arange(0, 0x7C00, dtype=np.uint16)
    halves = np.concatenate([bits, bits | 0x8000]).view(np.float16).reshape(64, -1)
    values = halves.astype(np.float32)
    for isa in ISAS:
        assert pack(values, "f32", "F16", isa, [64], tmp_path / "scratch") == defined(values, "f32")


class Native:
    """A sink of one parameter on the native core, which `add` declares."""

    def __init__(self, add: Callable[[_native.Executor], None], isa: str) -> None:
        self.core = _native.Executor(isa, 2)
        add(self.core)
        self.core.allocate_weights()

    def put_checked(self, param: Param, row_offset: int, data: Array, dtype: str) -> int | None:
        cols = data.shape[1] if data.ndim == 2 else 0
        bad = self.core.put(param.name, row_offset, data.ctypes.data, SOURCES[dtype], len(data), cols)
        return None if bad < 0 else bad

    def put(self, param: Param, row_offset: int, data: Array, dtype: str) -> None:
        raise AssertionError("a sink that checks is asked to")

    def put_codes(self, param: Param, row_offset: int, codes: GroupCodes) -> None:
        raise AssertionError("nothing here is in groups")


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, -np.nan])
def test_the_first_nonfinite_number_is_named(tmp_path: Path, isa: str, source: str, value: float) -> None:
    rng = np.random.default_rng(0)
    values = to_f32(stored(rng.standard_normal((700, 50), np.float32), source), source)
    values[0, 0] = 65504 if source == "F16" else 3e38  # large, and finite
    param = Param("w", "linear", (Part("w", 700, 50),), "bf16")
    file = tmp_path / "model.safetensors"

    def check() -> None:
        with Checkpoint(tmp_path) as checkpoint:
            sink = Native(
                lambda core: core.add_param("w", _native.Param.panels(1, 700, 50, _native.DType.bf16)), isa
            )
            load([param], checkpoint, sink, block_bytes=50_000)

    write(file, {"w": stored(values, source)})
    check()
    values[699, 49] = values[601, 3] = value
    bits = stored(values, source)
    if source == "BF16" and np.isnan(value):
        bits[601, 3] = bits[699, 49] = 0xFFC0 if np.signbit(value) else 0x7FC0
    write(file, {"w": bits})
    with pytest.raises(CheckpointError, match=r"tensor w: element \[601, 3\] is NaN or infinite"):
        check()


def test_blocks_are_asked_for_ahead_across_tensors(tmp_path: Path) -> None:
    asked: list[tuple[str, int]] = []

    class Watched(Checkpoint):
        def prefetch(self, name: str, start: int, stop: int) -> None:
            asked.append((name, start))
            super().prefetch(name, start, stop)

        def read(self, name: str, start: int = 0, stop: int | None = None) -> Array:
            assert (name, start) in asked
            return super().read(name, start, stop)

    class Null:
        def put(self, param: Param, row_offset: int, data: Array, dtype: str) -> None:
            reads.append(len(asked))

    reads: list[int] = []
    write(tmp_path / "model.safetensors", {name: np.zeros((600, 8), np.float32) for name in "abc"})
    params = [Param(name, "linear", (Part(name, 600, 8),), "f32") for name in "abc"]
    with Watched(tmp_path) as checkpoint:
        load(params, checkpoint, Null(), block_bytes=4096)
    assert asked == [(name, start) for name in "abc" for start in (0, 256, 512)]
    assert reads[0] == len(asked)  # all of a small checkpoint at once
    assert os.path.getsize(tmp_path / "model.safetensors") > 4096
