"""Checkpoints that are written again while another process has them mapped."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from quire.loader.gguf_writer import OutTensor, write_gguf
from quire.loader.safetensors import SafetensorsFile
from quire.loader.safetensors_writer import write_safetensors
from quire.loader.source import TensorInfo

READER = """
import sys
from pathlib import Path
from quire.loader.gguf_file import GGUFFile
from quire.loader.safetensors import SafetensorsFile
path = Path(sys.argv[1])
file = GGUFFile(path) if path.suffix == ".gguf" else SafetensorsFile(path)
if path.suffix == ".gguf":
    view = memoryview(file._map)
    read = lambda: set(bytes(view[-16384:]))
else:
    read = lambda: set(file.read("x").ravel().tolist())
print("mapped", flush=True)
sys.stdin.readline()
print(read(), flush=True)
"""


def write(path: Path, value: int, rows: int) -> None:
    if path.suffix == ".gguf":
        numbers = np.full(rows * 1024, value, np.uint8)
        tensor = OutTensor("x", "F32", (rows, 256))
        write_gguf(path, {"general.architecture": "llama"}, [tensor], lambda _: iter([numbers]))
    else:
        array = np.full((rows, 1024), value, np.uint8)
        write_safetensors(path, [TensorInfo("x", "U8", array.shape)], lambda _: iter([array]))


@pytest.mark.parametrize("name", ["model.safetensors", "model.gguf"])
def test_a_process_that_has_a_file_mapped_keeps_what_it_opened(name: str, tmp_path: Path) -> None:
    """Over the same file, cut short and written again, it would be killed (SIGBUS)."""
    path = tmp_path / name
    write(path, 7, rows=4096)
    reader = subprocess.Popen(
        [sys.executable, "-c", READER, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert reader.stdout is not None
    assert reader.stdout.readline() == "mapped\n"
    write(path, 9, rows=1)
    said, _ = reader.communicate("\n", timeout=60)
    assert reader.returncode == 0
    assert said == "{7}\n"
    assert [file.name for file in tmp_path.iterdir()] == [name]


def test_a_write_that_fails_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    write(path, 7, rows=4)

    def too_little(_: TensorInfo) -> Iterator[npt.NDArray[np.uint8]]:
        yield np.zeros((1, 1024), np.uint8)

    with pytest.raises(ValueError, match="x: got 1024 bytes, expected 4096"):
        write_safetensors(path, [TensorInfo("x", "U8", (4, 1024))], too_little)
    assert SafetensorsFile(path).read("x").tolist() == np.full((4, 1024), 7).tolist()
    assert len(list(tmp_path.iterdir())) == 1
