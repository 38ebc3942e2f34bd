"""Exact bytes of a program: activations in one planned arena, blocks of KV and states, weights and rope tables.

An activation's place in the arena is chosen once, from when its content is needed. Buffers whose contents
are never needed at the same time share bytes.
"""

from __future__ import annotations

from quire import _native
from quire.cache_kinds import KVType
from quire.program.formats import DTYPE_BYTES
from quire.program.op import AttentionScratch, ExpertScratch, Op, RowScratch, reads, writes
from quire.program.program import Program
from quire.program.tensors import Adapted, AdapterShape, Buffer, KVLayer, Param
from quire.records import dataclass
from quire.types import MemoryBudgetError, UnsupportedModelError

ALIGNMENT = _native.ALIGNMENT  # bytes; a cache line, and the widest vector register


@dataclass(frozen=True, slots=True)
class ArenaPlan:
    """Byte offset of each activation buffer in an arena of `total` bytes, all multiples of ALIGNMENT."""

    offsets: dict[str, int]
    total: int


def plan_arena(program: Program, max_tokens: int, max_logit_rows: int) -> ArenaPlan:
    """Place the buffers of a program so that no two that are live at one op overlap.

    Greedy by size: the largest buffer first, each at the lowest offset that is free during its whole life
    (Pisarchyk and Lee, arXiv 2001.03288, algorithm 3).
    """
    sizes = {b.name: buffer_bytes(b, max_tokens, max_logit_rows) for b in program.buffers}
    neighbours = _conflicts(live_buffers(program))
    offsets: dict[str, int] = {}
    for name in sorted(sizes, key=lambda n: (-sizes[n], n)):
        taken = sorted(
            (offsets[other], sizes[other]) for other in neighbours.get(name, ()) if other in offsets
        )
        offsets[name] = _lowest_gap(taken, sizes[name])
    return ArenaPlan(offsets, max((offsets[name] + sizes[name] for name in sizes), default=0))


def max_rows(buffer: Buffer, max_tokens: int, max_logit_rows: int) -> int:
    """The most rows that a buffer has in any step."""
    return (max_tokens if buffer.rows == "tokens" else max_logit_rows) * buffer.per * buffer.replicas


def buffer_bytes(buffer: Buffer, max_tokens: int, max_logit_rows: int) -> int:
    """Bytes of a buffer with all its rows, rounded up to ALIGNMENT.

    An i8 buffer ends with its rows' float32 scales, and two int32 numbers of each group of each row.
    """
    rows = max_rows(buffer, max_tokens, max_logit_rows)
    if buffer.dtype == "i8":
        groups = row_pitch(buffer) // buffer.group
        end = numbers_offset(buffer, max_tokens, max_logit_rows) + rows * groups * 2 * DTYPE_BYTES["i32"]
        return _round_up(end, ALIGNMENT)
    return _round_up(rows * buffer.cols * DTYPE_BYTES[buffer.dtype], ALIGNMENT)


def scale_offset(buffer: Buffer, max_tokens: int, max_logit_rows: int) -> int:
    """Where the scales of an i8 buffer begin, in bytes from its start; see row_pitch."""
    rows = max_rows(buffer, max_tokens, max_logit_rows)
    return _round_up(rows * row_pitch(buffer), ALIGNMENT)


def numbers_offset(buffer: Buffer, max_tokens: int, max_logit_rows: int) -> int:
    """Where the numbers of groups of an i8 buffer begin, behind its scales."""
    rows = max_rows(buffer, max_tokens, max_logit_rows)
    return scale_offset(buffer, max_tokens, max_logit_rows) + rows * DTYPE_BYTES["f32"]


def row_pitch(buffer: Buffer) -> int:
    """Columns from one row of a buffer to the next: those of i8 are padded to whole groups."""
    return _round_up(buffer.cols, buffer.group or 1)


def live_buffers(program: Program) -> list[frozenset[str]]:
    """For each op of Program.ops, the buffers that hold something needed while it runs.

    That is what it reads and writes, and what an earlier op wrote and a later one reads. The head may run
    again for other rows of the same step, so what it takes from the body stays live to its end; outputs
    are the caller's.
    """
    results = frozenset(output.buffer for output in program.outputs)
    after = results
    for op in reversed(program.head):
        after = _needed_before(op, after)
    after |= results
    live: list[frozenset[str]] = []
    for op in reversed(program.ops):
        live.append(after | frozenset(reads(op)) | frozenset(writes(op)))
        after = _needed_before(op, after)
    live.reverse()
    return live


def kv_block_bytes(program: Program, block_size: int) -> int:
    """Bytes of one block: for each layer of a cache group `block_size` tokens of keys and values, or its state.

    One pool of equal blocks serves every group. Raises UnsupportedModelError when layers store keys and values of
    several widths, MemoryBudgetError when a state takes more than the keys and values of a block.
    """
    place = max(kv_layer_bytes(program, block_size).values(), default=0)
    state = _round_up(max((layer.bytes for layer in program.state_layers), default=0), ALIGNMENT)
    if program.kv_layers and state > place:
        least = _round_up(-(-state * block_size // place), 16)
        raise MemoryBudgetError(
            f"block_size: a layer's state of {state} bytes does not fit a block, which has {place} bytes for "
            f"{block_size} tokens of a layer; use at least {least}"
        )
    return kv_group_bytes(program, block_size) if place else program.layers_per_group * state


def kv_group_bytes(program: Program, tokens: int) -> int:
    """Bytes of so many tokens' keys and values in the layers of the largest cache group; 0 when no layer has any."""
    places = kv_layer_bytes(program, tokens)
    if len(places) > 1:
        return max((layer.index_in_group + 1) * places[layer.type] for layer in program.kv_layers)
    return program.layers_per_group * max(places.values(), default=0)


def kv_layer_bytes(program: Program, block_size: int) -> dict[KVType, int]:
    """Bytes of a block for the keys and values of one layer in each format. Raises UnsupportedModelError."""
    per_token = {(layer.type, kv_token_bytes(layer)) for layer in program.kv_layers}
    types = {kind for kind, _ in per_token}
    if len(per_token) > len(types):
        widths = {layer.vectors * kv_head_elems(layer.head_dim) for layer in program.kv_layers}
        raise UnsupportedModelError(
            "one block pool needs one width: num_key_value_heads x head_dim, or the latent, differs between layers: "
            f"{sorted(widths)}"
        )
    return {kind: block_size * size for kind, size in sorted(per_token)}


def kv_token_bytes(layer: KVLayer, elems: int | None = None) -> int:
    """Bytes of one token's keys and values, or its one latent, in one layer's cache; of `elems` numbers a head."""
    elems = kv_head_elems(layer.head_dim) if elems is None else elems
    return layer.vectors * _native.kv_pair_bytes(elems, _native.KVType[layer.type]) // 2


def kv_bytes_per_token(program: Program) -> int:
    """Bytes that a token adds to the caches of all layers, those of the latest tokens alone left out."""
    return sum(kv_token_bytes(layer, layer.head_dim) for layer in program.kv_layers if not layer.recent)


def kv_scale_bytes(layer: KVLayer) -> int:
    """Bytes of scales among those of one token's keys and values."""
    return layer.vectors * _native.kv_scale_bytes(layer.head_dim, _native.KVType[layer.type]) // 2


def kv_head_elems(head_dim: int) -> int:
    """Elements that one head of one token takes in the cache: head_dim in whole vectors of sixteen."""
    return _native.kv_elems(head_dim)


def kv_outliers(elems: int) -> int:
    """Numbers of a key, and of a value, that a kvquant3 cache keeps beside its codes."""
    return _native.kv_outliers(elems)


def packed(param: Param) -> _native.Param:
    """A parameter as the native executor holds it: linear weights packed and padded, expert by expert."""
    matrices, rows = max(param.experts, 1), param.matrix_rows
    if param.kind == "vector":
        return _native.Param.vectors(matrices, rows)
    if param.groups is not None:
        return _native.Param.grouped(matrices, rows, param.cols, param.groups.packed(param.code_bits))
    dtype = _native.DType[param.dtype]
    if param.kind == "linear":
        return _native.Param.panels(matrices, rows, param.cols, dtype)
    return _native.Param.table(rows, param.cols, dtype)


def param_bytes(param: Param) -> int:
    """Bytes of a parameter as the native executor holds it."""
    return packed(param).bytes


def weight_bytes(program: Program) -> int:
    """Bytes of all parameters; see param_bytes."""
    return sum(param_bytes(param) for param in program.params)


def adapter_layout(program: Program) -> _native.AdapterLayout:
    """How adapters lie in the pages of a pool, as the native executor holds them."""
    layout = _native.AdapterLayout()
    for adapted in program.adapted:
        layout.add_linear(adapted.name, adapted.cols, adapted.rank, list(adapted.rows), adapted.shared)
    for own in program.owned:
        layout.add_own(own.name, packed(own.param))
    return layout


def largest_adapter(program: Program) -> AdapterShape:
    """An adapter that changes all it can at the greatest rank."""
    parts = {each.name: [(each.rank, not each.shared)] * len(each.parts) for each in program.adapted}
    return AdapterShape(parts, [own.name for own in program.owned])


def low_rank_bytes(program: Program) -> int:
    """Bytes of what the largest adapter has besides whole parameters, in bfloat16."""
    return sum(_low_rank_bytes(each) for each in program.adapted)


def _low_rank_bytes(adapted: Adapted) -> int:
    wide = adapted.cols * (1 if adapted.shared == "a" else len(adapted.rows))
    tall = adapted.rows[0] if adapted.shared == "b" else sum(adapted.rows)
    return DTYPE_BYTES["bf16"] * adapted.rank * (wide + tall) + DTYPE_BYTES["f32"] * sum(adapted.rows)


def rope_table_bytes(program: Program, max_len: int) -> int:
    """Bytes of the cos and sin tables, float32 [max_len, dim/2] each, one pair for each distinct rope."""
    return sum(2 * max_len * (rope.dim // 2) * DTYPE_BYTES["f32"] for rope in program.ropes)


def codebook_bytes(program: Program) -> int:
    """Bytes of what the codes of kvquant3 caches stand for, float32."""
    return sum(
        len(layer.codes.book(kv_head_elems(layer.head_dim))) * DTYPE_BYTES["f32"]
        for layer in program.kv_layers
        if layer.codes is not None
    )


def scratch_bytes(program: Program, threads: int, max_tokens: int, max_len: int) -> int:
    """Bytes that ops need besides buffers and cache, shared between ops as in csrc/context.h."""
    wanted = {need for op in program.ops for need in op.scratch(program.buffer)}
    cols = [need.cols for need in wanted if isinstance(need, RowScratch)]
    kinds = [_native.KVType[layer.type] for layer in program.kv_layers]
    shapes = [
        (need.head_dim, need.heads, need.kv_heads, need.rank, _native.kv_widened(kinds[need.layer]))
        for need in wanted
        if isinstance(need, AttentionScratch)
    ]
    routers = [need for need in wanted if isinstance(need, ExpertScratch)]
    experts = 0
    if routers:
        pairs = max_tokens * max(router.top_k for router in routers)
        experts = _native.experts_bytes(max(router.experts for router in routers), pairs)
    rounding = _native.rounding_bytes(max(cols, default=0), threads)
    return _native.attention_bytes(shapes, threads, max_len) + experts + rounding


def _needed_before(op: Op, after: frozenset[str]) -> frozenset[str]:
    """Buffers whose content must exist before `op`, given those that must after it."""
    return (after - frozenset(writes(op))) | frozenset(reads(op))


def _conflicts(live: list[frozenset[str]]) -> dict[str, set[str]]:
    """Which buffers may not share bytes with which."""
    neighbours: dict[str, set[str]] = {}
    for together in set(live):
        for name in together:
            neighbours.setdefault(name, set()).update(together - {name})
    return neighbours


def _lowest_gap(taken: list[tuple[int, int]], size: int) -> int:
    """Lowest offset where `size` bytes fit between `taken` (offset, size) pieces, sorted by offset."""
    offset = 0
    for start, length in taken:
        if offset + size <= start:
            break
        offset = max(offset, start + length)
    return offset


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
