"""What every op is: a frozen dataclass whose fields say what they name, with its cost and the scratch that it needs.

    @dataclass(frozen=True, slots=True)
    class Add(Op):
        x: Change         buffer that is read and changed
        delta: Read       buffer that is read
        scale: float      a setting

`reads`, `writes` and `param_names` follow from the fields, and so does what crosses to the native executor.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar

from quire.program.tensors import Buffer
from quire.program.work import Cost, Work
from quire.records import dataclass


@dataclass(frozen=True, slots=True)
class Role:
    """What an op does with the buffer or parameter that a field names. A string: only when that field is set.

    Fields carry it by the name of an Annotated type of their module.
    """

    reads: bool | str = False
    writes: bool | str = False
    param: bool = False


Read = Annotated[str, Role(reads=True)]
Write = Annotated[str, Role(writes=True)]
Change = Annotated[str, Role(reads=True, writes=True)]
Weight = Annotated[str, Role(param=True)]


@dataclass(frozen=True, slots=True)
class RowScratch:
    """A float32 row of `cols` numbers for each thread."""

    cols: int


@dataclass(frozen=True, slots=True)
class AttentionScratch:
    """Scores and sums of attention over the cache of `layer`; `rank` above 0 as in LatentShape, with head_dim its
    `cached`."""

    head_dim: int
    heads: int
    kv_heads: int
    layer: int
    rank: int = 0


@dataclass(frozen=True, slots=True)
class ExpertScratch:
    """Pairs of tokens and experts, sorted."""

    experts: int
    top_k: int


Scratch = RowScratch | AttentionScratch | ExpertScratch


class Op:
    """Base of all ops. Those that look at the cache, choose experts, or look at chosen ones, say so; and those that
    can read a weight without its zeros, of which the pattern 2:4 has two in each four inputs."""

    __slots__ = ()
    __dataclass_fields__: ClassVar[dict[str, Any]]  # every kind is a dataclass
    reads_cache: ClassVar[bool] = False
    reads_chosen_experts: ClassVar[bool] = False
    chooses_experts: ClassVar[bool] = False
    skips_zeros: ClassVar[bool] = False
    shows: ClassVar[
        tuple[str, ...]
    ] = ()  # fields of buffers whose rows it shows to replicas that share experts

    def cost(self, work: Work, n: int) -> Cost:
        """FLOPs and bytes of the op over n tokens, or n rows that want logits."""
        raise NotImplementedError

    def scratch(self, buffer: Callable[[str], Buffer]) -> tuple[Scratch, ...]:
        """What a native executor needs for the op beside its buffers; it is shared with the other ops."""
        del buffer
        return ()


def reads(op: Op) -> tuple[str, ...]:
    """Buffers whose content an op needs."""
    return _named(op, "reads")


def writes(op: Op) -> tuple[str, ...]:
    """Buffers an op fills or changes."""
    return _named(op, "writes")


def param_names(op: Op) -> tuple[str, ...]:
    """Parameters an op reads."""
    return _named(op, "param")


def roles(kind: type[Op]) -> Mapping[str, Role]:
    """Fields of a kind of op that name a buffer or parameter, in order."""
    found = {}
    names = vars(sys.modules[kind.__module__])
    for (
        field,
        hint,
    ) in kind.__annotations__.items():  # text, such as "Read | None": to evaluate all takes milliseconds
        for note in getattr(names.get(hint.removesuffix(" | None")), "__metadata__", ()):
            found[field] = note
    return found


def _named(op: Op, aspect: str) -> tuple[str, ...]:
    kind = type(op)
    if (kind, aspect) not in _FIELDS:
        found = ((field, getattr(role, aspect)) for field, role in roles(kind).items())
        _FIELDS[kind, aspect] = tuple(
            (field, when if isinstance(when, str) else "") for field, when in found if when
        )
    return tuple(
        name
        for field, when in _FIELDS[kind, aspect]
        if (name := getattr(op, field)) and (not when or getattr(op, when))
    )


# By kind and aspect of a role: the fields that have it, and the field that must be set for it.
_FIELDS: dict[tuple[type[Op], str], tuple[tuple[str, str], ...]] = {}
