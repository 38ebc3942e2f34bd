"""read_model: a checkpoint folder's config files -> everything that is known before its weights are read."""

from __future__ import annotations

import hashlib
from pathlib import Path

from quire.records import dataclass
from quire.spec.config_reader import ConfigReader
from quire.spec.families import read_spec
from quire.spec.generation import Generation, read_generation
from quire.spec.model import ModelSpec
from quire.spec.quantization import Quantization, read_quantization
from quire.types import CheckpointError
from quire.util.strict_json import parse_json_object, read_json_object, read_small_file

MAX_CONFIG_BYTES = 4 * 2**20
# Files of a folder without a config.json that tell what it is.
_OTHERS = {
    "params.json": "params.json belongs to the model's original format, the transformers format is needed",
    "adapter_config.json": "it holds an adapter, which changes a model and is none",
    "model_index.json": "it holds a pipeline of diffusers, not a language model",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What a checkpoint's config files say.

    `quantization` says how a checkpoint's quantized tensors are read, None when they are plain numbers.
    `longest` is the largest context the position embedding can be run at; above `spec.max_positions` only for
    rope kinds whose longer contexts are asked for on purpose. `notices` are sentences for the log:
    what the files hold and Quire does not use. `config_sha256` is of config.json's bytes, in hex.
    """

    spec: ModelSpec
    architecture: str
    generation: Generation
    quantization: Quantization | None
    longest: int
    notices: tuple[str, ...]
    config_sha256: str


def read_model(folder: Path) -> ModelFacts:
    """Read config.json and, if present, generation_config.json of a checkpoint folder.

    Raises CheckpointError for a missing or malformed file or value, UnsupportedModelError for anything that
    is well-formed but not implemented; both name the key and the value. Nothing is ever executed.
    """
    data = _config_bytes(folder)
    notices: list[str] = []
    config = ConfigReader(parse_json_object(data, "config.json"), "config.json", notices)
    if config.has("auto_map"):
        notices.append("config.json: auto_map names Python code of the checkpoint: never loaded, ignored")
    generation = None
    path = folder / "generation_config.json"
    if path.exists():
        values = read_json_object(path, MAX_CONFIG_BYTES)
        generation = ConfigReader(values, path.name, notices)
    return facts_of(config, generation, hashlib.sha256(data).hexdigest())


def facts_of(config: ConfigReader, generation: ConfigReader | None, sha256: str) -> ModelFacts:
    """The facts of a config, whatever it was read from; errors as `read_model`."""
    quantization = read_quantization(config)
    spec, architecture = read_spec(config)
    return ModelFacts(
        spec=spec,
        architecture=architecture,
        generation=read_generation(config, generation, spec.vocab),
        quantization=quantization,
        longest=max(spec.longest, spec.max_positions),
        notices=tuple(config.notices),
        config_sha256=sha256,
    )


def _config_bytes(folder: Path) -> bytes:
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: not a folder")
    path = folder / "config.json"
    if not path.exists():
        found = next((hint for name, hint in _OTHERS.items() if (folder / name).exists()), "")
        images = [] if found else sorted(file.name for file in folder.glob("mmproj*.gguf"))
        if images:
            found = f"{images[0]} is an image encoder, which goes with a model in a file of its own"
        raise CheckpointError(f"{folder}: no config.json{'; ' if found else ''}{found}")
    return read_small_file(path, MAX_CONFIG_BYTES)
