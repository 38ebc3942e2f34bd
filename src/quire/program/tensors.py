"""What ops are over: buffers of activations, parameters and the checkpoint's tensors in them, layers of the cache."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from quire.cache_kinds import KVType
from quire.program.formats import CODE_BITS, DType, Groups, HeadCodes, WeightFormat
from quire.records import dataclass

RowKind = Literal["tokens", "logits"]
ParamKind = Literal["linear", "table", "vector"]


@dataclass(frozen=True, slots=True)
class Buffer:
    """An activation of [rows, cols]; its rows are tokens or logit rows of the step, or `per` rows for each of them.

    An i8 buffer holds whole numbers in [-127, 127], a float32 scale for each row and a power of two for each `group`
    neighbouring columns of a row: see Quantize, which says how an op rounds what it writes to one.
    `rotated` as in formats.Groups. With several `replicas` its tokens are those of all replicas that share experts.
    """

    name: str
    cols: int
    dtype: DType
    rows: RowKind = "tokens"
    group: int = 0
    per: int = 1
    rotated: bool = False
    replicas: int = 1


@dataclass(frozen=True, slots=True)
class Part:
    """One checkpoint tensor [rows, cols] (or [rows] for vectors) that fills rows of a parameter.

    `stored` is the tensor's own shape where it is another: this is the range of rows from `first` and of columns from
    `first_col` of a larger tensor, or a vector that is stored as a matrix. `added` is added to every stored element of
    a vector. `transposed`: rows of the tensor are columns here, and columns are rows.

    `row_axis` and `col_axis` are logical axes ("heads", "kv_heads", "mlp", "vocab", "hidden"), by which a RankPlan
    splits. An empty axis is never split.
    """

    tensor: str
    rows: int
    cols: int = 0
    row_axis: str = ""
    col_axis: str = ""
    first: int = 0
    stored: tuple[int, ...] = ()
    added: float = 0.0
    transposed: bool = False
    first_col: int = 0

    def cut(self, rows: tuple[int, int] | None = None, cols: tuple[int, int] | None = None) -> Part:
        """Only these ranges of rows and columns of the part, each [start, stop)."""
        row, row_end = rows or (0, self.rows)
        col, col_end = cols or (0, self.cols)
        down, right = (col, row) if self.transposed else (row, col)
        return replace(
            self, rows=row_end - row, cols=col_end - col, first=self.first + down, first_col=self.first_col + right,
            stored=self.shape,
        )  # fmt: skip

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the checkpoint's tensor."""
        return self.stored or ((self.rows, self.cols) if self.cols else (self.rows,))


@dataclass(frozen=True, slots=True)
class Param:
    """A parameter as the executor holds it: checkpoint parts stacked along rows.

    kind linear: weight [rows = out features, cols = in features], packed for the machine; see WeightFormat. A float
    source is rounded to nearest, for groups as quant.groups defines.
    kind table: embedding rows [rows = vocabulary, cols], gathered by row.
    kind vector: float32 [rows] (norm weights, biases).

    `experts` above 0: that many matrices (or vectors) of equal rows, one after the other; no part spans two. They
    belong to experts, or to heads: see HeadLinear.
    """

    name: str
    kind: ParamKind
    parts: tuple[Part, ...]
    dtype: DType
    groups: Groups | None = None
    experts: int = 0

    @property
    def format(self) -> WeightFormat:
        return WeightFormat(self.dtype, self.groups)

    @property
    def code_bits(self) -> int:
        """Bits of a code of a weight in groups."""
        return CODE_BITS[self.dtype]

    @property
    def rows(self) -> int:
        return sum(part.rows for part in self.parts)

    @property
    def matrix_rows(self) -> int:
        """Rows of one expert's matrix, or of the only one."""
        return self.rows // max(self.experts, 1)

    @property
    def cols(self) -> int:
        return self.parts[0].cols


@dataclass(frozen=True, slots=True)
class AdaptedPart:
    """Rows of a linear that are one module of the checkpoint.

    `pieces` are ranges [first, stop) of the module's rows, in the order in which the linear has them; none: in order.
    `turned`: the linear is of the transposed module, so that A is made of B's rows, and B of A.
    """

    module: str
    rows: int
    pieces: tuple[tuple[int, int], ...] = ()
    turned: bool = False


@dataclass(frozen=True, slots=True)
class Adapted:
    """A linear of `cols` input features that adapters of up to `rank` may change, part by part; see Shrink.

    `shared`: the matrix that all parts have in common, and a slot holds once; such a linear takes no gains.
    """

    name: str
    cols: int
    rank: int
    parts: tuple[AdaptedPart, ...]
    shared: Literal["", "a", "b"] = ""

    @property
    def rows(self) -> tuple[int, ...]:
        """Rows of each part."""
        return tuple(part.rows for part in self.parts)


@dataclass(frozen=True, slots=True)
class Owned:
    """A parameter of which an adapter may have one of its own, from the checkpoint's `module`; see Linear and Embed."""

    name: str
    module: str
    param: Param


@dataclass(frozen=True, slots=True)
class AdapterShape:
    """What an adapter takes room for.

    `parts`: by name of an Adapted, of each of its parts the rank, 0 for none, and whether it has gains; parts that
    share a matrix have one rank. `own`: names of Owned.
    """

    parts: dict[str, list[tuple[int, bool]]]
    own: list[str]


@dataclass(frozen=True, slots=True)
class KVLayer:
    """Keys and values of one layer: which group's block table they follow, and their place in a block of that group.

    `layer` is the layer's number in the model. Ops name a KVLayer by its place in Program.kv_layers, which is another:
    earlier pipeline stages and layers that keep no keys and values are not counted.

    `latent`: one row of head_dim numbers a token is key and value at once; else a key and a value for each head.
    `recent`: it holds the tokens that did not come to the layer's other cache yet.
    `type` is the format; in e4m3 and e5m2 a stored 1 of head h stands for k_scales[h], or v_scales[h]. In kvquant3
    `codes` says what is stored, and `rope` indexes Program.ropes: keys are rotated by it when they are read.
    """

    layer: int
    kv_heads: int
    head_dim: int
    window: int
    group: int = 0
    index_in_group: int = 0
    latent: bool = False
    recent: bool = False
    type: KVType = "bf16"
    k_scales: tuple[float, ...] = ()
    v_scales: tuple[float, ...] = ()
    codes: HeadCodes | None = None
    rope: int | None = None

    @property
    def vectors(self) -> int:
        """Vectors of head_dim numbers that the cache holds of one token."""
        return 1 if self.latent else 2 * self.kv_heads

    def scales(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Those of keys and of values, for every head."""
        ones = (1.0,) * self.kv_heads
        return self.k_scales or ones, self.v_scales or ones


@dataclass(frozen=True, slots=True)
class StateLayer:
    """A state of one layer, `bytes` for each sequence; the other fields as in KVLayer. See types.StateGroup.

    Ops name it by its place in Program.state_layers. A layer can have one beside its keys and values.
    """

    layer: int
    bytes: int
    group: int = 0
    index_in_group: int = 0


@dataclass(frozen=True, slots=True)
class ExpertLayer:
    """A layer with experts as one rank has it, in the order of routers.

    `experts` are at `places` of all ranks, which may be more; this one holds `held`, from place `first` on (see
    executor/expert_places), each with a matrix or a vector in each of `params`, by name.
    """

    layer: int
    experts: int
    places: int
    first: int
    held: int
    params: tuple[str, ...]
