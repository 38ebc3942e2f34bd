"""The unfinished folder of a run, which a later run of the same recipe continues.

    OUT.unfinished/model-00001-of-00009.safetensors …    finished layers
    OUT.unfinished/residual-1.bin                        the residual stream before the next layer, float32
    OUT.unfinished/original-1.bin                        the same of the original model, where a method needs it
    OUT.unfinished/state.json                            digest of the run, number of finished layers, what was noted

A layer is finished when state.json says so. All files are written beside and renamed, state.json last: a run that is
killed has lost the layer that it was at.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np
import numpy.typing as npt

from quire.loader.safetensors_writer import write_safetensors
from quire.loader.source import Array, TensorInfo
from quire.types import CheckpointError
from quire.util.files import written_anew
from quire.util.strict_json import read_json_object

F32 = npt.NDArray[np.float32]
_STATE = "state.json"
_MAX_STATE = 64 * 2**20
StreamName = Literal["residual", "original"]
_STREAMS: tuple[StreamName, ...] = ("residual", "original")
Tensors = Sequence[tuple[TensorInfo, Array]]


class UnfinishedRun:
    """The folder, open for one run."""

    def __init__(self, out: Path, shards: int) -> None:
        self.out, self.folder = out, out.with_name(out.name + ".unfinished")
        self._shards = shards
        self.done = 0
        self.notes: dict[str, Any] = {}
        self._digest = ""

    @contextmanager
    def opened(self, digest: str) -> Iterator[UnfinishedRun]:
        """Make the folder or continue it. Raises CheckpointError if it is another run's, or another process has it.

        A folder without a finished layer is removed after an error.
        """
        self._digest = digest
        with _explained(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            lock = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise CheckpointError(f"{self.folder}: another process is writing it") from None
            self._read_state()
            with _explained(self.folder):
                yield self
        except BaseException:
            if self.done == 0 and self.folder.is_dir() and self._is_mine():
                shutil.rmtree(self.folder, ignore_errors=True)
            raise
        finally:
            os.close(lock)

    def _is_mine(self) -> bool:
        path = self.folder / _STATE
        return not path.exists() or read_json_object(path, _MAX_STATE).get("digest") == self._digest

    def _read_state(self) -> None:
        path = self.folder / _STATE
        if not path.exists():
            return
        state = read_json_object(path, _MAX_STATE)
        if state.get("digest") != self._digest:
            raise CheckpointError(
                f"{self.folder}: is of another run (model, options, calibration text or version differ): remove it, or "
                "write to another folder"
            )
        done, notes = state.get("done"), state.get("notes")
        if not isinstance(done, int) or not isinstance(notes, dict):
            raise CheckpointError(f"{path}: is damaged: remove {self.folder}")
        self.done, self.notes = done, notes

    def commit(self, tensors: Tensors, *streams: Residuals) -> None:
        """Finish the next layer: its tensors, and the residual streams that were written behind it."""
        number = self.done + 1
        if tensors:
            self.write_shard(number, tensors)
        for stream in streams:
            stream.after.replace(self._stream(stream.name, number))
        self.done = number
        with written_anew(self.folder / _STATE) as file:
            state = {"digest": self._digest, "done": self.done, "notes": self.notes}
            file.write(json.dumps(state).encode())
        for name in _STREAMS:
            self._stream(name, number - 1).unlink(missing_ok=True)

    def shard_name(self, number: int) -> str:
        return f"model-{number:05d}-of-{self._shards:05d}.safetensors"

    def write_shard(self, number: int, tensors: Tensors) -> None:
        """Write a file of tensors."""
        arrays = {info.name: data for info, data in tensors}
        infos = [info for info, _ in tensors]
        write_safetensors(self.folder / self.shard_name(number), infos, lambda info: [arrays[info.name]])

    def _stream(self, name: str, number: int) -> Path:
        return self.folder / f"{name}-{number}.bin"

    @contextmanager
    def residuals(self, dim: int, name: StreamName = "residual") -> Iterator[Residuals]:
        """A residual stream before the next layer, and a file for that behind it."""
        after = self.folder / f".{name}.unfinished"
        source = None if self.done == 0 else self._stream(name, self.done).open("rb")
        try:
            with after.open("wb") as target:
                yield Residuals(name, dim, source, target, after)
        finally:
            if source is not None:
                source.close()

    def write_index(self, weight_map: Mapping[str, str], total: int) -> None:
        """Write which file has which tensor; `total` is their bytes."""
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        with written_anew(self.folder / "model.safetensors.index.json") as file:
            file.write(json.dumps(index, indent=1).encode())

    def complete(self, written: Path | None = None) -> None:
        """Give the folder its name, with nothing but the checkpoint in it; or a file in it, which alone stays."""
        if written is not None:
            written.rename(self.out)
            shutil.rmtree(self.folder)
            return
        for path in self.folder.iterdir():
            if path.name.startswith((*(f"{name}-" for name in _STREAMS), ".")):
                path.unlink()
        (self.folder / _STATE).unlink()
        self.folder.rename(self.out)


class Residuals:
    """Rows of a residual stream [tokens, dim], window after window. `after` is the file that is written."""

    def __init__(self, name: str, dim: int, source: BinaryIO | None, target: BinaryIO, after: Path) -> None:
        self.name, self._dim, self._source, self._target, self.after = name, dim, source, target, after

    def rewind(self) -> None:
        """Begin again with the first window."""
        if self._source is not None:
            self._source.seek(0)

    def read(self, tokens: int) -> F32 | None:
        """The rows of the next window; None before the first layer."""
        if self._source is None:
            return None
        data = self._source.read(4 * tokens * self._dim)
        if len(data) != 4 * tokens * self._dim:
            raise CheckpointError(
                f"{self._source.name}: is shorter than the calibration text: remove its folder"
            )
        return np.frombuffer(data, np.float32).reshape(tokens, self._dim)

    def write(self, rows: F32) -> None:
        """Append the rows behind a window."""
        self._target.write(np.ascontiguousarray(rows).data)
        self._target.flush()


@contextmanager
def _explained(folder: Path) -> Iterator[None]:
    """Errors of the disk as CheckpointError."""
    try:
        yield
    except OSError as error:
        if error.errno in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}:
            raise CheckpointError(
                f"{folder}: the disk is full; finished layers stay there, and the same command continues with the next"
            ) from None
        raise CheckpointError(f"{error.filename or folder}: {error.strerror or error}") from None
