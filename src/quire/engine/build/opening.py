"""A checkpoint as far as its config and tokenizer: found, read and checked, before any weight.

All that the HTTP process needs of a model. It starts with what is imported here, so numpy and whatever reads, lowers or
computes weights stays out: the parts for GGUF files and the hub are imported when they are asked for.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from quire.config import env
from quire.config.schema import EngineConfig
from quire.config.shipped import shipped_models
from quire.records import dataclass
from quire.spec.consistency import check_tokenizer_size
from quire.spec.facts import ModelFacts, read_model
from quire.text.files import OTHER_VOCABULARIES
from quire.util.kept import KeptFiles
from quire.util.startup import Startup

if TYPE_CHECKING:
    from quire.loader import GGUFFiles, GGUFOpened
    from quire.text.outline import TokenizerOutline
    from quire.text.tokenizer import Tokenizer

# What a tokenizer takes in memory for each byte of its file: measured at 8.
TOKENIZER_FACTOR = 10
_WEIGHT_FILES = ("model.safetensors", "model.safetensors.index.json")


@dataclass(frozen=True, slots=True)
class Model:
    """A checkpoint's facts and tokenizer, before any weight is read.

    `folder` is the checkpoint's folder, or its GGUF file, which `gguf` has opened.
    """

    folder: Path
    facts: ModelFacts
    tokenizer: Tokenizer | None
    gguf: GGUFOpened | None = None
    tokenizer_later: bool = False  # there is one, and `build` reads it while the weights are checked


def find_model(name: str | Path) -> Path:
    """The folder or GGUF file that a name means, as loader.resolve_model says."""
    path = Path(name).expanduser()
    if not path.exists():
        path = shipped_models().get(str(name), path)
    if str(name) and any((path / file).is_file() for file in _WEIGHT_FILES):
        return path
    from quire.loader import resolve_model

    return resolve_model(name)


def open_model(
    name: str | Path,
    *,
    tokenizer: bool = True,
    later: bool = False,
    startup: Startup | None = None,
    files: GGUFFiles | None = None,
    cache: KeptFiles | None = None,
) -> Model:
    """Find a model and read everything but its weights. A folder without a tokenizer works on token ids.

    `tokenizer` false leaves the tokenizer to another process, `later` a folder's to `build`. `files`: the model's
    GGUF files when they are open already; the model keeps them open. `cache`: for what building a tokenizer gives.

    Raises CheckpointError or UnsupportedModelError naming the file and key.
    """
    startup = startup or Startup()
    with startup.span("config"):
        folder = find_model(name)
        files = files or gguf_files(folder)
        gguf = None if files is None else _opened(files)
        facts = read_model(folder) if gguf is None else gguf.model.facts
    found = None
    if tokenizer and gguf is not None:
        from quire.text.gguf import gguf_tokenizer  # the engine process needs no tokenizer

        with startup.span("tokenizer"):
            found = gguf_tokenizer(
                gguf.files.metadata, folder.name, cache, facts.config_sha256, gguf.files.header_bytes
            )
            if found is not None:
                check_tokenizer_size(found.highest_id + 1, facts.spec.vocab)
    elif tokenizer and has_tokenizer(folder):
        if later:
            return Model(folder, facts, None, gguf, tokenizer_later=True)
        found = folder_tokenizer(folder, facts, startup, cache)
    if gguf is not None:
        gguf.files.release_headers()
    return Model(folder, facts, found, gguf)


def kept_files(asked: EngineConfig) -> KeptFiles | None:
    """Where what can be made again is kept; None when nothing is to be."""
    if asked.weight_cache == "off":
        return None
    if asked.weight_cache_dir is not None:
        return KeptFiles(Path(asked.weight_cache_dir).expanduser(), asked.weight_cache_size)
    folder = env.cache_folder()
    return None if folder is None else KeptFiles(folder / "weights", asked.weight_cache_size)


def gguf_files(folder: Path) -> GGUFFiles | None:
    """The opened files of a GGUF model, None for a checkpoint folder."""
    if folder.suffix != ".gguf" or not folder.is_file():
        return None
    from quire.loader import GGUFFiles

    return GGUFFiles(folder)


def _opened(files: GGUFFiles) -> GGUFOpened:
    from quire.loader import GGUFOpened

    try:
        return GGUFOpened.at(files)
    except BaseException:
        files.close()
        raise


def folder_tokenizer(folder: Path, facts: ModelFacts, startup: Startup, cache: KeptFiles | None) -> Tokenizer:
    """The tokenizer of a checkpoint folder, checked against the model. Raises CheckpointError."""
    from quire.text.tokenizer import Tokenizer

    with startup.span("tokenizer"):
        found = Tokenizer.from_dir(folder, cache=cache)
        check_tokenizer_size(found.highest_id + 1, facts.spec.vocab)
    return found


def tokenizer_outline(model: Model) -> TokenizerOutline | None:
    """What a model's tokenizer is, from what stands in its files before the merges; None when there is none.

    Checked against the model. Raises CheckpointError.
    """
    if model.gguf is not None:
        from quire.text.gguf import gguf_outline

        found = gguf_outline(model.gguf.files.metadata, model.folder.name)
    elif has_tokenizer(model.folder):
        from quire.text.outline import folder_outline

        found = folder_outline(model.folder)
    else:
        return None
    if found is not None:
        check_tokenizer_size(found.highest_id + 1, model.facts.spec.vocab)
    return found


def has_tokenizer(folder: Path) -> bool:
    """Whether a checkpoint folder holds a tokenizer, of a kind that is read or not."""
    return any((folder / name).exists() for name in ("tokenizer.json", *OTHER_VOCABULARIES))


def tokenizer_memory(folder: Path, files: GGUFFiles | None = None) -> int:
    """Bytes that a checkpoint's tokenizer takes in memory, by the size of its file; 0 when it has none.

    `files`: of a GGUF model.
    """
    if files is not None:
        return TOKENIZER_FACTOR * files.header_bytes
    tokenizer = folder / "tokenizer.json"
    return TOKENIZER_FACTOR * tokenizer.stat().st_size if tokenizer.exists() else 0
