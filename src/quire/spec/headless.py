"""Decoders whose last hidden states are wanted, not logits: what changes in their specs."""

from __future__ import annotations

import re
from dataclasses import replace

from quire.spec.config_reader import ConfigReader
from quire.spec.labels import label_names
from quire.spec.model import Dense, ModelSpec, Pooling

_PREFIX = "model."


def headless(spec: ModelSpec, architecture: str, config: ConfigReader) -> ModelSpec:
    """The spec of a decoder that was saved with a head for labels, or without a head; else the same."""
    if architecture.endswith("ForSequenceClassification"):
        labels = Dense("score", spec.dim, len(label_names(config)), bias=False)
        return pooled(spec, Pooling("last", (labels,)))
    return pooled(spec, Pooling("last")) if architecture.endswith("Model") else spec


def pooled(spec: ModelSpec, pooling: Pooling) -> ModelSpec:
    """The spec with this pooling. Tensors of a decoder may then lack the prefix of their names, and its head is only
    read where the pooling has some of its rows."""
    if spec.pooling is not None:
        return replace(spec, pooling=pooling)
    names = spec.names
    used = {dense.name for dense in pooling.dense}
    inner = sorted(
        {name.removeprefix(_PREFIX).split(".")[0] for name in (names.embed, names.final_norm, names.q)}
    )
    prefixes = tuple((f"{name}.", f"{_PREFIX}{name}.") for name in inner if names.embed.startswith(_PREFIX))
    ignored = () if names.head in used or spec.tied else (re.escape(names.head),)
    return replace(
        spec, pooling=pooling, ignored=(*spec.ignored, *ignored), prefixes=(*spec.prefixes, *prefixes)
    )
