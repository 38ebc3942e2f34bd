"""Mixers of tokens by their class: what each is lowered to, and what its layer keeps of earlier tokens.

A new kind of mixer is a class in spec/model, its ops, and an entry here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from quire.program.lower_attention import attention_input, kept_heads, lower_attention
from quire.program.lower_latent import kept_latent, latent_input, lower_latent
from quire.program.lowering import Lowering
from quire.program.tensors import KVLayer, StateLayer
from quire.records import dataclass
from quire.spec import Attention, LatentAttention
from quire.types import UnsupportedModelError

Keeps = KVLayer | StateLayer


@dataclass(frozen=True, slots=True)
class MixerKind:
    """How a class of mixers is lowered. Each function gets the layer's number in the model, and the mixer.

    input: the buffer that the norm before the mixer fills. ops: appends the ops that compute the mixer from that
    buffer and returns the buffer of the result, or of this rank's columns of it. keeps: what the layer keeps of earlier
    tokens on this rank; its place in blocks is chosen when all layers are known.
    """

    input: Callable[[Lowering, int, Any], str]
    ops: Callable[[Lowering, int, Any, str], str]
    keeps: Callable[[Lowering, int, Any], tuple[Keeps, ...]]


MIXERS: dict[type, MixerKind] = {
    Attention: MixerKind(attention_input, lower_attention, kept_heads),
    LatentAttention: MixerKind(latent_input, lower_latent, kept_latent),
}


def kind_of(index: int, mixer: object) -> MixerKind:
    """Raises UnsupportedModelError, naming layer and class, for a mixer that is not lowered here."""
    kind = MIXERS.get(type(mixer))
    if kind is None:
        raise UnsupportedModelError(f"layers.{index}.mixer: {type(mixer).__name__} is not implemented")
    return kind
