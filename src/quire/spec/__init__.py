"""What a model is, as data: frozen dataclasses with no tensors and no names of models."""

from quire.spec.model import MLP, Attention, Layer, ModelSpec, Rope, WeightNames

__all__ = ["MLP", "Attention", "Layer", "ModelSpec", "Rope", "WeightNames"]
