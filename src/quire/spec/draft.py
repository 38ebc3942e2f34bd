"""What guesses for a target from the target's own features: a draft of a few layers, or heads without any."""

from __future__ import annotations

from quire.records import dataclass
from quire.spec.model import DTypeName, ModelSpec


@dataclass(frozen=True, slots=True)
class Features:
    """What a target leaves of every token: its residual stream before each of `layers`, where the number of all layers
    stands for the end, or, without any, its last hidden row after the final norm."""

    layers: tuple[int, ...] = ()

    def __len__(self) -> int:
        return max(1, len(self.layers))


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftSpec:
    """Layers over embeddings of tokens and a target's features: EAGLE (2401.15077), EAGLE-3 (2503.01840), MTP
    (2412.19437).

    A token goes in with the features of the token before it, at the position of that token. Without `wide` the residual
    stream begins as fc([embedding, feature]). With `wide` it begins as fc(features), and the first mixer takes
    [embedding, residual] in place of the residual. `embed_norm` and `feature_norm` name the norms of the two, if there
    are any; with `norm_residual` the residual goes on as it was normed. `bias`: of fc. `first_norm`: the first mixer's
    input has the norm of its layer. `final_norm`: the head's has. In later passes the rows that the head takes, after
    the norm if `normed`, stand for the features of tokens that the target has not seen.

    `further` are modules that go on from the rows of the one before, at the same positions: module k, from 0 up, takes
    the token 1 + k behind each and guesses at the one after it. Each knows its own layers, norms and fc.

    `model.vocab` tokens can go in, the first `vocab` tokens have logits; with `mapped` those are numbered apart, and
    the checkpoint says which they are. Embedding and head are the target's unless they are the draft's own.
    """

    model: ModelSpec
    features: Features
    target_dim: int
    vocab: int
    fc: str = "fc"
    bias: bool = False
    wide: bool = False
    embed_norm: str = ""
    feature_norm: str = ""
    norm_residual: bool = False
    first_norm: bool = True
    final_norm: bool = True
    normed: bool = False
    mapped: bool = False
    own_embed: bool = False
    own_head: bool = False
    further: tuple[DraftSpec, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class MedusaSpec:
    """Heads that each guess one token further ahead (2401.10774).

    Head h is `layers` blocks x += silu(linear(x)) over the last hidden row, then a head of its own or the target's.
    """

    heads: int
    layers: int
    dim: int
    vocab: int
    bias: bool = True
    own_head: bool = True
    dtype: DTypeName = "bfloat16"
    # Tensor names without `.weight` and `.bias`: {h} is the head, {l} the block; the head follows the last block.
    block: str = "{h}.{l}.linear"
    head: str = "{h}.{l}"
    ignored: tuple[str, ...] = ()
    prefixes: tuple[tuple[str, str], ...] = ()

    @property
    def features(self) -> Features:
        return Features()
