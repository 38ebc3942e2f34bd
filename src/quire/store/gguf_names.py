"""The files of GGUF models by their names: parts of one model, the model of a folder, a choice among several.

Apart from their reader, which takes time to import and which other checkpoints don't need.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path, PurePosixPath

from quire.spec.config_reader import show
from quire.types import CheckpointError
from quire.util.files import IrregularFileError, open_regular

MAX_SHARDS = 1024
_SPLIT = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
_SHOWN = 20


def is_gguf(path: Path) -> bool:
    """Whether a file is a GGUF model: by its ending, or by how it begins."""
    if path.suffix == ".gguf":
        return True
    try:
        with open_regular(path) as file:
            return file.read(4) == b"GGUF"
    except (OSError, IrregularFileError):
        return False


def part_names(name: str) -> list[str]:
    """The file names of a model, given one of them: itself, or all of NAME-00001-of-0000N.gguf."""
    match = _SPLIT.fullmatch(name)
    if not match:
        return [name]
    total = int(match[3])
    if not 1 <= int(match[2]) <= total <= MAX_SHARDS:
        raise CheckpointError(f"{name}: part {match[2]} of {match[3]} is not in [1, {MAX_SHARDS}]")
    return [f"{match[1]}-{number:05d}-of-{match[3]}.gguf" for number in range(1, total + 1)]


def shards(path: Path) -> list[Path]:
    """The files of a model, given one of them: itself, or all of NAME-00001-of-0000N.gguf in its folder."""
    found = [path.with_name(name) for name in part_names(path.name)]
    for shard in found if len(found) > 1 or _SPLIT.fullmatch(path.name) else []:
        if not shard.exists():
            raise CheckpointError(f"{path.name}: {shard.name} is missing in its folder")
    return found


def single_gguf(folder: Path) -> Path | None:
    """The GGUF model of a folder (the first of its parts), or None.

    Raises CheckpointError listing them if there are several.
    """
    files = sorted(path.name for path in folder.glob("*.gguf") if not path.name.startswith("mmproj"))
    firsts = gguf_models(files)
    if len(firsts) > 1:
        raise CheckpointError(f"{folder}: {len(firsts)} GGUF models ({listed(firsts)}); specify the file")
    return folder / (firsts or files)[0] if files else None


def chosen_gguf(folder: Path, choice: str, repository: str) -> Path:
    """The GGUF model of a folder with the files of a repository; see `choose_gguf`."""
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.gguf"))
    return folder / choose_gguf(names, choice, f"{repository}: {{}} in the local hub cache, which has {{}}")


def choose_gguf(names: Sequence[str], choice: str, refusal: str) -> str:
    """The GGUF model among the files of a repository whose file name is `choice` or ends in that type.

    The type may also be the name of the file's folder. Raises CheckpointError with the text `refusal`, whose two fields
    are what is wrong and which models there are.
    """
    firsts = gguf_models(names)
    if choice.endswith(".gguf"):
        found = [name for name in firsts if choice in {name, PurePosixPath(name).name}]
    else:
        ends = re.compile(rf"(.*[-._])?{re.escape(choice)}(-\d{{5}}-of-\d{{5}})?\.gguf", re.IGNORECASE)
        found = [name for name in firsts if ends.fullmatch(PurePosixPath(name).name)]
        found = found or [
            name for name in firsts if PurePosixPath(name).parent.name.lower() == choice.lower()
        ]
    if len(found) != 1:
        why = f"{len(found)} files are" if found else "no file is"
        raise CheckpointError(refusal.format(f"{why} {show(choice)}", listed(found or firsts) or "none"))
    return found[0]


def gguf_models(names: Iterable[str]) -> list[str]:
    """The GGUF models among file names, each by its first part. Image encoders are no models."""
    return [
        name
        for name in names
        if name.endswith(".gguf")
        and not (file := PurePosixPath(name).name).startswith("mmproj")
        and (not (match := _SPLIT.fullmatch(file)) or int(match[2]) == 1)
    ]


def listed(names: Sequence[str]) -> str:
    """Names for a message: the first twenty."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
