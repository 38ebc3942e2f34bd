"""Converts checkpoints between safetensors and GGUF, with their configs and tokenizers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import field, replace
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from quire.engine.build.assemble import open_weights
from quire.engine.build.opening import Model, open_model
from quire.loader import GGUFOpened, LoadRules, Source, TensorInfo
from quire.loader.gguf_writer import OutTensor, Value, write_gguf
from quire.loader.load import check_tensors
from quire.loader.renamed import renamed
from quire.loader.safetensors_writer import write_safetensors
from quire.loader.source import Array
from quire.lora.base_modules import BaseModules
from quire.lora.merge import Merge, MergedTensor
from quire.lora.read import find_adapter, read_adapter
from quire.offline.texts import TEXT
from quire.program.formats import NumberFormats
from quire.program.lower import lower
from quire.program.tensors import Part
from quire.quant.floats import from_float32, to_float32, to_q8_0
from quire.quant.ggml import READ_TYPES
from quire.quant.linear_codes import F32
from quire.records import dataclass
from quire.spec.config_reader import ConfigReader
from quire.spec.facts import facts_of
from quire.spec.gguf_architectures import ARCHITECTURES
from quire.spec.gguf_config_out import (
    Written,
    architecture_of,
    check_round_trip,
    gguf_metadata,
    rope_factors,
    written_tensors,
)
from quire.spec.gguf_keys import Config
from quire.spec.model import ModelSpec
from quire.text.gguf_tokenizer_out import tokenizer_metadata
from quire.types import CheckpointError, UnsupportedModelError

BLOCK_BYTES = 32 * 2**20
_FLOATS = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
_NAMES = {stored: name for name, stored in _FLOATS.items()}
COPIED = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
           "generation_config.json", "chat_template.jinja", "modules.json", "1_Pooling/config.json",
           "config_sentence_transformers.json", "sentence_bert_config.json")  # fmt: skip
Progress = Callable[[int, int], None]


def convert(
    name: str,
    out: Path,
    dtype: str = "auto",
    progress: Progress | None = None,
    adapters: Sequence[tuple[str, float]] = (),
) -> list[str]:
    """Write the model `name` to `out`: a GGUF file if `out` ends in .gguf, else a new folder. Returns a summary.

    `adapters` are merged into the weights, each (path or name, scale); see lora.merge.Merge.

    Raises CheckpointError when `out` exists, or the model or an adapter is invalid, UnsupportedModelError for what is
    not implemented or the other format cannot express; in both cases nothing is left at `out`.
    """
    if out.exists():
        raise CheckpointError(f"{out}: already exists")
    if dtype == "q8_0" and out.suffix != ".gguf":
        raise CheckpointError("dtype: q8_0 is available for GGUF files only")
    model = open_model(name)
    merge, merged = _merge(model, adapters)
    write = _to_gguf if out.suffix == ".gguf" else _to_folder
    unfinished = out.with_name(out.name + ".unfinished")
    try:
        with open_weights(model) as source:
            lines = write(model, merge, source, unfinished, dtype, _Counter(source, progress))
        unfinished.rename(out)
    finally:
        if unfinished.is_dir():
            shutil.rmtree(unfinished)
        else:
            unfinished.unlink(missing_ok=True)
    return [*model.facts.notices, *merged, *lines]


def _merge(model: Model, adapters: Sequence[tuple[str, float]]) -> tuple[Merge, list[str]]:
    """The changes of the weights, and a line about each adapter."""
    base = BaseModules.of(model.facts.spec)
    found = [(read_adapter(find_adapter(name), base), scale) for name, scale in adapters]
    lines = [
        f"merged {adapter.name} times {scale:g}: {len({**adapter.parts, **adapter.modules_to_save})} modules"
        for adapter, scale in found
    ]
    return Merge(base, found), lines


def _spec(model: Model, merge: Merge) -> ModelSpec:
    """The spec of the model to write: a tied head that an adapter changes becomes one of its own."""
    spec = model.facts.spec
    return replace(spec, tied=False) if merge.unties(spec) else spec


class _Counter:
    """Reports progress in bytes read."""

    def __init__(self, source: Source, progress: Progress | None) -> None:
        self.total = sum(source.info(name).nbytes for name in source.names())
        self.done, self.progress = 0, progress

    def add(self, nbytes: int) -> None:
        self.done += nbytes
        if self.progress is not None:
            self.progress(self.done, self.total)


def _target(info: TensorInfo, dtype: str) -> str:
    """The format in which a tensor is written."""
    if dtype in _FLOATS:
        return _FLOATS[dtype]
    return "BF16" if info.stored else info.dtype


@dataclass(frozen=True, slots=True)
class _Copy:
    """A tensor to write: the numbers of tensor `source` (with `row`, of that row only) plus `added`, or with `changes`
    by adapters, to which `turned` belongs.
    """

    source: TensorInfo
    row: int | None = None
    added: float = 0.0
    changes: MergedTensor | None = None
    turned: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        return self.source.shape if self.row is None else self.source.shape[1:]


def _pieces(source: Source, copy: _Copy, quantum: int, counter: _Counter) -> Iterator[F32]:
    """The numbers in row blocks that start at multiples of `quantum`."""
    info = copy.source
    row_bytes = 4 * max(int(np.prod(info.shape[1:], dtype=np.int64)), 1)
    step = max(BLOCK_BYTES // row_bytes // quantum, 1) * quantum
    rows = range(0, info.shape[0], step) if copy.row is None else (copy.row,)
    for start in rows:
        stop = min(start + step, info.shape[0]) if copy.row is None else start + 1
        data = source.read(info.name, start, stop)
        values = to_float32(np.ascontiguousarray(data), info.dtype)
        values = values + np.float32(copy.added) if copy.added else values
        if copy.changes is not None:
            with np.errstate(over="ignore", invalid="ignore"):
                values = copy.changes.merged(values, start, turned=copy.turned)
            if not np.isfinite(values).all():
                raise CheckpointError(f"tensor {info.name}: with the adapter it has NaN or infinite elements")
        yield values if copy.row is None else values[0]
        counter.add(data.nbytes)
        source.release(info.name)


def _check(model: Model, source: Source) -> LoadRules:
    """Raise CheckpointError unless the tensors match the config."""
    spec = model.facts.spec
    rules = LoadRules.of(spec, quantized=model.facts.quantization is not None)
    check_tensors(lower(spec, NumberFormats()).params, source, rules)
    return rules


def _asked(spec: ModelSpec) -> dict[str, Part]:
    """The tensors of a model, by name."""
    params = lower(spec, NumberFormats()).params
    return {part.tensor: part for param in params for part in param.parts}


def _to_folder(
    model: Model, merge: Merge, source: Source, out: Path, dtype: str, counter: _Counter
) -> list[str]:
    if model.gguf is None:
        config = json.loads((model.folder / "config.json").read_text())
        copies = _from_folder(model, merge, source, config)
    else:
        config, copies = _from_gguf(model.gguf, merge, source)
    targets = {
        name: TensorInfo(name, _target(copy.source, dtype), copy.shape) for name, copy in copies.items()
    }
    out.mkdir(parents=True)
    main = max(targets.values(), key=lambda info: info.nbytes).dtype
    _write_config(model, config, out, _NAMES.get(main, "float32"))

    def data(info: TensorInfo) -> Iterator[Array]:
        for values in _pieces(source, copies[info.name], 1, counter):
            yield from_float32(values, info.dtype)

    write_safetensors(out / "model.safetensors", list(targets.values()), data)
    return [
        f"{len(targets)} tensors written as {', '.join(sorted({info.dtype for info in targets.values()}))}"
    ]


def _from_folder(model: Model, merge: Merge, source: Source, config: Config) -> dict[str, _Copy]:
    """The tensors of a checkpoint under their own names; in `config` a head that was tied."""
    spec = model.facts.spec
    stacks = {stack.name: stack for stack in _check(model, source).stacks}
    stored = {renamed(name, spec.prefixes): name for name in source.names()}
    if merge.unties(spec):
        if "text_config" in config:
            raise UnsupportedModelError(
                "config.json: tie_word_embeddings: an adapter of embedding or head is not supported in this checkpoint"
            )
        config["tie_word_embeddings"] = False
        stored.setdefault(spec.names.head, stored[spec.names.embed])
    copies: dict[str, _Copy] = {}
    for wanted, name in stored.items():
        info, stack = source.info(name), stacks.get(wanted)
        turned = stack is not None and stack.turned(info)
        copies[wanted if name in copies else name] = _Copy(info, changes=merge.of(wanted), turned=turned)
    return copies


def _from_gguf(opened: GGUFOpened, merge: Merge, source: Source) -> tuple[Config, dict[str, _Copy]]:
    """The config of a GGUF file, and the checkpoint tensors it describes, made from those of the file."""
    model, name = opened.model, str(opened.files.metadata["general.architecture"])
    config = dict(model.config)
    if merge.unties(model.facts.spec):
        config["tie_word_embeddings"] = False
    spec = facts_of(ConfigReader(config), None, "").spec
    there, asked = _asked(model.facts.spec), _asked(spec)
    named = {found.name: ours for ours, found in model.tensors.items()}
    copies: dict[str, _Copy] = {}
    for written in written_tensors(name, spec, asked):
        for row, tensor in enumerate(written.sources):
            untied = tensor == spec.names.head and tensor not in model.tensors
            ours = spec.names.embed if untied else tensor
            itself = ours in model.tensors  # otherwise the norm of a head, which is one row
            ours = ours if itself else named[written.name]
            plus = there[ours].added - asked[tensor].added
            copies[tensor] = _Copy(source.info(ours), None if itself else row, plus, merge.of(tensor))
    return config, copies


def _write_config(model: Model, config: Config, out: Path, dtype: str) -> None:
    """config.json and the files of the tokenizer."""
    if model.gguf is None:
        for name in COPIED:
            if (model.folder / name).exists():
                (out / name).parent.mkdir(exist_ok=True)
                shutil.copyfile(model.folder / name, out / name)
    else:
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
    (out / "config.json").write_text(json.dumps(config, indent=1))


class Rounding(Protocol):
    """How the tensors of a GGUF file are rounded. `metadata` is added to that of the file."""

    @property
    def metadata(self) -> Mapping[str, Value]: ...

    def kind(self, tensor: str, shape: tuple[int, ...], plain: str) -> str:
        """The type of a tensor with two or more axes, made from the checkpoint's `tensor`, which is `plain` there."""

    def encode(self, values: F32, kind: str, tensor: str) -> Array:
        """Rows of it as they are written; `tensor` is that of the checkpoint which they are from."""


@dataclass(frozen=True, slots=True)
class _Plain:
    """Floats as the checkpoint has them or as `dtype` says, or Q8_0."""

    dtype: str
    metadata: Mapping[str, Value] = field(default_factory=dict)

    def kind(self, tensor: str, shape: tuple[int, ...], plain: str) -> str:
        del tensor
        if self.dtype != "q8_0":
            return plain
        return "Q8_0" if shape[-1] % READ_TYPES["Q8_0"].values == 0 else "F16"

    def encode(self, values: F32, kind: str, tensor: str) -> Array:
        del tensor
        return to_q8_0(values) if kind == "Q8_0" else from_float32(values, kind)


def write_rounded_gguf(
    model: Model, source: Source, out: Path, rounding: Rounding, progress: Progress | None
) -> list[str]:
    """Write a checkpoint folder as a GGUF file with tensors rounded so; returns notices. Raises like `convert`."""
    merge, _ = _merge(model, ())
    return _to_gguf(model, merge, source, out, "auto", _Counter(source, progress), rounding)


def _to_gguf(
    model: Model, merge: Merge, source: Source, out: Path, dtype: str, counter: _Counter,
    rounding: Rounding | None = None,
) -> list[str]:  # fmt: skip
    rounding = rounding or _Plain(dtype)
    if model.gguf is not None:
        raise CheckpointError(f"{model.folder}: is already a GGUF file")
    config = json.loads((model.folder / "config.json").read_text())
    spec = _spec(model, merge)
    name = architecture_of(str(config.get("model_type")))
    if spec.pooling is not None:
        raise UnsupportedModelError(
            f"{model.facts.architecture} has no head for text, and GGUF files of other models are not written"
        )
    metadata = {**gguf_metadata(name, spec), **rounding.metadata}
    rules = _check(model, source)
    source = rules.view(source)
    written = written_tensors(name, spec, asked := _asked(spec))
    there, plus = set(source.names()), ARCHITECTURES[name].whole_norms
    twins = {spec.names.head: spec.names.embed, **rules.twins}
    copies = {
        tensor: _Copy(
            source.info(tensor if tensor in there else twins[tensor]),
            added=part.added * plus,
            changes=merge.of(tensor),
        )
        for tensor, part in asked.items()
    }
    outs = {found.name: found for found in written}
    tensors = [_out(found, copies[found.sources[0]], dtype, rounding) for found in written]
    factors = rope_factors(spec)
    tensors += [OutTensor(factor, "F32", values.shape) for factor, values in factors.items()]
    notices = _add_tokenizer(metadata, model)
    shapes = {tensor.name: tensor.shape for tensor in tensors}
    check_round_trip(metadata, shapes, {tensor.name: tensor.kind for tensor in tensors}, spec)

    def data(tensor: OutTensor) -> Iterator[Array]:
        if tensor.name in factors:
            return iter([factors[tensor.name]])
        found = outs[tensor.name]
        pieces = (
            _gguf_pieces(source, copies[one], found, tensor.kind, counter, rounding, one)
            for one in found.sources
        )
        return chain.from_iterable(pieces)

    out.parent.mkdir(parents=True, exist_ok=True)
    write_gguf(out, metadata, tensors, data)
    return [
        f"{len(tensors)} tensors written as {', '.join(sorted({tensor.kind for tensor in tensors}))}",
        *notices,
    ]


def _out(written: Written, copy: _Copy, dtype: str, rounding: Rounding) -> OutTensor:
    """Norms stay float32, as all readers expect; rows that are not whole blocks stay float16."""
    count, shape = len(written.sources), copy.shape[1:] if written.row else copy.shape
    if written.split is not None:
        (keys, values), rank = written.split, shape[1]
        heads = shape[0] // (keys + values)
        shape = (heads, values, rank) if written.values else (heads, rank, keys)
    kind = "F32"
    if len(shape) > 1:
        kind = rounding.kind(written.sources[0], shape, _target(copy.source, dtype))
    return OutTensor(written.name, kind, (count, *shape) if count > 1 else shape)


def _gguf_pieces(
    source: Source,
    copy: _Copy,
    written: Written,
    kind: str,
    counter: _Counter,
    rounding: Rounding,
    tensor: str,
) -> Iterator[Array]:
    rows = copy.source.shape[0]
    each = sum(written.split) if written.split else rows // (written.heads or rows)  # rows per head
    for values in _pieces(source, copy, each, counter):
        ready = _as_written(values, written, each)
        yield from_float32(ready, kind) if kind in _NAMES else rounding.encode(ready, kind, tensor)


def _as_written(values: F32, written: Written, each: int) -> F32:
    """Whole heads of `each` rows in the order of a file."""
    if written.split is not None:
        heads = values.reshape(-1, each, values.shape[1])
        keys = written.split[0]
        return np.ascontiguousarray(heads[:, keys:] if written.values else heads[:, :keys].swapaxes(1, 2))
    if written.heads:
        halves = values.reshape(len(values) // each, 2, each // 2, -1)
        return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(values.shape)
    return values


def _add_tokenizer(metadata: dict[str, Any], model: Model) -> list[str]:
    """Write the keys of the tokenizer; returns notices for the user."""
    generation = model.facts.generation
    if generation.eos_token_ids:
        metadata["tokenizer.ggml.eos_token_id"] = generation.eos_token_ids[0]
    if generation.bos_token_id is not None:
        metadata["tokenizer.ggml.bos_token_id"] = generation.bos_token_id
    if model.tokenizer is None:
        metadata["tokenizer.ggml.model"] = "none"
        return []
    data = (model.folder / "tokenizer.json").read_bytes()
    special = model.tokenizer.special_tokens
    found, notices = tokenizer_metadata(data, special, model.facts.spec.vocab, TEXT)
    metadata.update({key: value for key, value in found.items() if key not in metadata})
    if "default" in model.tokenizer.chat_templates:
        metadata["tokenizer.chat_template"] = model.tokenizer.chat_templates["default"]
    return notices
