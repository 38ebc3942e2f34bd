"""Llama 2, 3, 3.1 and later dense text models, and the many checkpoints released in their shape."""

from __future__ import annotations

from quire.spec.config_reader import ConfigReader
from quire.spec.families.common import Biases, Defaults, decoder, layer_count
from quire.spec.model import ModelSpec

_DEFAULTS = Defaults(max_positions=2048)


def llama(config: ConfigReader) -> ModelSpec:
    """`attention_bias` covers q, k, v and o. `pretraining_tp` only reorders a sum and is not read."""
    _refuse_windows(config)
    bias = config.boolean("attention_bias", False)
    biases = Biases(qkv=bias, out=bias, mlp=config.boolean("mlp_bias", False))
    return decoder(config, _DEFAULTS, [0] * layer_count(config), biases=biases)


def _refuse_windows(config: ConfigReader) -> None:
    """Refuse windows: Llama has full attention, and implementations disagree on windows."""
    if config.has("sliding_window") and config.boolean("use_sliding_window", True):
        raise config.unsupported("sliding_window", "model_type 'llama' has no sliding window")
    for name in config.strings("layer_types") or ():
        if name not in {"full_attention", "attention"}:
            raise config.unsupported("layer_types", f"model_type 'llama' has no {name!r} layers")
