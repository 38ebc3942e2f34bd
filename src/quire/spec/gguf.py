"""GGUF metadata -> the same facts as from a config.json, through the same family functions.

An architecture of GGUF is a way to say a config: its keys are translated into those of the transformers config
that describes the same model, and the family reads that. Names of the keys and tensors, and what converters do
to tensors, are those of https://github.com/ggml-org/ggml/blob/master/docs/gguf.md and of llama.cpp's files.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace

from quire.spec.config_reader import ConfigReader, show
from quire.spec.facts import ModelFacts, facts_of
from quire.spec.families.common import MAX_DIM, MAX_HEAD_DIM, MAX_HEADS, MAX_LAYERS, MAX_VOCAB, MAX_WIDTH
from quire.spec.model import ModelSpec
from quire.spec.rope_config import MAX_POSITIONS
from quire.types import CheckpointError, UnsupportedModelError

Config = dict[str, object]
_MAX_NUMBER = 1e15


@dataclass(frozen=True, slots=True)
class GGUFSummary:
    """What translating needs of a file: `where` names it, `metadata` holds plain values (arrays as other
    objects), `shapes` the tensors' sizes outermost first, `stored` the tensor type by name, `vector` reads a
    small float tensor, `control` are the texts of control tokens by id, `sha256` is of the header.
    """

    where: str
    metadata: Mapping[str, object]
    shapes: Mapping[str, tuple[int, ...]]
    stored: Mapping[str, str]
    vector: Callable[[str], Sequence[float]]
    control: Callable[[], Mapping[int, str]]
    sha256: str


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor by its name in the file. `heads` > 0: its rows were permuted head by head, from (half, pair) to
    (pair, half), for a rotation of neighbouring dimensions, and are to be put back.
    """

    name: str
    heads: int = 0


@dataclass(frozen=True, slots=True)
class GGUFModel:
    """Facts, for each name that the model asks for the tensor that has it, and the config that was read."""

    facts: ModelFacts
    tensors: Mapping[str, StoredTensor]
    config: Mapping[str, object]


class _Keys:
    """Typed reads of `{architecture}.{key}`, remembering which keys were read."""

    def __init__(self, summary: GGUFSummary, architecture: str, notices: list[str]) -> None:
        self.summary, self.architecture = summary, architecture
        self.reader = ConfigReader(summary.metadata, summary.where, notices)
        self.read: set[str] = set()

    def _name(self, key: str) -> str:
        name = f"{self.architecture}.{key}"
        self.read.add(name)
        return name

    def has(self, key: str) -> bool:
        return self.reader.has(self._name(key))

    def integer(self, key: str, high: int, *, low: int = 1) -> int:
        return self.reader.integer(self._name(key), low=low, high=high)

    def integer_or(self, key: str, default: int, high: int) -> int:
        return self.reader.integer(self._name(key), default, low=0, high=high)

    def number(self, key: str, default: float | None = None) -> float | None:
        return self.reader.number(self._name(key), default, low=-_MAX_NUMBER, high=_MAX_NUMBER)

    def string(self, key: str, default: str) -> str:
        return self.reader.string(self._name(key), default)

    def error(self, key: str, message: str) -> CheckpointError:
        return self.reader.error(self._name(key), message)

    def unsupported(self, key: str, why: str) -> UnsupportedModelError:
        return self.reader.unsupported(self._name(key), why)


def _nothing_more(keys: _Keys, config: Config) -> None:
    """The keys that all architectures share say everything."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """One `general.architecture`: the model_type it is, and whether its converter permutes q and k.

    `whole_norms`: the converter stores norm weights with the one added that the checkpoint leaves out.
    `translate` adds what the keys common to all do not say.
    """

    model_type: str
    permuted: bool = False
    whole_norms: bool = False
    translate: Callable[[_Keys, Config], None] = _nothing_more


# WeightNames field -> name in the file, without ".weight" or ".bias".
STEMS = {
    "embed": "token_embd",
    "final_norm": "output_norm",
    "head": "output",
    "attn_norm": "blk.{i}.attn_norm",
    "mlp_norm": "blk.{i}.ffn_norm",
    "q": "blk.{i}.attn_q",
    "k": "blk.{i}.attn_k",
    "v": "blk.{i}.attn_v",
    "o": "blk.{i}.attn_output",
    "q_norm": "blk.{i}.attn_q_norm",
    "k_norm": "blk.{i}.attn_k_norm",
    "gate": "blk.{i}.ffn_gate",
    "up": "blk.{i}.ffn_up",
    "down": "blk.{i}.ffn_down",
}
ROPE_FACTORS = "rope_freqs.weight"
_BLOCK = re.compile(r"blk\.(\d{1,6})\.(.+)")
_FORMATS = {"F32": "float32", "F16": "float16"}
# Keys that change the computation: present and not read by the translation, the file is refused.
_TELLING = re.compile(
    r"(attention|rope|expert|moe|ssm|wkv|kda|altup|classifier|posnet|convnext|shortconv)"
    r"|.*(scale|softcapping|multiplier|sparsity|parallel|every|residual|norm|leading|nextn|clamp)"
)
_END_TOKENS = ("<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<end_of_turn>", "<|endoftext|>",
               "<|end_of_text|>", "<|eom_id|>", "<EOT>", "_<EOT>", "<|END_OF_TURN_TOKEN|>")  # fmt: skip


def _plain_biases(keys: _Keys, config: Config) -> None:
    shapes = keys.summary.shapes
    config["attention_bias"] = "blk.0.attn_q.bias" in shapes
    config["mlp_bias"] = "blk.0.ffn_gate.bias" in shapes


def _dense(keys: _Keys, config: Config) -> None:
    _plain_biases(keys, config)
    if keys.integer_or("expert_count", 0, 2**16):
        raise keys.unsupported("expert_count", "mixtures of experts of this architecture are not implemented")


def _gemma(_keys: _Keys, config: Config) -> None:
    config["hidden_act"] = config["hidden_activation"] = "gelu_pytorch_tanh"


ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture("llama", permuted=True, translate=_dense),
    "qwen2": Architecture("qwen2"),
    "qwen3": Architecture("qwen3", translate=_plain_biases),
    "gemma": Architecture("gemma", whole_norms=True, translate=_gemma),
}


def read_gguf_model(summary: GGUFSummary) -> GGUFModel:
    """Facts of a GGUF file and where its tensors are.

    Raises CheckpointError for a missing or malformed key, UnsupportedModelError for an architecture or a feature
    that is not implemented; both name the file, the key and the value.
    """
    notices: list[str] = []
    reader = ConfigReader(summary.metadata, summary.where, notices)
    name = reader.string("general.architecture")
    if name not in ARCHITECTURES:
        raise reader.unsupported("general.architecture", f"implemented are {', '.join(ARCHITECTURES)}")
    architecture = ARCHITECTURES[name]
    keys = _Keys(summary, name, notices)
    config = _config(keys, architecture)
    _refuse_unread(keys)
    where = f"{summary.where} (as config.json)"
    facts = facts_of(
        ConfigReader(config, where, notices),
        ConfigReader(_generation(reader), where, notices),
        summary.sha256,
    )
    if architecture.whole_norms:
        spec = facts.spec
        facts = replace(facts, spec=replace(spec, norm=replace(spec.norm, plus=0.0)))
    return GGUFModel(facts, _tensors(summary, facts.spec, architecture), config)


def _config(keys: _Keys, architecture: Architecture) -> Config:
    shapes, metadata = keys.summary.shapes, keys.summary.metadata
    if len(shapes.get("token_embd.weight", ())) != 2:
        raise CheckpointError(f"{keys.summary.where}: no matrix token_embd.weight")
    heads = keys.integer("attention.head_count", MAX_HEADS)
    dim = keys.integer("embedding_length", MAX_DIM)
    head_dim = keys.integer_or("attention.key_length", dim // heads, MAX_HEAD_DIM)
    if keys.integer_or("attention.value_length", head_dim, MAX_HEAD_DIM) != head_dim:
        raise keys.unsupported("attention.value_length", f"keys have {head_dim} dimensions, values must too")
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
    eps = keys.number("attention.layer_norm_rms_epsilon")
    if eps is not None:
        config["rms_norm_eps"] = eps
    config |= _rope(keys, head_dim)
    for name, key in (("bos", "bos"), ("eos", "eos"), ("padding", "pad")):
        value = metadata.get(f"tokenizer.ggml.{name}_token_id")
        config[f"{key}_token_id"] = value if value != 2**32 - 1 else None
    config["eos_token_id"] = _end_tokens(keys, config["eos_token_id"])
    architecture.translate(keys, config)
    return config


def _stored_format(summary: GGUFSummary) -> str:
    """float32 or float16 when all matrices are, else bfloat16: what quantized weights are dequantized to."""
    kinds = {summary.stored[name] for name, shape in summary.shapes.items() if len(shape) > 1}
    return _FORMATS.get(kinds.pop(), "bfloat16") if len(kinds) == 1 else "bfloat16"


def _rope(keys: _Keys, head_dim: int) -> Config:
    config: Config = {}
    theta = keys.number("rope.freq_base")
    if theta is not None:
        config["rope_theta"] = theta
    rotated = keys.integer_or("rope.dimension_count", head_dim, MAX_HEAD_DIM)
    if rotated != head_dim:
        config["partial_rotary_factor"] = rotated / head_dim
    scaling = _rope_scaling(keys)
    if ROPE_FACTORS in keys.summary.shapes:
        if scaling is not None:
            raise keys.unsupported("rope.scaling.type", f"the file has {ROPE_FACTORS} as well")
        scaling = _rope_factors(keys)
    if scaling is not None:
        config["rope_scaling"] = scaling
    return config


def _rope_factors(keys: _Keys) -> Config:
    """A divisor for each pair's frequency, at every length: a longrope whose two lists are one."""
    factors = [float(factor) for factor in keys.summary.vector(ROPE_FACTORS)]
    return {"rope_type": "longrope", "short_factor": factors, "long_factor": factors, "attention_factor": 1.0}


def _rope_scaling(keys: _Keys) -> Config | None:
    kind = keys.string("rope.scaling.type", "")
    factor = keys.number("rope.scaling.factor")
    old = keys.number("rope.scale_linear")  # files of 2023
    keys.has("rope.scaling.finetuned")
    original = keys.integer_or("rope.scaling.original_context_length", 0, MAX_POSITIONS)
    if kind in {"", "none"} and old not in {None, 0.0, 1.0}:
        kind, factor = "linear", old
    match kind:
        case "" | "none":
            return None
        case "linear":
            return {"rope_type": "linear", "factor": factor} if factor not in {None, 0.0, 1.0} else None
        case "yarn":
            scaling: Config = {"rope_type": "yarn", "factor": factor}
            if original:
                scaling["original_max_position_embeddings"] = original
            return scaling | _yarn(keys)
        case _:
            raise keys.unsupported("rope.scaling.type", "implemented kinds are none, linear and yarn")


def _yarn(keys: _Keys) -> Config:
    found: Config = {}
    for key, name in (("beta_fast", "beta_fast"), ("beta_slow", "beta_slow")):
        for spelling in (f"rope.scaling.yarn_{key}", f"rope.scaling.{key}"):
            value = keys.number(spelling)
            if value is not None:
                found[name] = value
    for key in ("rope.scaling.attn_factor", "rope.scaling.yarn_attn_factor", "rope.scaling.yarn_ext_factor"):
        if keys.number(key, 1.0) != 1.0:
            raise keys.unsupported(key, "only 1 is implemented")
    return found


def _generation(reader: ConfigReader) -> Config:
    """The sampling that the file recommends, as generation_config.json would say it."""
    names = {"temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p",
             "penalty_repeat": "repetition_penalty"}  # fmt: skip
    found = {name: reader.values.get(f"general.sampling.{key}") for key, name in names.items()}
    return {name: value for name, value in found.items() if value is not None}


def _end_tokens(keys: _Keys, eos: object) -> list[object]:
    """The end-of-text id, end-of-turn and end-of-message ids, and control tokens that are known as such."""
    named = (keys.summary.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eot", "eom"))
    found = [eos, *named]
    found += [number for number, text in keys.summary.control().items() if text in _END_TOKENS]
    return [number for number in dict.fromkeys(found) if number is not None]


def _refuse_unread(keys: _Keys) -> None:
    for name, value in keys.summary.metadata.items():
        key = name.removeprefix(f"{keys.architecture}.")
        if key == name or name in keys.read or (isinstance(value, int | float) and not value):
            continue
        if _TELLING.match(key):
            raise keys.unsupported(key, "this feature is not implemented for this architecture")
        keys.reader.notices.append(f"{keys.summary.where}: {name} = {show(value)} is not read")


def _tensors(summary: GGUFSummary, spec: ModelSpec, architecture: Architecture) -> dict[str, StoredTensor]:
    """Every tensor of the file under the name that the model asks for; unknown ones under their own, so that
    loading refuses them by name.
    """
    names = {field.name: getattr(spec.names, field.name) for field in fields(spec.names)}
    asked = {stem: names[field].removesuffix(".weight") for field, stem in STEMS.items() if field in names}
    found: dict[str, StoredTensor] = {}
    for name in summary.shapes:
        if name == ROPE_FACTORS:
            continue
        stem, _, suffix = name.rpartition(".")
        heads, target = 0, asked.get(stem)
        if match := _BLOCK.fullmatch(stem):
            layer, part = int(match[1]), match[2]
            target = asked.get(f"blk.{{i}}.{part}")
            if target is not None and layer < len(spec.layers):
                target = target.format(i=layer)
                if architecture.permuted and part in {"attn_q", "attn_k"}:
                    attention = spec.layers[layer].attention
                    heads = attention.heads if part == "attn_q" else attention.kv_heads
        found[f"{target}.{suffix}" if target else name] = StoredTensor(name, heads)
    return found
