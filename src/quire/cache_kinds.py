"""Groups of layers that keep something of earlier tokens, and copies of their blocks: plain data, as in types."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from quire import records

KVType = Literal["f32", "bf16", "f16", "i8", "e4m3", "e5m2", "i4", "kivi4", "kivi2", "kvquant3"]
# Formats of keys and values by their names in options; docs/kv_cache.md says what their numbers stand for.
KV_DTYPES: dict[str, KVType] = {
    "float32": "f32",
    "bfloat16": "bf16",
    "float16": "f16",
    "int8": "i8",
    "fp8_e4m3": "e4m3",
    "fp8_e5m2": "e5m2",
    "int4": "i4",
    "kivi4": "kivi4",
    "kivi2": "kivi2",
    "kvquant3": "kvquant3",
}
FLOAT_KV: tuple[KVType, ...] = ("f32", "bf16", "f16")
FP8_KV: tuple[KVType, ...] = ("e4m3", "e5m2")
# Tokens come to such a cache in groups, when they are no longer recent. Until then they are in bfloat16.
LATE_KV: tuple[KVType, ...] = ("kivi4", "kivi2")
NUQ_KV: tuple[KVType, ...] = ("kvquant3",)  # codes stand for levels that are found on a text
LATE_TOKENS = 32  # of a group, whose keys share scales: blocks are whole groups
# A query sees what is in its own stretch of 64 positions and in the one before as recent (csrc/kv_layout.h).
RECENT_TOKENS = 128


class CacheGroup:
    """Layers whose blocks live and die together; one block table a group. Full, sliding, or of states.

    `layers` are numbers of the model's layers. A token at position p reads what positions above p - `window` have
    written, 0 stands for all of them: blocks before that are given back.
    """

    __slots__ = ()
    if TYPE_CHECKING:
        layers: tuple[int, ...]

        @property
        def window(self) -> int: ...


@records.dataclass(frozen=True, slots=True)
class FullGroup(CacheGroup):
    """Keys and values of layers with full attention: every block is kept."""

    layers: tuple[int, ...]
    window: ClassVar[int] = 0


@records.dataclass(frozen=True, slots=True)
class SlidingGroup(CacheGroup):
    """Keys and values of layers with one attention window, in tokens."""

    layers: tuple[int, ...]
    window: int


@records.dataclass(frozen=True, slots=True)
class StateGroup(CacheGroup):
    """States of layers that sum up all tokens before in `bytes` for each sequence, whatever its length.

    A block holds the states after the last token computed of those that it stands for. A token reads the states that
    the one before it left, hence the window. A state cannot be taken back: there are no drafts with such a group.
    """

    layers: tuple[int, ...]
    bytes: int
    window: ClassVar[int] = 2


@records.dataclass(frozen=True, slots=True)
class Move:
    """A copy of the content of a KV block from or to storage outside of the executor (see core.tier.Tier).

    `digest` and `group` identify the content: the KV of a cache group for a block of tokens after a certain prefix. A
    block being filled belongs to the move until StepOutput.filled names it. A block copied out may be reused
    afterwards.
    """

    block: int
    digest: bytes
    group: int
    fill: bool
