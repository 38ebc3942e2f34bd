"""Opening a checkpoint: its config and tokenizer are found, read and checked, but no weights.

The HTTP process needs nothing else of a model, and its start includes all imports of this file. So numpy and the code
that reads, lowers or computes weights stay out; the code for GGUF files and the hub is imported when needed.
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
from quire.text.tokenizer_files import OTHER_VOCABULARIES
from quire.util.kept import KeptFiles
from quire.util.startup_spans import Startup

if TYPE_CHECKING:
    from quire.loader import GGUFFiles, GGUFOpened
    from quire.text.outline import TokenizerOutline
    from quire.text.tokenizer import Tokenizer

# Memory of a tokenizer per byte of its file; measured at 8.
TOKENIZER_FACTOR = 10
_WEIGHT_FILES = ("model.safetensors", "model.safetensors.index.json")


@dataclass(frozen=True, slots=True)
class Model:
    """The facts and tokenizer of a checkpoint, before any weight is read.

    `folder` is the folder of the checkpoint, or its GGUF file, which `gguf` has opened.
    """

    folder: Path
    facts: ModelFacts
    tokenizer: Tokenizer | None
    gguf: GGUFOpened | None = None
    tokenizer_later: bool = False  # there is one; `build` reads it while the weights are being checked


def find_model(name: str | Path) -> Path:
    """The folder or GGUF file for a model name; see loader.resolve_model."""
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
    """Find a model and read everything but its weights. A folder without a tokenizer accepts token ids only.

    `tokenizer` false leaves the tokenizer to another process, `later` leaves that of a folder to `build`. `files`: the
    GGUF files of the model if they are already open; the model keeps them open. `cache`: for a compiled tokenizer.

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
        from quire.text.gguf_tokenizer import gguf_tokenizer  # the engine process needs no tokenizer

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
    """The cache for files that can be made again; None when caching is off."""
    if asked.loading.weight_cache == "off":
        return None
    if asked.loading.weight_cache_dir is not None:
        return KeptFiles(Path(asked.loading.weight_cache_dir).expanduser(), asked.loading.weight_cache_size)
    folder = env.cache_folder()
    return None if folder is None else KeptFiles(folder / "weights", asked.loading.weight_cache_size)


def gguf_files(folder: Path) -> GGUFFiles | None:
    """The opened files of a GGUF model; None for a checkpoint folder."""
    if not folder.is_file():
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
    """The kind and special tokens of a tokenizer, from the part of its files before the merges; None without one.

    Checked against the model. Raises CheckpointError.
    """
    if model.gguf is not None:
        from quire.text.gguf_tokenizer import gguf_outline

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
    """Whether a checkpoint folder contains a tokenizer, supported or not."""
    return any((folder / name).exists() for name in ("tokenizer.json", *OTHER_VOCABULARIES))


def tokenizer_memory(folder: Path, files: GGUFFiles | None = None) -> int:
    """Bytes of memory for the tokenizer of a checkpoint, estimated from its file; 0 without one.

    `files`: those of a GGUF model.
    """
    if files is not None:
        return TOKENIZER_FACTOR * files.header_bytes
    tokenizer = folder / "tokenizer.json"
    return TOKENIZER_FACTOR * tokenizer.stat().st_size if tokenizer.exists() else 0
