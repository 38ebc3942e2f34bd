"""A model lowered to ops over named buffers and parameters."""

from __future__ import annotations

from quire.cache_kinds import CacheGroup, KVType
from quire.program.op import Op
from quire.program.ranks import RankPlan
from quire.program.tensors import Adapted, Buffer, ExpertLayer, KVLayer, Owned, Param, StateLayer
from quire.records import dataclass
from quire.spec import Rope

POOLED = "pooled"  # the output of a model with pooling


@dataclass(frozen=True, slots=True)
class Output:
    """A float32 buffer that is the caller's when a step has run, by the name that callers know it by.

    "logits": of the rows that want them. "maxima": of the logits, see Linear. "features…": see lower.Features.
    """

    name: str
    buffer: str


@dataclass(frozen=True, slots=True)
class Entry:
    """Where embeddings given with a step replace those of ids: in rows of `buffer`, once `ops` ops have run."""

    buffer: str
    ops: int


@dataclass(frozen=True, slots=True)
class Input:
    """A float32 buffer that the caller fills before a step, by the name that callers know it by.

    "residual": what the previous pipeline stage left in its output of that name. "features": what a target left of the
    step's tokens, for its draft. "hidden": what the draft itself left of the tokens before, in place of features.

    A step that is given it begins with op number `first_op`, where the ops before that would have filled the buffer.
    """

    name: str
    buffer: str
    first_op: int = 0


@dataclass(frozen=True, slots=True)
class Program:
    """A model, or one rank's part of it, lowered to ops.

    `body` runs over all tokens of a step, `head` over rows that want logits. `outputs` hold what a step is run for
    until the next one. A stage that is not the last has no head.

    `vocab` tokens have logits, and a row of logits has those of one position or of several, one after the other. `ids`:
    tokens that a step can take, when that is another number. `borrowed`: parameters that the executor of another
    program holds for this one too. `whole`: all tokens of a text are in one step.
    `adapted`: linears that adapters may change. `owned`: parameters that they may replace.
    """

    params: tuple[Param, ...]
    buffers: tuple[Buffer, ...]
    body: tuple[Op, ...]
    head: tuple[Op, ...]
    ropes: tuple[Rope, ...]
    kv_layers: tuple[KVLayer, ...]
    cache_groups: tuple[CacheGroup, ...]
    layers_per_group: int
    vocab: int
    outputs: tuple[Output, ...]
    state_layers: tuple[StateLayer, ...] = ()
    entry: Entry | None = None
    inputs: tuple[Input, ...] = ()
    plan: RankPlan = RankPlan()
    ids: int = 0
    borrowed: tuple[Param, ...] = ()
    whole: bool = False
    adapted: tuple[Adapted, ...] = ()
    owned: tuple[Owned, ...] = ()
    expert_layers: tuple[ExpertLayer, ...] = ()

    def __post_init__(self) -> None:
        floats = {buffer.name for buffer in self.buffers if buffer.dtype == "f32"}
        for kind, named in (("output", self.outputs), ("input", self.inputs)):
            for each in named:
                if each.buffer not in floats:
                    raise ValueError(f"{kind} {each.name}: {each.buffer} is no float32 buffer of the program")

    def buffer(self, name: str) -> Buffer:
        return next(b for b in self.buffers if b.name == name)

    def param(self, name: str) -> Param:
        return next(p for p in self.all_params if p.name == name)

    @property
    def kv_type(self) -> KVType:
        """The format of the cache; recent tokens may be in another one."""
        return self.kv_layers[0].type if self.kv_layers else "bf16"

    @property
    def pools(self) -> bool:
        """Whether it gives a row of numbers for a text, and no logits."""
        return any(output.name == POOLED for output in self.outputs)

    @property
    def all_params(self) -> tuple[Param, ...]:
        """Parameters that the ops name: its own, and those of another program."""
        return self.params + self.borrowed

    @property
    def ops(self) -> tuple[Op, ...]:
        return self.body + self.head
