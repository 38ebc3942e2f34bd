"""Read what a folder's config.json says of a draft: EAGLE, EAGLE-3 or Medusa, as their repositories publish them.

docs/speculation.md has the names and shapes. Raises CheckpointError for a malformed value or one that does not fit the
target, UnsupportedModelError for a valid one that is not implemented; both name the key.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path

from quire.spec.config_reader import ConfigReader
from quire.spec.draft import DraftSpec, Features, MedusaSpec
from quire.spec.families import read_spec
from quire.spec.families.common import MAX_LAYERS
from quire.spec.model import MLP, Attention, ModelSpec
from quire.types import CheckpointError, UnsupportedModelError
from quire.util.strict_json import read_json_object

MAX_CONFIG_BYTES = 4 * 2**20
MAX_MEDUSA_HEADS, MAX_MEDUSA_LAYERS = 64, 16
# Stored prefixes -> those of transformers' models.
_PREFIXES = (
    ("midlayer.", "model.layers.0."),
    ("layers.", "model.layers."),
    ("embed_tokens.", "model.embed_tokens."),
    ("norm.", "model.norm."),
)
_TABLES = (r"d2t", r"t2d")  # int64 and bool: see loader.draft_ids


def read_draft(folder: Path, method: str, target: ModelSpec) -> DraftSpec | MedusaSpec:
    """The draft in a folder, for a method of the name "eagle", "eagle3" or "medusa" and a target."""
    path = folder / "config.json"
    if not path.is_file():
        raise CheckpointError(f"{folder}: no config.json")
    return _READERS[method](ConfigReader(read_json_object(path, MAX_CONFIG_BYTES)), target)


def mtp_draft(target: ModelSpec) -> DraftSpec:
    """The multi-token-prediction modules that a model's own checkpoint has behind its layers, each a layer.

    Raises UnsupportedModelError for a model without one.
    """
    if not target.mtp_layers:
        raise UnsupportedModelError(
            "speculative_config.method: the model has no layer for multi-token prediction (num_nextn_predict_layers)"
        )
    first, *further = (_mtp_module(target, len(target.layers) + k) for k in range(target.mtp_layers))
    return replace(first, further=tuple(further))


def _mtp_module(target: ModelSpec, at: int) -> DraftSpec:
    """The module that the checkpoint has as layer `at`."""
    own = f"model.layers.{at}"
    names = {f.name: getattr(target.names, f.name).replace("{i}", str(at)) for f in fields(target.names)}
    stacks = replace(
        target.stacks,
        gate_up=target.stacks.gate_up.replace("{i}", str(at)),
        down=target.stacks.down.replace("{i}", str(at)),
        router=target.stacks.router.replace("{i}", str(at)),
    )
    names["final_norm"] = f"{own}.shared_head.norm"
    model = replace(
        target,
        layers=target.layers[-1:],
        names=type(target.names)(**names),
        stacks=stacks,
        tied=False,
        ignored=(r".*",),
    )
    return DraftSpec(
        model=model, features=Features(), target_dim=target.dim, vocab=target.vocab, fc=f"{own}.eh_proj",
        embed_norm=f"{own}.enorm", feature_norm=f"{own}.hnorm", normed=True,
    )  # fmt: skip


def _eagle(config: ConfigReader, target: ModelSpec) -> DraftSpec:
    """EAGLE and EAGLE-2, which differ in their trees only."""
    model = _layers(config, target)
    _same(config, "hidden_size", model.dim, target.dim)
    normed = config.boolean("add_para_norm", False)
    ignored = (*model.ignored, r"model\.embed_tokens\.weight", r"lm_head\.weight")
    return DraftSpec(
        model=replace(model, ignored=ignored), features=Features(), target_dim=target.dim, vocab=target.vocab,
        bias=config.boolean("bias", True), first_norm=False, final_norm=False,
        embed_norm="embedding_layernorm" if normed else "",
        feature_norm="hidden_states_layernorm" if normed else "",
    )  # fmt: skip


def _eagle3(config: ConfigReader, target: ModelSpec) -> DraftSpec:
    model = _layers(config, target)
    if len(model.layers) > 1:
        raise config.unsupported("num_hidden_layers", "EAGLE-3 drafts have one layer")
    _same(config, "target_hidden_size" if config.has("target_hidden_size") else "hidden_size",
          config.integer("target_hidden_size", model.dim, high=2**31), target.dim)  # fmt: skip
    own_head = config.has("draft_vocab_size")
    vocab = config.integer("draft_vocab_size", target.vocab, high=target.vocab)
    own_embed = model.dim != target.dim
    if own_embed and not own_head:
        raise config.error("draft_vocab_size", "is missing: the target's head takes rows of another width")
    ignored = [*model.ignored, *_TABLES]
    ignored += [] if own_embed else [r"model\.embed_tokens\.weight"]
    ignored += [] if own_head else [r"lm_head\.weight"]
    own = "model.layers.0"
    return DraftSpec(
        model=replace(model, ignored=tuple(ignored)), features=_eagle3_features(config, target), vocab=vocab,
        target_dim=target.dim, wide=True, bias=config.boolean("bias", False),
        embed_norm=f"{own}.input_layernorm", feature_norm=f"{own}.hidden_norm",
        norm_residual=config.boolean("norm_before_residual", False), mapped=vocab < target.vocab,
        own_embed=own_embed, own_head=own_head,
    )  # fmt: skip


def _eagle3_features(config: ConfigReader, target: ModelSpec) -> Features:
    """A low, a middle and a high layer: those after which EAGLE's own code takes features, or those of the config.

    At the top, as speculators and vLLM write them, they count the layers before a feature; in eagle_config, as SGLang
    does, they are the layers that leave it.
    """
    key, layers = "eagle_aux_hidden_state_layer_ids", len(target.layers)
    inner = config.child("eagle_config")
    if inner is not None and not inner.boolean("use_aux_hidden_state", True):
        raise inner.unsupported("use_aux_hidden_state", "EAGLE-3 takes features of three layers")
    given = config.integers(key, low=0, high=layers)
    if not given and inner is not None:
        given = tuple(at + 1 for at in inner.integers(key, low=0, high=layers - 1))
    if not given and layers < 6:
        raise config.error(key, f"is missing: its default is for models of 6 layers and more, not {layers}")
    found = given or (2, layers // 2, layers - 3)
    if len(found) != 3:
        raise config.error(key, f"{list(found)} are not three layers")
    return Features(found)


def _layers(config: ConfigReader, target: ModelSpec) -> ModelSpec:
    """The layers of an EAGLE draft, which are Llama's, whatever the family of the target."""
    values = {key: value for key, value in config.values.items() if key != "architectures"}
    model, _ = read_spec(ConfigReader(values, config.where, config.notices))
    _same(config, "vocab_size", model.vocab, target.vocab)
    bias = config.boolean("qkv_bias", config.boolean("attention_bias", False))
    layers = []
    for layer in model.layers:
        if not isinstance(layer.mixer, Attention) or not isinstance(layer.mlp, MLP):
            raise config.unsupported(
                "model_type", "layers of drafts have keys and values by head, and no experts"
            )
        layers.append(replace(layer, mixer=replace(layer.mixer, qkv_bias=bias, qk_norm=None)))
    return replace(model, layers=tuple(layers), tied=False, prefixes=_PREFIXES)


def _medusa(config: ConfigReader, target: ModelSpec) -> MedusaSpec:
    """Medusa's own names, or those that vLLM gives its conversions."""
    _same(config, "hidden_size", config.integer("hidden_size", target.dim, high=2**31), target.dim)
    for key in ("vocab_size", "truncated_vocab_size"):
        _same(config, key, config.integer(key, target.vocab, high=2**31), target.vocab)
    if config.has("medusa_num_heads"):
        return MedusaSpec(
            heads=config.integer("medusa_num_heads", high=MAX_MEDUSA_HEADS),
            layers=config.integer("medusa_num_layers", 1, high=MAX_MEDUSA_LAYERS),
            dim=target.dim, vocab=target.vocab, dtype=target.dtype,
            own_head=not config.boolean("original_lm_head", False),
            prefixes=(("medusa_heads.", ""), ("medusa_head.", "")),
        )  # fmt: skip
    own_head = not config.boolean("original_lm_head", False)
    return MedusaSpec(
        heads=config.integer("num_heads", high=MAX_MEDUSA_HEADS),
        layers=config.integer("num_hidden_layers", 1, high=MAX_LAYERS),
        dim=target.dim, vocab=target.vocab, dtype=target.dtype, bias=config.boolean("medusa_fc_bias", False),
        own_head=own_head, block="blocks.{h}.layers.{l}", head="lm_heads.{h}",
        ignored=() if own_head else (r"lm_heads?\..*",), prefixes=(("medusa_heads.", ""),),
    )  # fmt: skip


def _same(config: ConfigReader, key: str, found: int, wanted: int) -> None:
    if found != wanted:
        raise config.error(key, f"{found} is not that of the target, {wanted}")


_READERS: dict[str, Callable[[ConfigReader, ModelSpec], DraftSpec | MedusaSpec]] = {
    "eagle": _eagle,
    "eagle3": _eagle3,
    "medusa": _medusa,
}
