"""The safetensors reader: what the reference implementation writes, every malformed header, and fuzz."""

from __future__ import annotations

import json
import os
import resource
import struct
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.weight_files import entry, raw, write
from quire.loader.safetensors import SafetensorsFile, parse_header
from quire.types import CheckpointError


def opened(path: Path, content: bytes) -> SafetensorsFile:
    path.write_bytes(content)
    return SafetensorsFile(path)


def test_reads_files_of_the_reference_implementation(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = {
        "f32": torch.randn(3, 5, generator=generator),
        "f16": torch.randn(4, generator=generator).half(),
        "bf16": torch.randn(7, 2, generator=generator).bfloat16(),
        "f64": torch.randn(2, 2, 2, generator=generator).double(),
        "i64": torch.arange(6).reshape(2, 3),
        "u8": torch.arange(5, dtype=torch.uint8),
        "bool": torch.tensor([True, False]),
        "f8": torch.randn(4, generator=generator).to(torch.float8_e4m3fn),
        "empty": torch.zeros(0, 4),
    }
    path = tmp_path / "model.safetensors"
    safetensors.torch.save_file(tensors, path, metadata={"format": "pt"})
    file = SafetensorsFile(path)
    assert set(file.names()) == set(tensors)
    for name, tensor in tensors.items():
        assert file.info(name).shape == tuple(tensor.shape)
        assert file.info(name).nbytes == tensor.nbytes
        assert file.read(name).tobytes() == tensor.contiguous().view(torch.uint8).numpy().tobytes()
        file.release(name)
    assert file.info("bf16").dtype == "BF16"
    assert file.read("bf16").dtype == np.uint16
    file.close()


def test_row_ranges(tmp_path: Path) -> None:
    matrix = np.arange(60, dtype=np.float32).reshape(12, 5)
    file = SafetensorsFile(write(tmp_path / "a", {"x": np.zeros(3, np.float16), "m": matrix}, pad=5))
    assert np.array_equal(file.read("m", 3, 7), matrix[3:7])
    assert np.array_equal(file.read("m", 10), matrix[10:])
    assert file.read("m", 4, 4).shape == (0, 5)
    assert not file.read("m").flags.writeable
    for start, stop in ((-1, 2), (3, 2), (0, 13)):
        with pytest.raises(IndexError, match="m: rows"):
            file.read("m", start, stop)
    with pytest.raises(KeyError):
        file.info("absent")


def test_arrays_outlive_release_and_close(tmp_path: Path) -> None:
    matrix = np.arange(4096, dtype=np.float32).reshape(64, 64)
    file = SafetensorsFile(write(tmp_path / "a", {"m": matrix}))
    view = file.read("m")
    file.release("m")
    file.close()
    assert np.array_equal(view, matrix)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_release_gives_pages_back(tmp_path: Path) -> None:
    file = SafetensorsFile(write(tmp_path / "a", {"m": np.ones((4096, 1024), np.float32)}))

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    before = resident()
    assert file.read("m").sum() == 4096 * 1024
    assert resident() - before > 12 * 2**20
    file.release("m")
    assert resident() - before < 4 * 2**20


def test_file_handles_are_not_kept_by_failures(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        with pytest.raises(CheckpointError):
            opened(tmp_path / "a", raw({}, b"x"))
    assert len(os.listdir("/proc/self/fd")) <= before + 1


F32_2 = entry("F32", [2], 0, 8)
MALFORMED: dict[str, tuple[bytes, str]] = {
    "empty file": (b"", "0 bytes are too short"),
    "seven bytes": (b"\0" * 7, "7 bytes are too short"),
    "header length 2^63": (struct.pack("<Q", 2**63) + b"{}", "header of 9223372036854775808 bytes exceeds"),
    "header past the file": (struct.pack("<Q", 3) + b"{}", "header of 3 bytes in a file of 10 bytes"),
    "no header": (raw(b""), "does not start with"),
    "not JSON": (raw(b"{nonsense}"), "header: not valid JSON"),
    "not an object": (raw(b"[1, 2]"), "does not start with"),
    "space first": (raw(b" {}"), "does not start with"),
    "not UTF-8": (raw(b'{"\xff": 1}'), "header: not valid JSON"),
    "deep nesting": (raw(b'{"a":' + b"[" * 200_000), "nested too deeply"),
    "huge integer": (raw(b'{"a":' + b"1" * 5000 + b"}"), "not valid JSON"),
    "duplicate name": (
        raw(f'{{"w": {json.dumps(F32_2)}, "w": {json.dumps(F32_2)}}}'.encode(), bytes(8)),
        "duplicate key 'w'",
    ),
    "entry is a list": (raw({"w": []}), "tensor 'w': expected exactly dtype, shape and data_offsets"),
    "entry lacks a key": (raw({"w": {"dtype": "F32", "shape": [2]}}), "tensor 'w': expected exactly"),
    "entry has more keys": (raw({"w": {**F32_2, "stride": [1]}}, bytes(8)), "tensor 'w': expected exactly"),
    "unknown dtype": (raw({"w": entry("F7", [2], 0, 8)}, bytes(8)), "tensor 'w': unknown dtype 'F7'"),
    "dtype a number": (raw({"w": {**F32_2, "dtype": 3}}, bytes(8)), "unknown dtype 3"),
    "negative size": (raw({"w": entry("F32", [-2], 0, 8)}, bytes(8)), "shape [-2]"),
    "huge size": (raw({"w": entry("F32", [2**62], 0, 8)}, bytes(8)), "not in [0, 2^48]"),
    "huge product": (raw({"w": entry("F32", [2**40] * 30, 0, 8)}, bytes(8)), "tensor 'w': F32 of shape"),
    "too many axes": (raw({"w": entry("F32", [1] * 33, 0, 4)}, bytes(4)), "at most 32 sizes"),
    "fractional size": (raw({"w": {**F32_2, "shape": [2.0]}}, bytes(8)), "shape [2.0]"),
    "size true": (raw({"w": {**F32_2, "shape": [True, 2]}}, bytes(8)), "shape [True, 2]"),
    "three offsets": (raw({"w": {**F32_2, "data_offsets": [0, 4, 8]}}, bytes(8)), "not a pair of offsets"),
    "negative offset": (raw({"w": entry("F32", [2], -8, 0)}, bytes(8)), "not a pair of offsets"),
    "offsets reversed": (raw({"w": entry("F32", [2], 8, 0)}, bytes(8)), "data_offsets span -8"),
    "bytes disagree": (raw({"w": entry("F16", [2], 0, 8)}, bytes(8)), "needs 4 bytes, but data_offsets span 8"),
    "overlap": (
        raw({"a": entry("F32", [2], 0, 8), "b": entry("F32", [2], 4, 12)}, bytes(12)),
        "tensor 'b' overlaps tensor 'a'",
    ),
    "same bytes twice": (raw({"a": F32_2, "b": F32_2}, bytes(8)), "tensor 'b' overlaps tensor 'a'"),
    "hole": (
        raw({"a": entry("F32", [1], 0, 4), "b": entry("F32", [1], 8, 12)}, bytes(12)),
        "4 unused bytes before tensor 'b'",
    ),
    "hole at the start": (raw({"a": entry("F32", [1], 4, 8)}, bytes(8)), "4 unused bytes before tensor 'a'"),
    "trailing bytes": (raw({"a": F32_2}, bytes(9)), "1 trailing bytes after tensor 'a'"),
    "nothing but data": (raw({}, bytes(9)), "9 trailing bytes after the header"),
    "past the end": (raw({"a": F32_2}, bytes(5)), "tensor 'a' extends 3 bytes past the end of the file"),
}  # fmt: skip


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed(tmp_path: Path, name: str) -> None:
    content, message = MALFORMED[name]
    with pytest.raises(CheckpointError) as caught:
        opened(tmp_path / "bad.safetensors", content)
    assert str(caught.value).startswith("bad.safetensors: ")
    assert message in str(caught.value)
    assert len(str(caught.value)) < 500


def test_special_files(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="No such file"):
        SafetensorsFile(tmp_path / "absent")
    with pytest.raises(CheckpointError, match="not a regular file"):
        SafetensorsFile(tmp_path)
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(CheckpointError, match="not a regular file"):
        SafetensorsFile(tmp_path / "fifo")


def test_refusals_allocate_next_to_nothing(tmp_path: Path) -> None:
    """A lying header costs no more memory than its own bytes."""
    path = tmp_path / "a"
    tracemalloc.start()
    try:
        for name, (content, _) in MALFORMED.items():
            if name in {"deep nesting", "huge integer"}:
                continue
            path.write_bytes(content)
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            with pytest.raises(CheckpointError):
                SafetensorsFile(path)
            assert tracemalloc.get_traced_memory()[1] - before < 2**18, name
    finally:
        tracemalloc.stop()


@settings(max_examples=300)
@given(st.binary(max_size=64), st.integers(0, 64), st.booleans())
def test_arbitrary_bytes_never_crash(header: bytes, data_bytes: int, brace: bool) -> None:
    try:
        parse_header((b"{" if brace else b"") + header, data_bytes, "f")
    except CheckpointError as error:
        assert str(error).startswith("f: ")  # noqa: PT017 - either outcome is right


SIZES = st.integers(-2, 6) | st.sampled_from([2**31, 2**48, 2**63, 2**64, -(2**63)])
VALUES = st.none() | st.booleans() | SIZES | st.floats() | st.text(max_size=3) | st.lists(SIZES, max_size=3)
ENTRIES = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "BF16", "U8", "F64", "X"]) | VALUES,
        "shape": st.lists(SIZES, max_size=4) | VALUES,
        "data_offsets": st.lists(SIZES, min_size=2, max_size=2) | VALUES,
    }
)


@settings(max_examples=500)
@given(st.dictionaries(st.text(max_size=4), ENTRIES | VALUES, max_size=3), st.integers(0, 48))
def test_arbitrary_entries_are_refused_or_in_range(header: dict[str, Any], data_bytes: int) -> None:
    """What is accepted tiles the data part exactly."""
    try:
        entries = parse_header(json.dumps(header).encode(), data_bytes, "f")
    except CheckpointError:
        return
    position = 0
    for item in entries.values():
        assert (item.begin, item.end - item.begin) == (position, item.info.nbytes)
        position = item.end
    assert position == data_bytes


@settings(max_examples=150)
@given(st.data())
def test_any_damage_to_a_good_file_is_refused_or_harmless(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Truncate, extend or flip one byte: the reader refuses, or every tensor still lies inside the file."""
    path = tmp_path_factory.getbasetemp() / "damaged.safetensors"
    good = write(path, {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.ones(4, np.uint16)})
    content = bytearray(good.read_bytes())
    match data.draw(st.sampled_from(["cut", "grow", "flip"])):
        case "cut":
            del content[data.draw(st.integers(0, len(content) - 1)) :]
        case "grow":
            content += data.draw(st.binary(min_size=1, max_size=9))
        case "flip":
            content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
    try:
        file = opened(path, bytes(content))
    except CheckpointError:
        return
    for name in file.names():
        assert file.read(name, 0).nbytes == file.info(name).nbytes
    file.close()
