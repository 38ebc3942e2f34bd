"""GGUF metadata -> the same facts as from a config.json, through the same family functions.

The keys of a GGUF architecture are translated into those of the transformers config of the same model, which the family
reads. Names of keys and tensors, and the changes that converters make to tensors, follow
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md and llama.cpp's files.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields, replace

from quire.records import dataclass
from quire.spec.config_reader import ConfigReader, show
from quire.spec.facts import ModelFacts, facts_of
from quire.spec.families.common import MAX_DIM, MAX_HEAD_DIM, MAX_HEADS, MAX_LAYERS, MAX_VOCAB, MAX_WIDTH
from quire.spec.families.experts import MAX_EXPERTS
from quire.spec.gguf_architectures import (
    ARCHITECTURES,
    BARE,
    LAYER_EPSILON,
    RMS_EPSILON,
    ROWS,
    SINGLE_EXPERTS,
    STEMS,
    Architecture,
)
from quire.spec.gguf_keys import Config, GGUFSummary, Keys
from quire.spec.gguf_rope import FACTOR_TENSORS, rope_config
from quire.spec.model import Attention, Layer, ModelSpec, WeightNames
from quire.spec.rope_config import MAX_POSITIONS
from quire.types import CheckpointError, parameter_names


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor by its name in the file. `heads` > 0: rows were permuted per head, (half, pair) to (pair, half), for a
    rotation of neighbouring dimensions, and must be restored. `entry`: that entry of the first axis, one expert of a
    stack. `row`: a vector that the model reads as a matrix of one row. `values`: this tensor has the transposed key
    projection of each head [heads, latent, keys], and the named one the rows of its values. `span`: rows [first, last)
    of the tensor, or of its entry.
    """

    name: str
    heads: int = 0
    entry: int | None = None
    row: bool = False
    values: str = ""
    span: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class GGUFModel:
    """Facts, the stored tensor for each tensor name of the model, and the config."""

    facts: ModelFacts
    tensors: Mapping[str, StoredTensor]
    config: Mapping[str, object]


_BLOCK = re.compile(r"blk\.(\d{1,6})\.(.+)")
_EXPERT = re.compile(r"(ffn_gate|ffn_up|ffn_down)\.(\d{1,4})")
_FORMATS = {"F32": "float32", "F16": "float16"}
# Keys that change the computation: a file that has one which the translation does not read is refused.
_TELLING = re.compile(
    r"(attention|rope|expert|moe|ssm|wkv|kda|altup|classifier|posnet|convnext|shortconv)"
    r"|.*(scale|softcapping|multiplier|sparsity|parallel|every|residual|norm|leading|nextn|clamp)"
)
_END_TOKENS = ("<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<end_of_turn>", "<|endoftext|>",
               "<|end_of_text|>", "<|eom_id|>", "<EOT>", "_<EOT>", "<|END_OF_TURN_TOKEN|>")  # fmt: skip


def read_gguf_model(summary: GGUFSummary) -> GGUFModel:
    """Read the facts of a GGUF file and locate its tensors.

    Raises CheckpointError for a missing or malformed key, UnsupportedModelError for an architecture or a feature
    that is not implemented; both name the file, the key and the value.
    """
    notices: list[str] = []
    reader = ConfigReader(summary.metadata, summary.where, notices)
    name = reader.string("general.architecture")
    if name not in ARCHITECTURES:
        raise reader.unsupported("general.architecture", f"implemented are {', '.join(ARCHITECTURES)}")
    architecture = ARCHITECTURES[name]
    keys = Keys(summary, name, notices)
    config = _config(keys, architecture)
    _refuse_unread(keys)
    where = f"{summary.where} (as config.json)"
    facts = facts_of(
        ConfigReader(config, where, notices),
        ConfigReader(_generation(reader), where, notices),
        summary.sha256,
    )
    facts = replace(facts, spec=spec_of_file(facts.spec, architecture, summary.shapes))
    return GGUFModel(facts, stored_tensors(summary.shapes, facts.spec, architecture), config)


def spec_of_file(
    spec: ModelSpec, architecture: Architecture, shapes: Mapping[str, tuple[int, ...]]
) -> ModelSpec:
    """The spec of a config, with the norms and tensor names of a file."""
    if architecture.whole_norms:
        norm = replace(spec.norm, added=0.0)
        spec = replace(spec, norm=norm, layers=tuple(map(_with_whole_norms, spec.layers)))
    names = replace(spec.names, **architecture.names)
    if "blk.0.attn_q.weight" in shapes:
        names = replace(names, qkv="")
    if "blk.0.ffn_gate.weight" in shapes:
        names = replace(names, gate_up="")
    return replace(spec, names=names)


def _with_whole_norms(layer: Layer) -> Layer:
    attention = layer.mixer
    if not isinstance(attention, Attention) or attention.qk_norm is None:
        return layer
    qk_norm = replace(attention.qk_norm, norm=replace(attention.qk_norm.norm, added=0.0))
    return replace(layer, mixer=replace(attention, qk_norm=qk_norm))


def _config(keys: Keys, architecture: Architecture) -> Config:
    shapes, metadata = keys.summary.shapes, keys.summary.metadata
    if len(shapes.get("token_embd.weight", ())) != 2:
        raise CheckpointError(f"{keys.summary.where}: no matrix token_embd.weight")
    heads = keys.integer("attention.head_count", MAX_HEADS)
    dim = keys.integer("embedding_length", MAX_DIM)
    head_dim = _head_dim(keys, architecture, dim // heads)
    vocab = shapes["token_embd.weight"][0]
    if keys.integer_or("vocab_size", vocab, MAX_VOCAB) != vocab:
        raise keys.error("vocab_size", f"token_embd.weight has {vocab} rows")
    config: Config = {
        "model_type": architecture.model_type,
        "vocab_size": vocab,
        "hidden_size": dim,
        "intermediate_size": keys.integer("feed_forward_length", MAX_WIDTH),
        "num_hidden_layers": keys.integer("block_count", MAX_LAYERS),
        "num_attention_heads": heads,
        "num_key_value_heads": keys.integer_or("attention.head_count_kv", heads, MAX_HEADS),
        "head_dim": head_dim,
        "max_position_embeddings": keys.integer("context_length", MAX_POSITIONS),
        "tie_word_embeddings": "output.weight" not in shapes,
        "torch_dtype": _stored_format(keys.summary),
    }
    for key in (RMS_EPSILON, LAYER_EPSILON):
        keys.has(key)  # some files also have the other one
    eps = keys.number(architecture.epsilon)
    if eps is None:
        raise keys.error(architecture.epsilon, "is missing")
    config["layer_norm_eps" if architecture.epsilon == LAYER_EPSILON else "rms_norm_eps"] = eps
    config |= rope_config(keys, head_dim, partial=architecture.partial)
    for name, key in (("bos", "bos"), ("eos", "eos"), ("padding", "pad")):
        value = metadata.get(f"tokenizer.ggml.{name}_token_id")
        config[f"{key}_token_id"] = value if value != 2**32 - 1 else None
    config["eos_token_id"] = _end_tokens(keys, config["eos_token_id"])
    architecture.translate(keys, config)
    return config


def _head_dim(keys: Keys, architecture: Architecture, default: int) -> int:
    """For latent attention, the rotated part of a head."""
    if architecture.latent:
        for key in ("attention.key_length", "attention.value_length"):
            keys.has(key)  # sizes of the cached row
        return keys.integer("rope.dimension_count", MAX_HEAD_DIM)
    head_dim = keys.integer_or("attention.key_length", default, MAX_HEAD_DIM)
    if keys.integer_or("attention.value_length", head_dim, MAX_HEAD_DIM) != head_dim:
        raise keys.unsupported("attention.value_length", f"keys have {head_dim} dimensions, values must too")
    return head_dim


def _stored_format(summary: GGUFSummary) -> str:
    """float32 or float16 if all matrices are, else bfloat16: the format for dequantized weights."""
    kinds = {summary.stored[name] for name, shape in summary.shapes.items() if len(shape) > 1}
    return _FORMATS.get(kinds.pop(), "bfloat16") if len(kinds) == 1 else "bfloat16"


def _generation(reader: ConfigReader) -> Config:
    """The recommended sampling of the file, as in generation_config.json."""
    names = {name: key for key, name in parameter_names("generation_config").items()}
    found = {
        names.get(name, name): reader.values.get(f"general.sampling.{key}")
        for key, name in parameter_names("GGUF").items()
    }
    return {name: value for name, value in found.items() if value is not None}


def _end_tokens(keys: Keys, eos: object) -> list[object]:
    """The ids for end of text, turn and message, and control tokens that are known to end a turn."""
    named = (keys.summary.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eot", "eom"))
    found = [eos, *named]
    found += [number for number, text in keys.summary.control().items() if text in _END_TOKENS]
    return [number for number in dict.fromkeys(found) if number is not None]


def _refuse_unread(keys: Keys) -> None:
    for name, value in keys.summary.metadata.items():
        key = name.removeprefix(f"{keys.architecture}.")
        if key == name or name in keys.read or (isinstance(value, int | float) and not value):
            continue
        if _TELLING.match(key):
            raise keys.unsupported(key, "this feature is not implemented for this architecture")
        keys.reader.notices.append(f"{keys.summary.where}: {name} = {show(value)} is not read")


def stored_tensors(
    shapes: Mapping[str, tuple[int, ...]], spec: ModelSpec, architecture: Architecture
) -> dict[str, StoredTensor]:
    """Every tensor of a file of these `shapes` by the model's name for it; unknown ones by their own name, so that
    loading refuses them by name.
    """
    names = asked_names(spec.names)
    fields_of = {stem: field for field, stem in STEMS.items() if field in names}
    fields_of |= {stem: field for field, stem in architecture.stems.items()}
    found: dict[str, StoredTensor] = {}
    for name, shape in shapes.items():
        if name in FACTOR_TENSORS:
            continue
        stem, _, suffix = name.rpartition(".")
        match = _BLOCK.fullmatch(stem)
        if match is None:
            target = names.get(fields_of.get(stem, ""))
            found[f"{target}.{suffix}" if target else name] = StoredTensor(name)
            continue
        layer, part = int(match[1]), match[2]
        if layer >= len(spec.layers):
            found[name] = StoredTensor(name)
            continue
        place = _Place(spec, architecture, layer, fields_of.get(f"blk.{{i}}.{part}", ""), part)
        found |= place.tensors(name, suffix, shape, names) or {name: StoredTensor(name)}
    found.pop("", None)
    return found


@dataclass(frozen=True, slots=True)
class _Place:
    """The place of a block's tensor: its layer, and the field of WeightNames, "" if there is none."""

    spec: ModelSpec
    architecture: Architecture
    layer: int
    field: str
    part: str

    def tensors(
        self, name: str, suffix: str, shape: tuple[int, ...], names: Mapping[str, str]
    ) -> dict[str, StoredTensor]:
        """The tensors of the model, by the model's names; none for an unknown one."""
        single = _EXPERT.fullmatch(self.part)
        if single is not None:
            target = names[SINGLE_EXPERTS[single[1]]].format(i=self.layer, e=int(single[2]))
            return {f"{target}.{suffix}": StoredTensor(name)}
        if self.part in {"attn_k_b", "attn_v_b"}:
            return self._keys_and_values(name, names)
        if self.part == "ffn_gate_up_exps":
            return self._gates_and_ups(name, suffix, shape, names)
        if self.part == "attn_qkv" and "qkv" not in names:
            return self._queries_keys_values(name, suffix, shape, names)
        return self._by_field(name, suffix, shape, names) if self.field in names else {}

    def _by_field(
        self, name: str, suffix: str, shape: tuple[int, ...], names: Mapping[str, str]
    ) -> dict[str, StoredTensor]:
        """One tensor, or one per entry of a stack."""
        target = names[self.field]
        if "{e}" in target:
            targets = [target.format(i=self.layer, e=e) for e in range(min(shape[0], MAX_EXPERTS))]
            return {f"{one}.{suffix}": StoredTensor(name, entry=e) for e, one in enumerate(targets)}
        target = target.format(i=self.layer)
        asked = target if self.field in BARE else f"{target}.{suffix}"
        heads = self._heads(self.field)
        return {asked: StoredTensor(name, heads, row=self.field in ROWS and len(shape) == 1)}

    def _keys_and_values(self, name: str, names: Mapping[str, str]) -> dict[str, StoredTensor]:
        """The up-projection of keys in latent attention, together with that of values."""
        if self.part == "attn_v_b":
            return {"": StoredTensor(name)}
        other = f"blk.{self.layer}.attn_v_b.weight"
        return {f"{names['kv_b']}.weight".format(i=self.layer): StoredTensor(name, values=other)}

    def _gates_and_ups(
        self, name: str, suffix: str, shape: tuple[int, ...], names: Mapping[str, str]
    ) -> dict[str, StoredTensor]:
        """For each expert, the rows of gate and then those of up: [experts, 2 · width, dim]."""
        if len(shape) < 2 or shape[1] % 2 or "{e}" not in names.get("expert_gate", ""):
            return {}
        width = shape[1] // 2
        found: dict[str, StoredTensor] = {}
        for field, first in (("expert_gate", 0), ("expert_up", width)):
            for e in range(min(shape[0], MAX_EXPERTS)):
                target = names[field].format(i=self.layer, e=e)
                found[f"{target}.{suffix}"] = StoredTensor(name, entry=e, span=(first, first + width))
        return found

    def _queries_keys_values(
        self, name: str, suffix: str, shape: tuple[int, ...], names: Mapping[str, str]
    ) -> dict[str, StoredTensor]:
        """The rows of q, k and v in order; those of q and k are permuted."""
        attention = self.spec.layers[self.layer].grouped
        found: dict[str, StoredTensor] = {}
        first = 0
        for field, heads in (("q", attention.heads), ("k", attention.kv_heads), ("v", attention.kv_heads)):
            last = first + heads * attention.head_dim
            target = f"{names[field].format(i=self.layer)}.{suffix}"
            found[target] = StoredTensor(name, self._heads(field), span=(first, last))
            first = last
        if shape[0] != first:
            raise CheckpointError(f"tensor {name}: {shape[0]} rows, but its heads have {first}")
        return found

    def _heads(self, field: str) -> int:
        """The number of heads with permuted rows."""
        if not self.architecture.permuted or field not in {"q", "k"}:
            return 0
        attention = self.spec.layers[self.layer].grouped
        return attention.heads if field == "q" else attention.kv_heads


def asked_names(names: WeightNames) -> dict[str, str]:
    """The tensor names of a file, by field, without ".weight". A fused gate and up replaces up."""
    found = {field.name: getattr(names, field.name) for field in fields(names) if field.name in STEMS}
    return {field: name.removesuffix(".weight") for field, name in found.items() if name}
