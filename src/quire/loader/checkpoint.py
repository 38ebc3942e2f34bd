"""A checkpoint folder: one safetensors file, or shards and their index."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType

from quire.loader.safetensors import SafetensorsFile
from quire.loader.source import Array, TensorInfo
from quire.spec.config_reader import show
from quire.types import CheckpointError
from quire.util.strict_json import read_json_object

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
MAX_INDEX_BYTES = 64 * 2**20
MAX_SHARDS = 4096
_SHARD = re.compile(r"model-\d+-of-\d+\.safetensors")
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


class Checkpoint:
    """All tensors of a folder. Implements Source; a context manager that closes its files.

    `single` is the name of the file that has them all, if there is one. `modules` are folders inside with tensors of
    their own, whose names begin with that of the folder and a slash.

    Raises CheckpointError for missing weights, weights in a format that can run code, an index that names files outside
    the folder, a missing shard, and an index that contradicts its shards.
    """

    def __init__(self, folder: Path, single: str = SINGLE, modules: Sequence[str] = ()) -> None:
        self._files: list[SafetensorsFile] = []
        self._where: dict[str, SafetensorsFile] = {}
        try:
            self._open(folder, single)
            for module in modules:
                self._add(_module_file(folder, module), f"{module}/")
        except CheckpointError:
            self.close()
            raise

    def _open(self, folder: Path, single: str) -> None:
        if (folder / single).exists():
            self._add(folder / single)
        elif (folder / INDEX).exists():
            weight_map = read_index(folder / INDEX)
            for shard in sorted(set(weight_map.values())):
                if not (folder / shard).exists():
                    raise CheckpointError(f"{INDEX}: shard {shard} is missing")
                self._add(folder / shard)
            self._compare(weight_map)
        else:
            raise CheckpointError(_nothing_to_load(folder))

    def _add(self, path: Path, prefix: str = "") -> None:
        file = SafetensorsFile(path, prefix)
        self._files.append(file)
        for name in file.names():
            if name in self._where:
                other = self._where[name].path.name
                raise CheckpointError(f"tensor {show(name)} is in both {other} and {path.name}")
            self._where[name] = file

    def _compare(self, weight_map: Mapping[str, str]) -> None:
        for name, shard in weight_map.items():
            file = self._where.get(name)
            if file is None or file.path.name != shard:
                raise CheckpointError(f"{INDEX}: tensor {show(name)} is not in {shard}")
        for name, file in self._where.items():
            if name not in weight_map:
                raise CheckpointError(f"{file.path.name}: tensor {show(name)} is not in {INDEX}")

    def names(self) -> Iterable[str]:
        return self._where.keys()

    def info(self, name: str) -> TensorInfo:
        return self._where[name].info(name)

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Array:
        return self._where[name].read(name, start, stop)

    def prefetch(self, name: str, start: int, stop: int) -> None:
        self._where[name].prefetch(name, start, stop)

    def release(self, name: str) -> None:
        self._where[name].release(name)

    def close(self) -> None:
        """Unmap all files. Arrays already read stay valid."""
        for file in self._files:
            file.close()
        self._files.clear()
        self._where.clear()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def checkpoint_files(folder: Path, single: str = SINGLE, modules: Sequence[str] = ()) -> list[Path]:
    """The weight files of a folder, and of the folders `modules` in it.

    Raises CheckpointError if there are none, or the index is invalid.
    """
    return [*_files(folder, single), *(_module_file(folder, module) for module in modules)]


def _module_file(folder: Path, module: str) -> Path:
    path = folder / module / SINGLE
    if not path.is_file():
        raise CheckpointError(f"{module}: {_nothing_to_load(folder / module)}")
    return path


def _files(folder: Path, single: str) -> list[Path]:
    if (folder / single).exists():
        return [folder / single]
    if (folder / INDEX).exists():
        return [
            folder / INDEX,
            *(folder / shard for shard in sorted(set(read_index(folder / INDEX).values()))),
        ]
    raise CheckpointError(_nothing_to_load(folder))


def read_index(path: Path) -> dict[str, str]:
    """Read an index file: tensor name -> shard file name.

    Raises CheckpointError if it is malformed, or a shard is not a plain file name in the same folder.
    """
    weight_map = read_json_object(path, MAX_INDEX_BYTES).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path.name}: weight_map is not an object with entries")
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or not _is_plain_name(shard):
            raise CheckpointError(
                f"{path.name}: weight_map of {show(name)}: {show(shard)} is not the plain name of a "
                ".safetensors file"
            )
    shards = len(set(weight_map.values()))
    if shards > MAX_SHARDS:
        raise CheckpointError(f"{path.name}: {shards} shards are more than the limit of {MAX_SHARDS}")
    return weight_map


def _is_plain_name(shard: str) -> bool:
    """Whether a name is a plain file name: path separators of any system and control characters are attacks."""
    return (
        shard.endswith(".safetensors")
        and shard.isprintable()
        and not any(separator in shard for separator in "/\\:")
        and len(shard) <= 255
    )


def _nothing_to_load(folder: Path) -> str:
    """Explain from its files why a folder has no usable weights."""
    if not folder.is_dir():
        return f"{folder}: not a folder"
    files = sorted(path.name for path in folder.iterdir())
    looked_for = f"{folder}: neither {SINGLE} nor {INDEX}"
    safetensors = [name for name in files if name.endswith(".safetensors")]
    if safetensors:
        return f"{looked_for}, only {_some(safetensors)}{_why_not(safetensors)}"
    pickles = [name for name in files if name.endswith(_PICKLES)]
    if pickles:
        return (
            f"{looked_for}, only {_some(pickles)}: pickle files can run code and are never "
            "read; save the model as safetensors (save_pretrained of a current transformers does this)"
        )
    return f"{looked_for} in the folder"


def _why_not(safetensors: list[str]) -> str:
    if any(_SHARD.fullmatch(name) for name in safetensors):
        return f": {INDEX}, which assigns tensors to files, is missing"
    if any(name.startswith("adapter") for name in safetensors):
        return ": an adapter needs the model that it changes"
    return ": Quire needs the transformers format with its index"


def _some(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
