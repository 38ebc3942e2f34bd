"""Read the config files of a checkpoint folder: everything that is known before its weights are read."""

from __future__ import annotations

import hashlib
from pathlib import Path

from quire.records import dataclass
from quire.spec.config_reader import ConfigReader
from quire.spec.families import read_spec
from quire.spec.generation_config import Generation, read_generation
from quire.spec.model import ModelSpec
from quire.spec.pooling_facts import PoolingFacts, label_facts
from quire.spec.quantization import Quantization, read_quantization
from quire.types import CheckpointError
from quire.util.strict_json import parse_json_object, read_json_object, read_small_file

MAX_CONFIG_BYTES = 4 * 2**20
# Files that identify a folder without a config.json.
_OTHERS = {
    "params.json": "params.json belongs to the model's original format; Quire needs the transformers format",
    "adapter_config.json": "it contains an adapter, not a model: quire convert --merge-adapter adds it to one",
    "model_index.json": "it contains a diffusers pipeline, not a language model",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """The contents of a checkpoint's config files.

    `quantization` describes the format of quantized tensors, None if they are plain numbers. `longest` is the longest
    context that the position embedding supports; it exceeds `spec.max_positions` only for rope kinds whose longer
    contexts must be requested. `notices` are remarks for the log on ignored contents. `config_sha256` is that of the
    bytes of config.json, in hex. `pooling`: what a model is for that has pooling in place of logits. `pruned`: the
    pattern N:M of zeros that its linears were pruned to, if config.json says so.
    """

    spec: ModelSpec
    architecture: str
    generation: Generation
    quantization: Quantization | None
    longest: int
    notices: tuple[str, ...]
    config_sha256: str
    pooling: PoolingFacts | None = None
    pruned: str = ""


def read_model(folder: Path) -> ModelFacts:
    """Read config.json and, if present, generation_config.json of a checkpoint folder.

    Raises CheckpointError for a missing or malformed file or value, UnsupportedModelError for a valid value that is not
    implemented; both name the key and the value. Code of the checkpoint is never executed.
    """
    data = _config_bytes(folder)
    notices: list[str] = []
    config = ConfigReader(parse_json_object(data, "config.json"), "config.json", notices)
    if config.has("auto_map"):
        notices.append(
            "config.json: auto_map names Python code in the checkpoint, which Quire never loads: ignored"
        )
    generation = None
    path = folder / "generation_config.json"
    if path.exists():
        values = read_json_object(path, MAX_CONFIG_BYTES)
        generation = ConfigReader(values, path.name, notices)
    return facts_of(config, generation, hashlib.sha256(data).hexdigest())


def facts_of(config: ConfigReader, generation: ConfigReader | None, sha256: str) -> ModelFacts:
    """Build the facts of a config from any source; raises like `read_model`."""
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
        pooling=label_facts(config) if spec.pooling is not None else None,
        pruned=_pruned(config),
    )


def _pruned(config: ConfigReader) -> str:
    """The pattern that `quire prune` wrote; another program's entry of that name says nothing."""
    found = config.values.get("quire_pruning")
    pattern = found.get("pattern") if isinstance(found, dict) else None
    return pattern if isinstance(pattern, str) else ""


def _config_bytes(folder: Path) -> bytes:
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: not a folder")
    path = folder / "config.json"
    if not path.exists():
        found = next((hint for name, hint in _OTHERS.items() if (folder / name).exists()), "")
        images = [] if found else sorted(file.name for file in folder.glob("mmproj*.gguf"))
        if images:
            found = f"{images[0]} is an image encoder, which accompanies a model in another file"
        raise CheckpointError(f"{folder}: no config.json{'; ' if found else ''}{found}")
    return read_small_file(path, MAX_CONFIG_BYTES)
