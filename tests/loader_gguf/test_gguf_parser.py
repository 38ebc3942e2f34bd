"""The GGUF parser against files from strangers: refused with the field and the limit, nothing allocated first."""

from __future__ import annotations

import struct
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.gguf_files import raw, string, tensor_info, type_id, write_arrays
from quire.loader.gguf_file import GGUFArray, GGUFFile, parse_header
from quire.loader.gguf_source import GGUFFiles
from quire.store.gguf_names import shards, single_gguf
from quire.types import CheckpointError, QuireError, UnsupportedModelError

F32 = type_id("F32")


def parse(data: bytes):
    return parse_header(memoryview(data), "x.gguf")


GOOD = raw(
    {"general.architecture": "llama", "general.alignment": 64, "a.list": ["x", "", "long one"],
     "a.numbers": np.arange(5, dtype=np.int32), "a.flag": True, "a.eps": 1e-5},
    [tensor_info("one", (4, 2), F32, 0), tensor_info("two", (32,), type_id("Q8_0"), 64)],
    np.arange(8, dtype=np.float32).tobytes() + bytes(32) + bytes(34),
    alignment=64,
)  # fmt: skip


def test_a_good_file() -> None:
    header = parse(GOOD)
    metadata = header.metadata
    assert metadata["general.architecture"] == "llama"
    assert metadata["a.flag"] is True
    assert metadata["a.eps"] == 1e-5  # the shortest decimal of the stored float32
    listed, numbers = metadata["a.list"], metadata["a.numbers"]
    assert isinstance(listed, GGUFArray)
    assert isinstance(numbers, GGUFArray)
    assert listed.strings() == ["x", "", "long one"]
    assert listed.strings([1, 2]) == ["", "long one"]
    assert listed.strings([]) == []
    assert numbers.numbers().tolist() == [0, 1, 2, 3, 4]
    one, two = header.tensors.values()
    assert (one.name, one.shape, one.end - one.begin) == ("one", (2, 4), 32)
    assert (two.kind.name, two.shape, two.begin - one.begin) == ("Q8_0", (32,), 64)
    with pytest.raises(CheckpointError, match=r"a\.list.*of numbers|array of strings"):
        listed.numbers()
    with pytest.raises(CheckpointError, match=r"a\.numbers"):
        numbers.strings()


def array(kind: int, count: int, data: bytes = b"") -> bytes:
    return struct.pack("<IIQ", 9, kind, count) + data


def one_tensor(shape=(4,), kind=F32, offset=0, name="t", **more) -> bytes:
    return raw({}, [tensor_info(name, shape, kind, offset)], bytes(64), **more)


BAD = {
    "empty": (b"", "not a GGUF file"),
    "magic": (b"GGML" + GOOD[4:], "not a GGUF file"),
    "short": (GOOD[:20], "not a GGUF file"),
    "tensor count 2^64": (raw(counts=(2**64 - 1, 0)), "tensor count: 18446744073709551615 exceeds the limit"),
    "tensor count past the end": (raw(counts=(1000, 0)), "tensor count: 1000 do not fit"),
    "entry count 2^64": (raw(counts=(0, 2**64 - 1)), "metadata count: 18446744073709551615 exceeds"),
    "entry count past the end": (raw(counts=(0, 60_000)), "metadata count: 60000 do not fit"),
    "key length 2^63": (raw(counts=(0, 1)) + struct.pack("<Q", 2**63) + bytes(32), "key 0: length"),
    "key past the end": (raw(counts=(0, 1)) + struct.pack("<Q", 900) + bytes(32), "key 0: length: 900 do not fit"),
    "key not UTF-8": (raw({"k": True}).replace(b"k", b"\xff"), "key 0: not UTF-8"),
    "key twice": (raw({"k": True, "q": True}).replace(b"q", b"k"), "'k' is listed twice"),
    "key empty": (raw({"": True}), "is empty"),
    "string length past the end": (raw({"k": struct.pack("<IQ", 8, 2**40)}), "'k': length: .* exceeds the limit"),
    "string past the end": (raw({"k": struct.pack("<IQ", 8, 100)}), "'k': length: 100 do not fit"),
    "value type": (raw({"k": struct.pack("<IQ", 77, 1)}), "'k': unknown value type 77"),
    "boolean": (raw({"k": struct.pack("<IB", 7, 2)}), "'k': 2 is not a boolean"),
    "array count 2^64": (raw({"k": array(4, 2**64 - 1)}), "'k': count: .* exceeds the limit"),
    "array past the end": (raw({"k": array(12, 1000, bytes(8))}), "'k': count: 1000 do not fit"),
    "array of arrays": (raw({"k": array(9, 1, array(4, 0))}), "nested arrays are not supported"),
    "array type": (raw({"k": array(50, 1, bytes(8))}), "unknown element type 50"),
    "array string past the end": (
        raw({"k": array(8, 2, string("a") + struct.pack("<Q", 2**62))}), "string 1 of 4611686018427387904 bytes"),
    "array strings missing": (raw({"k": array(8, 3, string("a" * 30))}), "string 1 starts past|do not fit"),
    "alignment 0": (raw({"general.alignment": 0}), "general.alignment: 0 is not a power of two"),
    "alignment 48": (raw({"general.alignment": 48}), "alignment: 48 is not a power of two"),
    "alignment huge": (raw({"general.alignment": 2**31}), "alignment: 2147483648 is not"),
    "alignment text": (raw({"general.alignment": "32"}), "alignment: '32' is not"),
    "no axes": (one_tensor(shape=()), "'t': 0 axes, not in"),
    "nine axes": (one_tensor(shape=(1,) * 9), "'t': 9 axes, not in"),
    "negative size": (one_tensor(shape=(-4,)), "'t': a size of .* is not in"),
    "zero size": (one_tensor(shape=(0,)), "'t': a size of .* is not in"),
    "size overflow": (one_tensor(shape=(2**40, 2**40)), "'t' extends .* bytes past the end of the file"),
    "tensor type": (one_tensor(kind=5), "'t': unknown type 5"),
    "part of a block": (one_tensor(shape=(33,), kind=type_id("Q4_0")), "rows of 33 are no multiple of blocks of 32"),
    "offset past the end": (one_tensor(offset=2**60), "'t' extends .* bytes past the end of the file"),
    "offset not aligned": (one_tensor(offset=4), "'t': offset 4 is not a multiple"),
    "data past the end": (one_tensor(shape=(17,)), "'t' extends 4 bytes past the end of the file"),
    "tensor twice": (
        raw({}, [tensor_info("t", (4,), F32, 0), tensor_info("t", (4,), F32, 32)], bytes(64)), "'t' is listed twice"),
    "overlap": (
        raw({}, [tensor_info("a", (16,), F32, 0), tensor_info("b", (4,), F32, 32)], bytes(64)),
        "'b' overlaps tensor 'a'"),
    "long name": (one_tensor(name="n" * 2000), "name of tensor 0: length: 2000 exceeds the limit of 1024"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_refused_before_anything_is_made(name: str) -> None:
    data, message = BAD[name]
    tracemalloc.start()
    with pytest.raises(CheckpointError, match=message):
        parse(data)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 200_000


@pytest.mark.parametrize("version", [0, 1, 4, 0x03000000])
def test_other_versions_are_refused_by_number(version: int) -> None:
    with pytest.raises(UnsupportedModelError, match=f"version {version}"):
        parse(raw(version=version) + bytes(8))


@settings(max_examples=400)
@given(st.data())
def test_any_damage_is_one_clear_error(data: st.DataObject) -> None:
    """Bytes changed, cut or repeated: a QuireError naming the file, or a header that fits the file."""
    damaged = bytearray(GOOD)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(damaged) - 1))
        damaged[at] = data.draw(st.sampled_from([0, 1, 0x7F, 0x80, 0xFF, damaged[at] ^ 1]))
    end = data.draw(st.one_of(st.just(len(damaged)), st.integers(0, len(damaged))))
    try:
        header = parse(bytes(damaged[:end]))
        for value in header.metadata.values():
            if isinstance(value, GGUFArray):
                (value.strings if value.holds_strings else value.numbers)()
    except QuireError as error:
        message = str(error)
    else:
        message = "x.gguf: fine"
        assert all(0 <= t.begin <= t.end <= end for t in header.tensors.values())
    assert message.startswith("x.gguf: ")


@settings(max_examples=150)
@given(st.binary(max_size=200))
def test_any_bytes_after_the_magic(tail: bytes) -> None:
    with pytest.raises(QuireError, match=r"^x\.gguf: "):
        parse(b"GGUF" + struct.pack("<I", 3) + tail + b"\xff" * 16)


def test_reading_files_of_the_gguf_package(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf", reason="the gguf package (extra dev) is the oracle")
    path = tmp_path / "written.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(3)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_token_list(["a", "ü", "▁x"])
    writer.add_token_scores([0.5, -1.0, 2.0])
    writer.add_add_bos_token(True)
    weight = np.arange(64, dtype=np.float32).reshape(2, 32)
    writer.add_tensor("plain", weight)
    writer.add_tensor("packed", gguf.quantize(weight, gguf.GGMLQuantizationType.Q8_0),
                      raw_dtype=gguf.GGMLQuantizationType.Q8_0)  # fmt: skip
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with GGUFFiles(path) as files:
        assert files.metadata["llama.block_count"] == 3
        assert files.metadata["llama.attention.layer_norm_rms_epsilon"] == 1e-6
        assert files.metadata["tokenizer.ggml.tokens"].strings() == ["a", "ü", "▁x"]
        assert files.metadata["tokenizer.ggml.scores"].numbers().tolist() == [0.5, -1.0, 2.0]
        np.testing.assert_array_equal(files.read("plain", 0, 2), weight)
        np.testing.assert_allclose(files.read("packed", 1, 2), weight[1:], atol=0.3)


def test_the_gguf_package_reads_our_files(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf", reason="the gguf package (extra dev) is the oracle")
    weight = np.arange(6, dtype=np.float32).reshape(2, 3)
    metadata = {"general.architecture": "x", "n": 7, "minus": -7, "big": 2**40, "eps": 0.5, "on": True,
                "texts": ["a", "ü"], "numbers": np.array([1, 2], np.float32)}  # fmt: skip
    write_arrays(tmp_path / "a.gguf", metadata, {"w": weight, "v": weight[0].astype(np.float16)})
    reader = gguf.GGUFReader(tmp_path / "a.gguf")
    found = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    assert found == {**metadata, "numbers": [1.0, 2.0]}
    tensors = {tensor.name: tensor.data for tensor in reader.tensors}
    np.testing.assert_array_equal(tensors["w"], weight)
    np.testing.assert_array_equal(tensors["v"], weight[0].astype(np.float16))


def test_files_that_are_not_files(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="No such file"):
        GGUFFile(tmp_path / "none.gguf")
    with pytest.raises(CheckpointError, match="not a regular file"):
        GGUFFile(tmp_path)
    (tmp_path / "empty.gguf").touch()
    with pytest.raises(CheckpointError, match="too short"):
        GGUFFile(tmp_path / "empty.gguf")


def write_shard(path: Path, number: int, count: int, tensor: str) -> None:
    metadata = {"split.no": np.uint16(number).item(), "split.count": count}
    write_arrays(path, metadata, {tensor: np.full((2, 4), number, np.float32)})


def test_split_files(tmp_path: Path) -> None:
    names = [f"m-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    for number, name in enumerate(names):
        write_shard(tmp_path / name, number, 3, f"t{number}")
    assert single_gguf(tmp_path) == tmp_path / names[0]
    for name in names:  # any of them stands for all
        with GGUFFiles(tmp_path / name) as files:
            assert [float(files.read(f"t{i}", 1, 2)[0, 0]) for i in range(3)] == [0, 1, 2]
    write_shard(tmp_path / names[1], 2, 3, "t1")
    with pytest.raises(CheckpointError, match=r"00002-of-00003\.gguf: split\.no 2"):
        GGUFFiles(tmp_path / names[0])
    write_shard(tmp_path / names[1], 1, 3, "t0")
    with pytest.raises(CheckpointError, match="'t0' is in both"):
        GGUFFiles(tmp_path / names[0])
    (tmp_path / names[2]).unlink()
    with pytest.raises(CheckpointError, match=r"00003-of-00003\.gguf is missing"):
        shards(tmp_path / names[0])
    with pytest.raises(CheckpointError, match="is not in"):
        shards(tmp_path / "m-00009-of-00003.gguf")


def test_a_folder_with_two_models_needs_a_name(tmp_path: Path) -> None:
    assert single_gguf(tmp_path) is None
    for name in ("a.gguf", "b.gguf", "mmproj-a.gguf"):
        (tmp_path / name).touch()
    with pytest.raises(CheckpointError, match=r"2 GGUF models \(a.gguf, b.gguf\)"):
        single_gguf(tmp_path)
