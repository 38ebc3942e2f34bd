"""Read adapters: where they are, whether they fit the base, and their numbers.

Files are untrusted. Headers bound all sizes before anything is allocated, and every shape is compared with the base
before the first number is read.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from quire.config.shipped import shipped_adapters
from quire.executor.stored_adapters import StoredPair
from quire.lora.adapter import Adapter, LowRank
from quire.lora.base_modules import BaseModules
from quire.lora.leaf_hash import LeafHash, Memory
from quire.lora.module_pairs import MAX_RANK, AdapterFile, ModulePair, check_rank, checked, combined, unknown
from quire.lora.peft_folder import CONFIG, WEIGHTS, PeftFolder, no_weights
from quire.spec import ModelSpec
from quire.spec.config_reader import show
from quire.types import CheckpointError
from quire.util.sizes import format_size

_MAX_NAME = 255  # bytes


def find_adapter(name: str) -> Path:
    """The folder or file of an adapter: a path, or the name of a shipped one such as quire-mini:pirate.

    Raises CheckpointError if there is none.
    """
    path = Path(name).expanduser()
    if path.exists():
        return path
    shipped = shipped_adapters()
    if name in shipped:
        return shipped[name]
    there = f"; shipped are {', '.join(shipped)}" if shipped else ""
    raise CheckpointError(f"{name}: no adapter folder or file{there}")


def inside(folder: Path, name: str) -> Path:
    """The file or folder `name` in `folder`, for names that others give.

    Raises CheckpointError for an absolute path, a step upwards, and a symlink that leads out of the folder.
    """
    refusal = CheckpointError(f"{show(name)} is not the name of an adapter in {folder}")
    if not name or not name.isprintable() or "\\" in name or len(name.encode()) > _MAX_NAME:
        raise refusal
    path = Path(name)
    if path.is_absolute() or ".." in path.parts:
        raise refusal
    try:
        found, root = (folder / path).resolve(), folder.resolve()
    except (OSError, RuntimeError):  # a circle of symlinks
        raise refusal from None
    if found == root or not found.is_relative_to(root):
        raise CheckpointError(f"{show(name)} leads out of {folder}")
    return folder / path


def names_adapter(path: Path) -> bool:
    """Whether a path is an adapter and not a model."""
    if path.is_dir():
        return (
            not (path / "config.json").exists()
            and (path / CONFIG).exists()
            and any(path.glob("adapter_model.*"))
        )
    if path.suffix != ".gguf" or not path.is_file():
        return False
    from quire.loader.gguf_file import GGUFFile
    from quire.lora.gguf_adapter import is_adapter

    try:
        file = GGUFFile(path)
    except CheckpointError:
        return False  # a model's reader says why
    try:
        return is_adapter(file)
    finally:
        file.close()


@contextmanager
def open_adapter(path: Path, *, root: Path | None = None) -> Iterator[AdapterFile]:
    """Open an adapter and check its header; with `root`, only if all of it is in that folder.

    Raises CheckpointError or UnsupportedModelError naming the file, the key and the limit.
    """
    _weights(path, root)
    with closing(_opened(path)) as file:
        yield file


def digest_of(path: Path, file: AdapterFile) -> str:
    """The digest of an open adapter: its version. Raises CheckpointError if the file has changed."""
    with closing(LeafHash(_weights(path, None))) as hashing:
        return hashing.digest(file.head(), file.identity)


def _weights(path: Path, root: Path | None) -> Path:
    """The file that has an adapter's numbers. CheckpointError if there is none, or not in `root`."""
    if root is not None:
        files = [path / CONFIG, path / WEIGHTS] if path.is_dir() else [path]
        for one in files:
            if not one.resolve().is_relative_to(root.resolve()):
                raise CheckpointError(f"{path.name}: {one.name} leads out of {root}")
    if path.is_file() and path.suffix != ".gguf":
        raise CheckpointError(f"{path}: an adapter is a folder with {CONFIG}, or a .gguf file")
    if not path.exists():
        raise CheckpointError(f"{path}: does not exist")
    if not path.is_dir():
        return path
    if not (path / WEIGHTS).exists():
        raise CheckpointError(no_weights(path))
    return path / WEIGHTS


def _opened(path: Path) -> AdapterFile:
    if path.is_dir():
        return PeftFolder(path)
    from quire.lora.gguf_adapter import GGUFAdapter  # a start with folders does not need it

    return GGUFAdapter(path)


def room_of(adapters: Iterable[str | Adapter], spec: ModelSpec) -> tuple[int, tuple[str, ...]]:
    """The largest rank of adapters (paths, names or numbers) of a model, and what they change, as
    --lora-target-modules names it. Ranks of several parts of a fused linear add up.

    Raises CheckpointError or UnsupportedModelError for a file whose header cannot be read or is of another base.
    """
    rank, targets, base = 0, set[str](), BaseModules.of(spec)
    for each in adapters:
        if isinstance(each, Adapter):
            ranks = [
                *((key, part.rank) for key, part in each.parts.items()),
                *((key, 0) for key in each.modules_to_save),
            ]
        else:
            with open_adapter(find_adapter(each)) as file:
                pairs = checked(file.pairs(base), base, file.where)
                ranks = [
                    *((module, sum(pair.rank for pair in several)) for module, several in pairs.items()),
                    *((module, 0) for module in _saved_by_module(file, base)),
                ]
        rank = max([rank, *(one for _, one in ranks)])
        targets |= {_target(module, whole=not one) for module, one in ranks}
    return rank, tuple(sorted(targets - {""}))


def _target(module: str, *, whole: bool) -> str:
    if whole:
        return "modules_to_save"
    if module.endswith("embed_tokens"):
        return "embed_tokens"
    if module.endswith("lm_head"):
        return "lm_head"
    return "experts" if ".experts" in module else ""


class AdapterReading:
    """An adapter that is being read. Implements AdapterNumbers."""

    def __init__(
        self,
        name: str,
        file: AdapterFile,
        hashing: LeafHash,
        base: BaseModules,
        max_rank: int,
        max_bytes: int | None,
    ) -> None:
        self._file, self._hashing, self._base = file, hashing, base
        self._pairs = checked(file.pairs(base), base, file.where)
        saved = _saved_by_module(file, base)
        needed = float_bytes(self._pairs, base)
        if max_bytes is not None and needed > max_bytes:
            raise CheckpointError(
                f"{file.where}: needs {format_size(needed)} in float32, more than the limit of {format_size(max_bytes)}"
            )
        self.name = name
        self.outline = {
            module: (sum(pair.rank for pair in several), any(pair.dora for pair in several))
            for module, several in self._pairs.items()
        }
        for module, (rank, _) in self.outline.items():
            check_rank(rank, max_rank, f"{file.where}: module {module}")
        self.modules_to_save = {module: file.read_saved(stored) for module, stored in saved.items()}

    def each(self, but: Collection[str] = ()) -> Iterator[tuple[str, LowRank]]:
        for module, several in self._pairs.items():
            if module in but:
                continue
            self._hashing.reach(max(pair.end for pair in several))
            yield module, combined(several, module, self._base)

    def stored(self) -> tuple[int, Mapping[str, StoredPair]]:
        found = {
            module: several[0].stored
            for module, several in self._pairs.items()
            if several[0].stored is not None and several[0].module == module
        }
        return self._hashing.file, found

    @property
    def digest(self) -> str:
        return self._hashing.digest(self._file.head(), self._file.identity)

    def whole(self) -> Adapter:
        parts, rank = dict(self.each()), max((rank for rank, _ in self.outline.values()), default=0)
        return Adapter(self.name, self.digest, rank, parts, self.modules_to_save)


@contextmanager
def reading(
    path: Path,
    spec: ModelSpec | BaseModules,
    *,
    name: str = "",
    root: Path | None = None,
    max_rank: int = MAX_RANK,
    max_bytes: int | None = None,
    memory: Memory | None = None,
) -> Iterator[AdapterReading]:
    """Begin to read an adapter of the model `spec`; its numbers are read within the block. `name` is the folder's or
    file's unless given; `root` as in open_adapter, `memory` as in LeafHash.

    Raises CheckpointError or UnsupportedModelError, before any number is read, for what is not supported, for a rank
    above `max_rank`, for more than `max_bytes` of numbers in float32 (whole matrices, which are read in blocks, do not
    count), and for a module or shape that the model does not have; and for NaN or infinity in a whole matrix.
    """
    base = spec if isinstance(spec, BaseModules) else BaseModules.of(spec)
    name = name or (path.name if path.is_dir() else path.stem)
    weights = _weights(path, root)
    with closing(LeafHash(weights, memory)) as hashing, closing(_opened(path)) as file:
        yield AdapterReading(name, file, hashing, base, max_rank, max_bytes)


def read_adapter(path: Path, spec: ModelSpec | BaseModules, **more: Any) -> Adapter:
    """Read all of an adapter. Arguments and errors are those of `reading`; NaN and infinity are refused anywhere."""
    with reading(path, spec, **more) as found:
        return found.whole()


def float_bytes(pairs: Mapping[str, list[ModulePair]], base: BaseModules) -> int:
    """Bytes of an adapter's numbers in float32 without whole matrices, known from its header and the base."""
    total = 0
    for module, several in pairs.items():
        rows, cols = base.shapes[module]
        rank = sum(pair.rank for pair in several)
        total += rank * (rows + cols) + rows * any(pair.dora for pair in several)
    return 4 * total


def _saved_by_module(file: AdapterFile, base: BaseModules) -> dict[str, str]:
    """Module of the base -> that in the file, of every matrix that replaces a whole one."""
    found: dict[str, str] = {}
    for stored, shape in file.saved().items():
        module = base.name(stored)
        if module not in base.shapes:
            raise unknown(stored, stored, file.where)
        if module not in base.whole:
            names = " and ".join(sorted(base.whole))
            raise CheckpointError(
                f"{file.where}: modules_to_save: {show(stored)} is not supported: only {names}"
            )
        if shape != base.shapes[module]:
            expected = list(base.shapes[module])
            raise CheckpointError(
                f"{file.where}: module {show(stored)}: shape {list(shape)}, but the model has {expected}"
            )
        if module in found:
            raise CheckpointError(f"{file.where}: {found[module]} and {stored} both replace {module}")
        found[module] = stored
    return found
