"""Model descriptions: frozen dataclasses without tensors and without names of models."""

from quire.spec.facts import ModelFacts, read_model
from quire.spec.generation_config import Generation
from quire.spec.model import (
    MLP,
    AddedEmbedding,
    Attention,
    Dense,
    LatentAttention,
    Layer,
    Mixer,
    ModelSpec,
    MoE,
    NormSpec,
    Pooling,
    QKNorm,
    Rope,
    Router,
    RowNorm,
    WeightNames,
)

__all__ = [
    "MLP",
    "AddedEmbedding",
    "Attention",
    "Dense",
    "Generation",
    "LatentAttention",
    "Layer",
    "Mixer",
    "MoE",
    "ModelFacts",
    "ModelSpec",
    "NormSpec",
    "Pooling",
    "QKNorm",
    "Rope",
    "Router",
    "RowNorm",
    "WeightNames",
    "read_model",
]
