"""What a model is, as data: frozen dataclasses with no tensors and no names of models."""

from quire.spec.facts import ModelFacts, read_model
from quire.spec.generation import Generation
from quire.spec.model import (
    MLP,
    Attention,
    LatentAttention,
    Layer,
    ModelSpec,
    MoE,
    Norm,
    QKNorm,
    Rope,
    Router,
    WeightNames,
)

__all__ = [
    "MLP",
    "Attention",
    "Generation",
    "LatentAttention",
    "Layer",
    "MoE",
    "ModelFacts",
    "ModelSpec",
    "Norm",
    "QKNorm",
    "Rope",
    "Router",
    "WeightNames",
    "read_model",
]
