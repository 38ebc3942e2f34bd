"""Load weights from safetensors or GGUF files, the hub or a random stream, check them and pass them to an executor."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from quire.config.shipped import DEFAULT_MODEL, shipped_adapters, shipped_models
from quire.loader.checkpoint import Checkpoint, checkpoint_files
from quire.loader.fingerprint import fingerprint
from quire.loader.load import LoadRules, LoadSummary, load
from quire.loader.packed import PackedWeights, Packer, packed_key
from quire.loader.source import Sink, Source, TensorInfo
from quire.util.kept import DamagedError

if TYPE_CHECKING:
    from quire.loader.gguf_source import GGUFFiles, GGUFOpened, GGUFSource
    from quire.loader.hub import resolve_model
    from quire.loader.quantized import QuantizedSource
    from quire.loader.random_weights import RandomWeights

__all__ = [
    "DEFAULT_MODEL",
    "Checkpoint",
    "DamagedError",
    "GGUFFiles",
    "GGUFOpened",
    "GGUFSource",
    "LoadRules",
    "LoadSummary",
    "PackedWeights",
    "Packer",
    "QuantizedSource",
    "RandomWeights",
    "Sink",
    "Source",
    "TensorInfo",
    "checkpoint_files",
    "fingerprint",
    "load",
    "packed_key",
    "resolve_model",
    "shipped_adapters",
    "shipped_models",
]


_LATER = {
    "GGUFFiles": "gguf_source",
    "GGUFOpened": "gguf_source",
    "GGUFSource": "gguf_source",
    "QuantizedSource": "quantized",
    "RandomWeights": "random_weights",
    "resolve_model": "hub",
}


def __getattr__(name: str) -> Any:
    """Import what only some models need when it is used: imports take time."""
    if name in _LATER:
        return getattr(import_module(f"quire.loader.{_LATER[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
