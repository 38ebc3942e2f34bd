"""Generates docs/models.md from the registry and a released model of each family.

python -m tools.models_table > docs/models.md
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from quire.spec import Attention, ModelSpec, MoE
from quire.spec.config_reader import ConfigReader
from quire.spec.describe import attention_text, experts_text, kv_elements, mha_elements, rope_text
from quire.spec.families import FAMILIES, read_spec

EXAMPLES = Path(__file__).with_name("models_table.json")
_TOP = """# Models

Quire runs the model families below from their transformers checkpoints (`config.json` and safetensors). Each family is
tested against transformers with tiny checkpoints that transformers writes: whole prompts, chunks, token by token and
mixed batches, in float32 to about 1e-5. `quire inspect MODEL` shows these facts for a checkpoint on disk, and whether
it fits.

Unsupported settings are refused by name when the config is read. This page is made by `python -m tools.models_table`.

"""
_HEAD = ("`model_type`", "Architecture", "For example", "Attention", "Positions", "Block", "KV bytes/token")
_BOTTOM = """
KV bytes/token are for the example model with a bfloat16 cache: 2 · kv_heads · head_dim · 2 bytes per layer,
(latent + rotated key) · 2 bytes for MLA; in brackets the bytes of layers with full attention, which alone grow when a
text is longer than the windows; then the share relative to MHA.

- **Attention**: query/key-value heads and their size. Every ratio works: MHA, GQA, MQA. Layers with a window keep only
  blocks within reach of the window. MLA: heads and the unrotated + rotated size of a query; the latent + rotated key
  that a token caches for all heads (decision 0019).
- **Positions**: base, rotated part of a head, scaling. `linear`, `dynamic`, `llama3`, `yarn` and `longrope` work in
  every family (the `su` and `yarn` of a Phi-3 config are longrope), with old (`rope_scaling`) and new
  (`rope_parameters`) keys, for all layers or per layer type where the family supports it. The default context of
  `dynamic` and `longrope` is the original one; `--max-model-len` sets a longer one (decisions 0002, 0014).
- **Block**: norms before (pre), after (post) or around (sandwich) each branch, and other differences. Experts are read
  as one tensor each or stacked, also as MXFP4; a step reads only the experts selected by its tokens (decision 0018).

A family is also read as `…Model` and `…ForSequenceClassification`: without a head, and with one for labels.
"""
_ENCODERS = """
## Encoders

BERT, RoBERTa and XLM-RoBERTa, DistilBERT, ModernBERT, Nomic Embed, GTE and Jina's give
[vectors, scores and labels](embeddings.md) and keep no cache. Each is tested against transformers (`new` and
JinaBERT, which is `bert` with ALiBi in place of learned positions: against their published definitions) alone and in
mixed batches, in float32 to about 1e-5.

"""
_ENCODER_HEAD = (
    "`model_type`",
    "Architecture",
    "For example",
    "Attention",
    "Positions",
    "Block",
    "Longest text",
)


def table() -> str:
    """Return the whole page."""
    decoders, encoders = [_HEAD], [_ENCODER_HEAD]
    examples = json.loads(EXAMPLES.read_text())
    for family in FAMILIES:
        example = examples[family.model_type]
        config = {"model_type": family.model_type, "dtype": "bfloat16", **example["config"]}
        spec, _ = read_spec(ConfigReader(config))
        row = (
            f"`{family.model_type}`", ", ".join(f"`{name}`" for name in family.architectures),
            example["model"], _attention(spec), _positions(spec), _block(spec),
        )  # fmt: skip
        if spec.encoder:
            encoders.append((*row, f"{spec.max_positions:,}"))
        else:
            decoders.append((*row, _kv(spec)))
    return _TOP + _rows(decoders) + _BOTTOM + _ENCODERS + _rows(encoders)


def _rows(rows: Sequence[tuple[str, ...]]) -> str:
    return "".join(f"| {' | '.join(row)} |\n" for row in (rows[0], ("---",) * len(rows[0]), *rows[1:]))


def _attention(spec: ModelSpec) -> str:
    att = spec.layers[0].attention
    text = attention_text(att)
    if not isinstance(att, Attention):
        return text
    windows = [layer.attention.window for layer in spec.layers]
    if any(windows):
        full = windows.count(0)
        text += f"; window {max(windows)} in {len(windows) - full} of {len(windows)} layers"
    norm = att.qk_norm
    for on, words in (
        (norm, f"{'layer' if norm and norm.norm.kind == 'layer' else 'RMS'} q/k norm"
               f"{' over all heads' if norm and norm.whole else ''}"),
        (att.softcap, f"soft cap {att.softcap:g}"),
        (att.sinks, "sinks"),
        (att.qkv_bias, "q/k/v bias"),
    ):  # fmt: skip
        text += f"; {words}" if on else ""
    return text


def _positions(spec: ModelSpec) -> str:
    if spec.added is not None and spec.added.positions:
        return "learned"
    texts = dict.fromkeys(rope_text(x.attention) for x in spec.layers)
    return " / ".join(texts)


def _block(spec: ModelSpec) -> str:
    layer = spec.layers[0]
    placement = {(True, False): "pre", (True, True): "sandwich", (False, True): "post"}
    text = "post-sum" if layer.sum_norm else placement[layer.pre_norm, layer.post_norm]
    text += f" {'LayerNorm' if spec.norm.kind == 'layer' else 'RMSNorm'}"
    text += ", parallel" if layer.parallel else ""
    assert layer.mlp is not None  # every listed family has one
    text += f", {layer.mlp.act}"
    experts = [x.mlp for x in spec.layers if isinstance(x.mlp, MoE)]
    if experts:
        text += f", {experts_text(experts[0])}"
        text += f" in {len(experts)} of {len(spec.layers)} layers" if len(experts) < len(spec.layers) else ""
    gated = isinstance(layer.mlp, MoE) or layer.mlp.gated
    for on, words in (
        (not gated, "not gated"), (spec.added and spec.added.segments > 1, "segments"),
        (spec.names.qkv, "fused q/k/v"), (spec.names.gate_up or spec.names.up_gate, "fused gate/up"),
        (spec.embed_scale != 1, "embedding scale"), (spec.residual_scale != 1, "residual scale"),
        (spec.logits_scale != 1, "logits scale"), (spec.logits_cap, "logits soft cap"), (spec.tied, "tied"),
    ):  # fmt: skip
        text += f", {words}" if on else ""
    return text


def _kv(spec: ModelSpec) -> str:
    full, every = kv_elements(spec, lambda att: att.window == 0), kv_elements(spec)
    beyond = f" ({2 * full:,})" if full != every else ""
    return f"{2 * every:,}{beyond}, {every / mha_elements(spec):.3g} of MHA"


def example_config(model_type: str) -> dict[str, Any]:
    """Return the facts of a released model of a family, as config.json keys."""
    found: dict[str, Any] = json.loads(EXAMPLES.read_text())[model_type]["config"]
    return found


if __name__ == "__main__":
    print(table(), end="")
