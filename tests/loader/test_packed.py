"""Packed weights on disk: equal to fresh packing bit by bit, found only for what they were made of, never used when
they are not as they were written, and kept within their limit.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.folders import llama_folder
from quire import LLM, _native
from quire.cli.main import main
from quire.executor.native import NativeExecutor
from quire.loader import (
    Checkpoint,
    DamagedError,
    PackedWeights,
    checkpoint_files,
    fingerprint,
    load,
    packed_key,
)
from quire.loader.packed import Packer
from quire.program.formats import Groups, NumberFormats, WeightFormat
from quire.program.lower import lower
from quire.program.program import Program
from quire.spec.facts import read_model

INT8 = WeightFormat("i8", Groups(128, "bf16", rotated=True))
FORMATS = {
    "f32": NumberFormats("f32", "f32"),
    "bf16": NumberFormats("bf16", "bf16"),
    "f16": NumberFormats("f16", "f16"),
    "int8": NumberFormats("bf16", "bf16", linears=INT8, head=INT8),
}
# SHA-256 of the packed weights of `folder` in each format under PACK_LAYOUT, the same on every instruction set.
# When packing changes what it writes, raise kPackLayout (csrc/kernels.h) and put the new digests here.
LAYOUTS: dict[int, dict[str, str]] = {
    1: {
        "f32": "53f3c6ae4ba76ea7365391cb60b4ab67ad401b11ea41b90c8e5d780c245ecd97",
        "bf16": "698341d9a0e3738e10017ba9b6b3475884d51e14877ab71fed6a5e2ba14b12ca",
        "f16": "b83ee952da7bb0660c3d4562f3abfd1a9d50b331a701566564999200b4a5090a",
        "int8": "8a380e1c891cb6d4742a5f1896304baae6dcf159388e767a0f601d1bb854bab7",
    },
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llama_folder(tmp_path_factory.mktemp("packed") / "model", vocab_size=9000, hidden_size=200)


def program_of(folder: Path, formats: str = "bf16") -> Program:
    return lower(read_model(folder).spec, FORMATS[formats])


def packed(folder: Path, formats: str = "bf16", isa: str = "") -> NativeExecutor:
    program = program_of(folder, formats)
    executor = NativeExecutor(program, threads=2, isa=isa)
    with Checkpoint(folder) as checkpoint:
        load(program.params, checkpoint, executor)
    return executor


def empty(folder: Path, formats: str = "bf16") -> NativeExecutor:
    return NativeExecutor(program_of(folder, formats), threads=2)


def content(executor: Packer, scratch: Path) -> bytes:
    """The weights an executor holds."""
    with open(scratch, "w+b") as file:
        executor.save_weights(file.fileno(), 0, executor.weight_chunks)
        return scratch.read_bytes()


def store(cache: PackedWeights, key: str, executor: Packer) -> Path:
    cache.store(key, executor, {"model": "name"}).join()
    return cache.path(key)


@pytest.mark.parametrize("formats", FORMATS)
def test_mapped_weights_are_bit_equal_to_fresh_packing(folder: Path, formats: str, tmp_path: Path) -> None:
    fresh, mapped = packed(folder, formats), empty(folder, formats)
    cache = PackedWeights(tmp_path / "cache", 2**30)
    path = store(cache, "k" * 64, fresh)
    facts = cache.restore("k" * 64, mapped)
    assert facts is not None
    assert facts["model"] == "name"
    assert content(mapped, tmp_path / "a") == content(fresh, tmp_path / "b")
    assert content(empty(folder, formats), tmp_path / "c") != content(
        fresh, tmp_path / "b"
    )  # the test can fail
    assert mapped.memory() == fresh.memory()
    assert path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(RuntimeError, match="not when they are mapped"):
        mapped.put(mapped.program.params[0], 0, np.zeros((1, 200), np.float32), "F32")


@pytest.mark.parametrize("formats", FORMATS)
def test_layout_number_belongs_to_these_bytes(formats: str, tmp_path: Path) -> None:
    folder = llama_folder(tmp_path / "model")
    digests = {
        isa: hashlib.sha256(content(packed(folder, formats, isa), tmp_path / isa)).hexdigest()
        for isa in _native.supported_isas()
    }
    assert set(digests.values()) == {LAYOUTS[_native.PACK_LAYOUT][formats]}


def flip(path: Path, offset: int, bit: int = 0) -> None:
    with path.open("r+b") as file:
        file.seek(offset, os.SEEK_SET if offset >= 0 else os.SEEK_END)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1 << bit]))


def cut(path: Path, size: int) -> None:
    os.truncate(path, size)


DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "first bit": (lambda p: flip(p, 0), "checksum"),
    "a bit of padding": (lambda p: flip(p, 9000 * 200 * 2 + 300, 7), "checksum"),
    "cut to a page": (lambda p: cut(p, 4096), "truncated"),
    "cut by one byte": (lambda p: cut(p, p.stat().st_size - 1), "truncated"),
    "empty": (lambda p: cut(p, 0), "truncated"),
    "longer": (lambda p: cut(p, p.stat().st_size + 1), "truncated"),
    "a bit behind the weights": (lambda p: flip(p, -100), "its last part"),
    "a bit of a length": (lambda p: flip(p, -56), "truncated"),
    "others may write": (lambda p: p.chmod(0o666), "other users can write"),
    "a FIFO": (lambda p: (p.unlink(), os.mkfifo(p)), "not a regular file"),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_refused_and_removed(folder: Path, tmp_path: Path, damage: str) -> None:
    cache, key = PackedWeights(tmp_path / "cache", 2**30), "d" * 64
    fresh = packed(folder)
    path = store(cache, key, fresh)
    harm, why = DAMAGE[damage]
    harm(path)
    executor = empty(folder)
    with pytest.raises(DamagedError, match=why):
        cache.restore(key, executor)
    assert not path.exists()
    with Checkpoint(folder) as checkpoint:  # the executor is as good as new
        load(executor.program.params, checkpoint, executor)
    assert content(executor, tmp_path / "a") == content(fresh, tmp_path / "b")


def test_exchanged_chunks_and_another_models_file_are_refused(folder: Path, tmp_path: Path) -> None:
    cache, key = PackedWeights(tmp_path / "cache", 2**30), "e" * 64
    path = store(cache, key, packed(folder, "f32"))
    data, chunk = bytearray(path.read_bytes()), _native.CHUNK_BYTES
    assert len(data) > 2 * chunk
    data[:chunk], data[chunk : 2 * chunk] = data[chunk : 2 * chunk], data[:chunk]
    path.write_bytes(data)
    with pytest.raises(DamagedError, match="checksum"):
        cache.restore(key, empty(folder, "f32"))
    os.rename(store(cache, key, packed(folder)), cache.path("f" * 64))
    with pytest.raises(DamagedError, match="another model"):
        cache.restore("f" * 64, empty(folder))
    store(cache, key, packed(folder))
    with pytest.raises(DamagedError, match="or its name is wrong"):  # of another size
        cache.restore(key, empty(folder, "f32"))
    assert not cache.restore("absent", empty(folder))


def test_the_key_covers_formats_shapes_names_layout_and_files(folder: Path) -> None:
    params = program_of(folder).params
    keys = {
        packed_key(params, "1/avx2", "a"), packed_key(params, "2/avx2", "a"), packed_key(params, "1/avx2", "b"),
        packed_key(program_of(folder, "int8").params, "1/avx2", "a"), packed_key(params[1:], "1/avx2", "a"),
        packed_key(params[::-1], "1/avx2", "a"),
    }  # fmt: skip
    assert len(keys) == 6
    assert packed_key(program_of(folder).params, "1/avx2", "a") in keys


def test_fingerprint_tells_checkpoints_apart(folder: Path, tmp_path: Path) -> None:
    one, other = (tmp_path / name for name in ("one", "other"))
    for path in (one, other):
        llama_folder(path, vocab_size=9000, hidden_size=200, shards=2)
    times = [path.stat().st_mtime_ns for path in checkpoint_files(one)]
    before, whole = fingerprint(checkpoint_files(one)), fingerprint(checkpoint_files(one), whole=True)
    assert fingerprint(checkpoint_files(one)) == before
    assert fingerprint(checkpoint_files(other)) != before  # equal files elsewhere
    assert fingerprint(checkpoint_files(other), whole=True) == whole
    assert fingerprint(checkpoint_files(folder), whole=True) != whole

    def restore_times() -> None:
        for path, mtime in zip(checkpoint_files(one), times, strict=True):
            os.utime(path, ns=(mtime, mtime))

    shard = checkpoint_files(one)[1]
    flip(
        shard, shard.stat().st_size // 2
    )  # one bit, and the old time put back: only reading everything can tell
    assert fingerprint(checkpoint_files(one)) != before
    restore_times()
    assert fingerprint(checkpoint_files(one), whole=True) != whole
    llama_folder(one, vocab_size=9000, hidden_size=200, shards=2, seed=1)  # other weights under the old times
    restore_times()
    assert fingerprint(checkpoint_files(one)) != before


class Fake:
    """Weights without an executor."""

    layout = "fake"

    def __init__(self, chunks: int = 1) -> None:
        self.weight_chunks, self.weight_bytes = chunks, chunks * 4096
        self.taken = False

    def save_weights(self, fd: int, first: int, count: int) -> bytes:
        os.pwrite(fd, b"\1" * 4096 * count, first * 4096)
        return bytes(8 * count)

    def map_weights(self, fd: int, sums: bytes) -> bool:
        self.taken = True
        return True


def test_the_least_recently_used_go_first(tmp_path: Path) -> None:
    cache = PackedWeights(tmp_path / "cache", 20_000)
    for name in "abc":
        store(cache, name * 64, Fake())
    for age, name in enumerate("bca"):
        os.utime(cache.path(name * 64), (1000 + age, 1000 + age))
    assert cache.restore("b" * 64, Fake())  # now the most recently used
    store(cache, "d" * 64, Fake(3))
    assert set(cache.sizes()) == {cache.path(name * 64).name for name in "bd"}
    with pytest.raises(OSError, match="exceed the limit"):
        cache.store("e" * 64, Fake(5), {})
    assert len(cache.sizes()) == 2


def test_a_full_disk_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full(Fake):
        def save_weights(self, fd: int, first: int, count: int) -> bytes:
            raise OSError(28, "No space left on device")

    cache = PackedWeights(tmp_path / "cache", 2**30)
    with pytest.raises(OSError, match="No space left"):
        cache.store("a" * 64, Full(), {})
    assert list(cache.folder.iterdir()) == []
    monkeypatch.setattr("quire.util.kept._SPARE_BYTES", 2**60)
    with pytest.raises(OSError, match="do not fit"):
        cache.store("a" * 64, Fake(), {})


def test_a_write_error_of_the_system_is_an_oserror(folder: Path, tmp_path: Path) -> None:
    with open("/dev/full", "wb") as full, pytest.raises(OSError, match="No space left"):
        packed(folder).save_weights(full.fileno(), 0, 1)


def test_leftovers_of_dead_writers_are_swept_and_those_of_the_living_stay(tmp_path: Path) -> None:
    cache = PackedWeights(tmp_path / "cache", 2**30)
    cache.folder.mkdir()
    dead, living = cache.folder / ".writing-dead", cache.folder / ".writing-living"
    dead.write_bytes(b"half")
    with living.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        store(cache, "a" * 64, Fake())
        assert not dead.exists()
        assert living.exists()


STARTER = """
import json, sys
from quire import LLM
with LLM(sys.argv[1], progress=False, max_model_len=64, threads=1) as llm:
    out = llm.generate([[5, 6, 7]], use_tqdm=False)[0]
    print(json.dumps([llm.built.weights.source, out.outputs[0].token_ids, llm.notices]))
"""


def start(folder: Path, cache: Path, **more: str) -> subprocess.Popen[str]:
    env = os.environ | {"QUIRE_CACHE_DIR": str(cache)} | more
    return subprocess.Popen(
        [sys.executable, "-c", STARTER, str(folder)], env=env, stdout=subprocess.PIPE, text=True
    )


def test_concurrent_starts_pack_once_each_and_the_next_one_maps(tmp_path: Path) -> None:
    folder = llama_folder(tmp_path / "model", vocab_size=40_000, hidden_size=256)
    cache = tmp_path / "cache"
    starts = [start(folder, cache) for _ in range(2)]
    first = [json.loads(process.communicate()[0]) for process in starts]
    assert {found[0] for found in first} <= {"checkpoint", "packed"}
    (file,) = (cache / "weights").iterdir()
    source, tokens, notices = json.loads(start(folder, cache).communicate()[0])
    assert (source, notices) == ("packed", [])
    assert [found[1] for found in first] == [tokens, tokens]
    flip(file, 12345)
    source, again, notices = json.loads(start(folder, cache).communicate()[0])
    assert (source, again) == ("checkpoint", tokens)
    assert "a checksum differs" in notices[0]
    (file,) = (cache / "weights").iterdir()  # packed again


def test_options_notices_and_inspect(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = llama_folder(tmp_path / "model", vocab_size=40_000, hidden_size=256)
    monkeypatch.setenv("QUIRE_CACHE_DIR", str(tmp_path / "cache"))

    def start(folder: Path, **options: Any) -> tuple[str, list[str]]:
        with LLM(folder, progress=False, max_model_len=64, threads=1, num_kv_blocks=64, **options) as llm:
            built = llm.built
        for thread in threading.enumerate():
            if thread.name == "quire-kept-file":
                thread.join()
        return built.weights.source, built.notices()

    def inspected(*flags: str) -> Any:
        assert main(["inspect", str(folder), "--json", "--no-measure", *flags]) == 0
        return json.loads(capsys.readouterr().out)["packed"]

    assert inspected("--weight-cache", "off") is None
    assert inspected()["bytes"] == 0
    assert start(folder, weight_cache="off") == ("checkpoint", [])
    source, notices = start(folder, weight_cache_size=1000)
    assert source == "checkpoint"
    assert "not cached" in notices[0]
    assert "exceed the limit" in notices[0]
    assert not (tmp_path / "cache").exists()
    assert start(folder) == ("checkpoint", [])
    assert start(folder) == ("packed", [])
    assert inspected()["bytes"] == os.path.getsize(inspected()["path"]) > 40_000 * 256 * 2
    assert inspected("--dtype", "float32")["bytes"] == 0
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    assert start(copy, weight_cache="content") == ("checkpoint", [])
    assert start(folder, weight_cache="content") == ("packed", [])  # the same bytes elsewhere
    (tmp_path / "blocked").write_text("not a folder")
    source, notices = start(folder, weight_cache_dir=str(tmp_path / "blocked"))
    assert source == "checkpoint"
    assert "not cached" in notices[0]
