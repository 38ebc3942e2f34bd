"""Weights: from safetensors or GGUF files, the hub or a random stream, checked, to whoever packs them."""

from quire.loader.checkpoint import Checkpoint
from quire.loader.gguf_source import GGUFFiles, GGUFSource
from quire.loader.hub import resolve_model
from quire.loader.load import LoadRules, LoadSummary, load
from quire.loader.random_weights import RandomWeights
from quire.loader.source import Sink, Source, TensorInfo

__all__ = [
    "Checkpoint",
    "GGUFFiles",
    "GGUFSource",
    "LoadRules",
    "LoadSummary",
    "RandomWeights",
    "Sink",
    "Source",
    "TensorInfo",
    "load",
    "resolve_model",
]
