"""What an op costs, and what it has to know of a step to say so.

All counts are exact integers for the work the op definitions ask for, whatever kernel does it. A multiply
and an add are two FLOPs. Bytes are the least that memory must move when nothing stays in a cache between
ops: each weight once, each activation read and written once, each visible key and value once a row.
Transcendentals count as EXP_FLOPS; they never decide a bound.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from quire.program.formats import DTYPE_BYTES
from quire.program.tensors import Buffer, Param
from quire.records import dataclass
from quire.spec import Rope

NORM_FLOPS = {"rms": 4, "layer": 6}  # square, add to the sum, scale, weight; and the mean: sum, subtract
QUANTIZE_FLOPS = 3  # magnitude, scale, round
SCALE_BYTES = 4  # of one row of int8
GROUP_BYTES = 8  # of one group of it: two int32
EXP_FLOPS = 4  # act(gate): exponential or error function, and the arithmetic around it
ID_BYTES = 4  # a token id, position or row number


@dataclass(frozen=True, slots=True)
class Row:
    """One sequence in a step: `query_len` new tokens after `context_len` tokens that are already cached."""

    query_len: int
    context_len: int


@dataclass(frozen=True, slots=True)
class Machine:
    """What a machine can do in a second: `flops` at the program's number format, `bandwidth` in bytes."""

    flops: float
    bandwidth: float


@dataclass(frozen=True, slots=True)
class Cost:
    """Work of one op or many. Bytes are split by what they belong to; ids and rope tables are activations.

    `wire_bytes` are received from other ranks; `bytes` are those of this rank's memory.
    """

    flops: int = 0
    weight_bytes: int = 0
    activation_bytes: int = 0
    kv_read_bytes: int = 0
    kv_written_bytes: int = 0
    wire_bytes: int = 0

    @property
    def bytes(self) -> int:
        return self.weight_bytes + self.activation_bytes + self.kv_read_bytes + self.kv_written_bytes

    @property
    def intensity(self) -> float:
        """Arithmetic intensity in FLOPs per byte (roofline model, Williams et al. 2009); 0 without bytes."""
        return self.flops / self.bytes if self.bytes else 0.0

    def bound(self, machine: Machine) -> float:
        """Least seconds on a machine: the longer of computing and moving bytes, perfectly overlapped."""
        return max(self.flops / machine.flops, self.bytes / machine.bandwidth)

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.flops + other.flops,
            self.weight_bytes + other.weight_bytes,
            self.activation_bytes + other.activation_bytes,
            self.kv_read_bytes + other.kv_read_bytes,
            self.kv_written_bytes + other.kv_written_bytes,
            self.wire_bytes + other.wire_bytes,
        )


@dataclass(frozen=True, slots=True)
class Work:
    """A step of a program as its ops see it: the sequences, and widths and formats of what the ops name.

    `token_kv_bytes`: what the cache holds of one token, by layer, without padding.
    """

    rows: Sequence[Row]
    buffers: Mapping[str, Buffer]
    params: Mapping[str, Param]
    ropes: Sequence[Rope]
    token_kv_bytes: Sequence[int]

    def row_bytes(self, buffer: str, cols: int | None = None) -> int:
        """Bytes of one row of a buffer, or of its first `cols` columns."""
        found = self.buffers[buffer]
        wide = found.cols if cols is None else cols
        scales = 0
        if found.dtype == "i8":  # a scale, and of a group its bits and sum
            scales = SCALE_BYTES + GROUP_BYTES * -(-wide // found.group)
        return wide * DTYPE_BYTES[found.dtype] + scales

    def rows_bytes(self, *buffers: str | None) -> int:
        """Bytes of one row of each of these buffers."""
        return sum(self.row_bytes(buffer) for buffer in buffers if buffer)

    def weight_row_bytes(self, weight: Param) -> int:
        """Bytes of a row of a linear weight or table: what it holds, without padding."""
        if weight.groups is not None:
            packed = weight.groups.packed(weight.code_bits)
            return -(-weight.cols * weight.code_bits // 8) + packed.row_number_bytes(weight.cols)
        if weight.dtype == "bf16_24":  # two numbers of four, and a bit for each
            return weight.cols // 4 * 2 * DTYPE_BYTES["bf16"] + weight.cols // 8
        return weight.cols * DTYPE_BYTES[weight.dtype]

    def vector_bytes(self, *names: str | None) -> int:
        return sum(self.params[name].rows * DTYPE_BYTES["f32"] for name in names if name)

    def rounding_flops(self, out: str) -> int:
        """FLOPs of rounding a row of an i8 buffer, in the op that writes it; 0 for others."""
        found = self.buffers[out]
        if found.dtype != "i8":
            return 0
        stages = found.group.bit_length() - 1 if found.rotated else 0
        return (QUANTIZE_FLOPS + stages) * found.cols

    def pairs(self, window: int, *, causal: bool = True) -> int:
        """(query, key) pairs of attention over all sequences; see visible_pairs."""
        pairs = sum(visible_pairs(row, window) for row in self.rows)
        if causal:
            return pairs
        return 2 * pairs - sum(row.query_len for row in self.rows)  # as many behind a query as before it

    def kv_read_bytes(self, layer: int, window: int) -> int:
        """Bytes of the keys and values that attention of a layer reads, each once a sequence."""
        return sum(visible_keys(row, window) for row in self.rows) * self.token_kv_bytes[layer]


def visible_pairs(row: Row, window: int) -> int:
    """(query, key) pairs of causal attention: the query at position p sees min(p + 1, window) keys."""
    first, last = (
        row.context_len + 1,
        row.context_len + row.query_len,
    )  # keys each query sees, when not limited
    if window == 0:
        return _sum_range(first, last)
    whole = _sum_range(first, min(last, window))
    return whole + window * (last - max(first - 1, window)) if last > window else whole


def visible_keys(row: Row, window: int) -> int:
    """Positions that at least one query of the row sees."""
    behind = max(0, row.context_len - window + 1) if window else 0
    return row.context_len + row.query_len - behind if row.query_len else 0


def touched_experts(experts: int, top_k: int, tokens: int) -> int:
    """How many experts of a layer `tokens` tokens go to together: exactly top_k for one.

    For more, the number expected when every token takes its own at random: experts · (1 - (1 - top_k/experts)^tokens).
    """
    return round(experts * (1 - (1 - top_k / experts) ** tokens))


def _sum_range(first: int, last: int) -> int:
    """first + (first + 1) + … + last; 0 when empty."""
    return (first + last) * (last - first + 1) // 2 if last >= first else 0
