"""The files of GGUF models by their names: parts of one model, the model of a folder, a choice among several.

Apart from their reader, which takes time to import and which other checkpoints don't need.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from quire.spec.config_reader import show
from quire.types import CheckpointError

MAX_SHARDS = 1024
_SPLIT = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
_SHOWN = 20


def shards(path: Path) -> list[Path]:
    """The files of a model, given one of them: itself, or all of NAME-00001-of-0000N.gguf in its folder."""
    match = _SPLIT.fullmatch(path.name)
    if not match:
        return [path]
    total = int(match[3])
    if not 1 <= int(match[2]) <= total <= MAX_SHARDS:
        raise CheckpointError(f"{path.name}: part {match[2]} of {match[3]} is not in [1, {MAX_SHARDS}]")
    found = [path.with_name(f"{match[1]}-{number:05d}-of-{match[3]}.gguf") for number in range(1, total + 1)]
    for shard in found:
        if not shard.exists():
            raise CheckpointError(f"{path.name}: {shard.name} is missing in its folder")
    return found


def single_gguf(folder: Path) -> Path | None:
    """The GGUF model of a folder (the first of its parts), or None.

    Raises CheckpointError listing them if there are several.
    """
    files = sorted(path for path in folder.glob("*.gguf") if _is_model(path))
    firsts = _firsts(files)
    if len(firsts) > 1:
        raise CheckpointError(
            f"{folder}: {len(firsts)} GGUF models ({_listed(firsts, folder)}); specify the file"
        )
    return firsts[0] if firsts else (files[0] if files else None)


def chosen_gguf(folder: Path, choice: str, repository: str) -> Path:
    """The GGUF model of a repository whose file name is `choice` or ends in that type.

    The type may also be the name of the file's folder. Raises CheckpointError listing the models.
    """
    firsts = _firsts(sorted(path for path in folder.rglob("*.gguf") if _is_model(path)))
    if choice.endswith(".gguf"):
        found = [path for path in firsts if choice in {path.name, path.relative_to(folder).as_posix()}]
    else:
        ends = re.compile(rf"(.*[-._])?{re.escape(choice)}(-\d{{5}}-of-\d{{5}})?\.gguf", re.IGNORECASE)
        found = [path for path in firsts if ends.fullmatch(path.name)]
        found = found or [path for path in firsts if path.parent.name.lower() == choice.lower()]
    if len(found) != 1:
        there = _listed(found or firsts, folder) or "none"
        why = f"{len(found)} files are" if found else "no file is"
        raise CheckpointError(f"{repository}: {why} {show(choice)} in the local hub cache, which has {there}")
    return found[0]


def _is_model(path: Path) -> bool:
    """Whether a file is a model, not an image encoder."""
    return not path.name.startswith("mmproj")


def _firsts(files: Iterable[Path]) -> list[Path]:
    return [path for path in files if not (match := _SPLIT.fullmatch(path.name)) or int(match[2]) == 1]


def _listed(files: Sequence[Path], folder: Path) -> str:
    names = [path.relative_to(folder).as_posix() for path in files]
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
