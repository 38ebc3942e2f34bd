"""Checkpoints from one format to another: safetensors and GGUF, with their configs and tokenizers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from quire.engine.build import Model, open_model, open_weights
from quire.loader import GGUFFiles, Source, TensorInfo
from quire.loader.gguf_writer import OutTensor, write_gguf
from quire.loader.safetensors_writer import write_safetensors
from quire.loader.source import Array
from quire.quant.convert import from_float32, to_float32, to_q8_0
from quire.quant.ggml import READ_TYPES
from quire.quant.linear import F32
from quire.spec.config_reader import ConfigReader
from quire.spec.facts import facts_of
from quire.spec.gguf import ROPE_FACTORS, StoredTensor
from quire.spec.gguf_out import (
    architecture_of,
    check_round_trip,
    gguf_metadata,
    rope_factors,
    stored_names,
)
from quire.text.gguf_out import tokenizer_metadata
from quire.types import CheckpointError

BLOCK_BYTES = 32 * 2**20
_FLOATS = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
DTYPES = ("auto", *_FLOATS, "q8_0")
_NAMES = {stored: name for name, stored in _FLOATS.items()}
_COPIED = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
           "generation_config.json", "chat_template.jinja")  # fmt: skip

Progress = Callable[[int, int], None]


def convert(name: str, out: Path, dtype: str = "auto", progress: Progress | None = None) -> list[str]:
    """Write the model `name` to `out`: a GGUF file when it ends so, else a new folder. Returns what was done.

    Raises CheckpointError when `out` exists or the model is wrong, UnsupportedModelError for what the other format
    cannot say; in both cases nothing is left at `out`.
    """
    if out.exists():
        raise CheckpointError(f"{out}: exists already")
    if dtype == "q8_0" and out.suffix != ".gguf":
        raise CheckpointError("dtype: q8_0 is a format of GGUF files only")
    model = open_model(name)
    write = _to_gguf if out.suffix == ".gguf" else _to_folder
    unfinished = out.with_name(out.name + ".unfinished")
    try:
        with open_weights(model) as source:
            lines = write(model, source, unfinished, dtype, _Counter(source, progress))
        unfinished.rename(out)
    finally:
        if unfinished.is_dir():
            shutil.rmtree(unfinished)
        else:
            unfinished.unlink(missing_ok=True)
    return [*model.facts.notices, *lines]


class _Counter:
    """Tells progress in bytes of what was read."""

    def __init__(self, source: Source, progress: Progress | None) -> None:
        self.total = sum(source.info(name).nbytes for name in source.names())
        self.done, self.progress = 0, progress

    def add(self, nbytes: int) -> None:
        self.done += nbytes
        if self.progress is not None:
            self.progress(self.done, self.total)


def _target(info: TensorInfo, dtype: str) -> str:
    """The format that a tensor is written in."""
    if dtype in _FLOATS:
        return _FLOATS[dtype]
    return "BF16" if info.stored else info.dtype


def _pieces(source: Source, info: TensorInfo, quantum: int, counter: _Counter) -> Iterator[F32]:
    """Numbers of row blocks that start at multiples of `quantum`."""
    row_bytes = 4 * max(int(np.prod(info.shape[1:], dtype=np.int64)), 1)
    step = max(BLOCK_BYTES // row_bytes // quantum, 1) * quantum
    for start in range(0, info.shape[0], step):
        stop = min(start + step, info.shape[0])
        data = source.read(info.name, start, stop)
        yield to_float32(np.ascontiguousarray(data), info.dtype)
        counter.add(data.nbytes)
        source.release(info.name)


def _to_folder(model: Model, source: Source, out: Path, dtype: str, counter: _Counter) -> list[str]:
    infos = [source.info(name) for name in source.names()]
    targets = {info.name: TensorInfo(info.name, _target(info, dtype), info.shape) for info in infos}
    by_name = {info.name: info for info in infos}
    out.mkdir(parents=True)
    main = max(targets.values(), key=lambda info: info.nbytes).dtype
    _write_config(model, out, _NAMES.get(main, "float32"))

    def data(info: TensorInfo) -> Iterator[Array]:
        for values in _pieces(source, by_name[info.name], 1, counter):
            yield from_float32(values, info.dtype)

    write_safetensors(out / "model.safetensors", list(targets.values()), data)
    return [f"{len(infos)} tensors written as {', '.join(sorted({info.dtype for info in targets.values()}))}"]


def _write_config(model: Model, out: Path, dtype: str) -> None:
    """config.json and the tokenizer's files."""
    if model.stored is None:
        config = json.loads((model.folder / "config.json").read_text())
        for name in _COPIED:
            if (model.folder / name).exists():
                shutil.copyfile(model.folder / name, out / name)
    else:
        with GGUFFiles(model.folder) as files:
            config = dict(files.model().config)
        if facts_of(ConfigReader(config), None, "").spec != model.facts.spec:
            raise CheckpointError(
                f"{model.folder}: this architecture's norm weights are stored otherwise in GGUF; converting them back "
                "is not implemented"
            )
        config["architectures"] = [model.facts.architecture]
        if model.tokenizer is not None:
            (out / "tokenizer.json").write_text(model.tokenizer.to_json(), encoding="utf-8")
            settings: dict[str, Any] = {
                "tokenizer_class": "PreTrainedTokenizerFast",
                **model.tokenizer.special_tokens,
            }
            if "default" in model.tokenizer.chat_templates:
                settings["chat_template"] = model.tokenizer.chat_templates["default"]
            (out / "tokenizer_config.json").write_text(json.dumps(settings, ensure_ascii=False, indent=1))
    for key in ("quantization_config", "compression_config", "dtype"):
        config.pop(key, None)
    config["torch_dtype"] = dtype
    config = {key: value for key, value in config.items() if value is not None}
    (out / "config.json").write_text(json.dumps(config, indent=1))


def _to_gguf(model: Model, source: Source, out: Path, dtype: str, counter: _Counter) -> list[str]:
    if model.stored is not None:
        raise CheckpointError(f"{model.folder}: is a GGUF file already")
    config = json.loads((model.folder / "config.json").read_text())
    spec = model.facts.spec
    name = architecture_of(str(config.get("model_type")))
    metadata = gguf_metadata(name, spec, config.get("rms_norm_eps", 1e-6))
    infos = {info.name: info for info in map(source.info, source.names())}
    names = stored_names(name, spec, infos)
    tensors = [OutTensor(names[info.name].name, _kind(info, dtype), info.shape) for info in infos.values()]
    factors = rope_factors(spec)
    if factors is not None:
        tensors.append(OutTensor(ROPE_FACTORS, "F32", factors.shape))
    _add_tokenizer(metadata, model)
    shapes = {tensor.name: tensor.shape for tensor in tensors}
    check_round_trip(metadata, shapes, {tensor.name: tensor.kind for tensor in tensors}, spec)
    asked = {names[info.name].name: info for info in infos.values()}

    def data(tensor: OutTensor) -> Iterator[Array]:
        if tensor.name == ROPE_FACTORS and factors is not None:
            return iter([factors])
        info = asked[tensor.name]
        return _gguf_pieces(source, info, names[info.name], tensor.kind, counter)

    out.parent.mkdir(parents=True, exist_ok=True)
    write_gguf(out, metadata, tensors, data)
    return [f"{len(tensors)} tensors written as {', '.join(sorted({tensor.kind for tensor in tensors}))}"]


def _kind(info: TensorInfo, dtype: str) -> str:
    """Vectors stay float32, as every reader expects; rows that are not whole blocks stay float16."""
    if len(info.shape) == 1:
        return "F32"
    if dtype == "q8_0":
        return "Q8_0" if info.shape[1] % READ_TYPES["Q8_0"].values == 0 else "F16"
    return _target(info, dtype)


def _gguf_pieces(
    source: Source, info: TensorInfo, stored: StoredTensor, kind: str, counter: _Counter
) -> Iterator[Array]:
    dim = info.shape[0] // stored.heads if stored.heads else 1
    for rows in _pieces(source, info, dim, counter):
        values = rows
        if stored.heads:
            halves = rows.reshape(len(rows) // dim, 2, dim // 2, -1)
            values = np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(rows.shape)
        yield to_q8_0(values) if kind == "Q8_0" else from_float32(values, kind)


def _add_tokenizer(metadata: dict[str, Any], model: Model) -> None:
    generation = model.facts.generation
    if generation.eos_token_ids:
        metadata["tokenizer.ggml.eos_token_id"] = generation.eos_token_ids[0]
    if generation.bos_token_id is not None:
        metadata["tokenizer.ggml.bos_token_id"] = generation.bos_token_id
    if model.tokenizer is None:
        metadata["tokenizer.ggml.model"] = "none"
        return
    data = (model.folder / "tokenizer.json").read_bytes()
    found = tokenizer_metadata(data, model.tokenizer.special_tokens, model.facts.spec.vocab)
    metadata.update({key: value for key, value in found.items() if key not in metadata})
    if "default" in model.tokenizer.chat_templates:
        metadata["tokenizer.chat_template"] = model.tokenizer.chat_templates["default"]
