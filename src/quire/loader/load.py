"""Load weights: the parts of a program are read from a source and passed to a sink.

Names, shapes and formats are checked before the first byte is read, so that a wrong checkpoint is refused at once. Then
each part goes to the sink in row blocks, and the pages of a block are released after it: resident memory stays at one
block, whatever the size of the model.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import field, replace

import numpy as np
import numpy.typing as npt

from quire.loader.finite import FLOAT_FORMATS, first_nonfinite
from quire.loader.renamed import Renamed
from quire.loader.source import (
    Array,
    CheckingSink,
    CodesSource,
    PrefetchingSource,
    Sink,
    Source,
    TensorInfo,
)
from quire.loader.stacked import Stack, Unstacked, stacks_of
from quire.program.tensors import Param, Part
from quire.records import dataclass
from quire.spec import ModelSpec, MoE
from quire.types import CheckpointError

BLOCK_BYTES = 32 * 2**20
AHEAD_BYTES = 4 * BLOCK_BYTES  # requested from the disk ahead of use, across tensors
ROW_QUANTUM = (
    256  # row blocks start at multiples of this many rows of a part, so that packed tiles stay whole
)
_SHOWN = 5
_CACHE_SCALES = (
    r".*\.(self_attn|attn|attention)\.(attn\.)?([qkv]_proj\.)?([qkv]|kv|output)_(scale|zero_point)",
)

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class LoadRules:
    """Tensors that a checkpoint may have in addition to those of a program.

    `ignored`: regular expressions of full names. `twins`: name in the program -> another name of the same tensor (a
    tied embedding saved twice): the twin is used if the first is missing, and must be byte-equal if both exist.
    `zeros`: regular expressions of tensors that may be ignored if they contain only zeros.
    `prefixes`: see Renamed. `stacks`: see Unstacked. `elsewhere`: names of tensors that other ranks load.
    """

    ignored: tuple[str, ...] = ()
    twins: Mapping[str, str] = field(default_factory=dict)
    zeros: tuple[str, ...] = ()
    prefixes: tuple[tuple[str, str], ...] = ()
    stacks: tuple[Stack, ...] = ()
    elsewhere: frozenset[str] = frozenset()

    @classmethod
    def of(cls, spec: ModelSpec, *, quantized: bool = False) -> LoadRules:
        """The rules of a model, which may have scales of the cache; `quantized` ones also empty biases."""
        twins = {spec.names.embed: spec.names.head} if spec.tied else {}
        if spec.stacks.router:
            for i in (i for i, layer in enumerate(spec.layers) if isinstance(layer.mlp, MoE)):
                asked, other = spec.names.router, spec.stacks.router
                twins[f"{asked.format(i=i)}.weight"] = f"{other.format(i=i)}.weight"
        ignored = (*spec.ignored, *_CACHE_SCALES)
        zeros = (r".*\.bias",) if quantized else ()
        return cls(ignored, twins, zeros, spec.prefixes, tuple(stacks_of(spec)))

    def of_rank(self, whole: Sequence[Param]) -> LoadRules:
        """These rules for one rank's part of the model with the parameters `whole`."""
        names = frozenset(part.tensor for param in whole for part in param.parts)
        return replace(self, elsewhere=names)

    def view(self, source: Source) -> Source:
        """Return the source with the tensor names of the program. Raises CheckpointError."""
        if self.prefixes:
            source = Renamed(source, self.prefixes)
        return Unstacked(source, self.stacks) if self.stacks else source


@dataclass(frozen=True, slots=True)
class LoadSummary:
    """The result of loading: bytes and tensors read, their stored formats, and ignored names.

    `dequantized` are the formats that the source converted to floats.
    """

    nbytes: int
    tensors: int
    dtypes: tuple[str, ...]
    skipped: tuple[str, ...]
    dequantized: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Item:
    """One part to load: rows of `param` from `row_offset` on come from the tensor `info`.

    Rows are those of the tensor, which are columns of a transposed part, and several elements of a vector that is
    stored as a matrix.
    """

    param: Param
    row_offset: int
    part: Part
    info: TensorInfo

    @property
    def first(self) -> int:
        """The first row to read."""
        return self.part.first if self.part.cols else self.part.first // math.prod(self.info.shape[1:])

    @property
    def rows(self) -> int:
        """How many to read."""
        if self.part.transposed:
            return self.part.cols
        return self.part.rows if self.part.cols else self.part.rows // math.prod(self.info.shape[1:])

    @property
    def columns(self) -> slice | None:
        """Columns of these rows; None for all."""
        count = self.part.rows if self.part.transposed else self.part.cols
        if not self.part.cols or count == self.info.shape[1]:
            return None
        return slice(self.part.first_col, self.part.first_col + count)

    def bytes_of(self, rows: int) -> int:
        """Bytes to read of so many of its rows."""
        whole = self.info.nbytes // self.info.shape[0]
        taken = self.columns
        return rows * (whole if taken is None else whole * (taken.stop - taken.start) // self.info.shape[1])


def load(
    params: Sequence[Param],
    source: Source,
    sink: Sink,
    *,
    rules: LoadRules | None = None,
    progress: Progress | None = None,
    block_bytes: int = BLOCK_BYTES,
) -> LoadSummary:
    """Pass every part of every param to the sink. `progress(done, total)` gets bytes after each block.

    A block is about `block_bytes` of whole rows, and starts at a multiple of ROW_QUANTUM rows of its part.

    Raises CheckpointError, before anything is put, for missing tensors, unexpected tensors, wrong shapes and formats;
    and, naming the tensor, when a NaN or infinity is read.
    """
    source, items, skipped = _prepare(params, source, rules or LoadRules())
    total = sum(item.bytes_of(item.rows) for item in items)
    done = 0
    blocks = [(item, *rows) for item in items for rows in _blocks(item, block_bytes)]
    ahead = _Ahead(source, [(item.info, item.first + a, item.first + b) for item, a, b in blocks])
    for item, start, stop in blocks:
        ahead.reach(done)
        done += _move(item, start, stop, source, sink)
        if progress is not None:
            progress(done, total)
    names = {item.info.name: item.info for item in items}
    dtypes = tuple(sorted({info.stored or info.dtype for info in names.values()}))
    codes = {i.info.name for i in items if _is_codes(i, source)} if isinstance(source, CodesSource) else set()
    floats = {info.stored for name, info in names.items() if info.stored and name not in codes}
    dequantized = tuple(sorted(floats))
    return LoadSummary(total, len(names), dtypes, tuple(skipped), dequantized)


def check_tensors(params: Sequence[Param], source: Source, rules: LoadRules) -> tuple[str, ...]:
    """Run all checks of `load` that precede reading weights; return the names it would ignore.

    Raises CheckpointError.
    """
    return tuple(_prepare(params, source, rules)[2])


def check_headers(params: Sequence[Param], source: Source, rules: LoadRules) -> None:
    """Run the checks of `check_tensors` that need no numbers. Raises CheckpointError."""
    source = rules.view(source)
    _leftovers(_match(params, source, rules), source, rules, read=False)


def _prepare(
    params: Sequence[Param], source: Source, rules: LoadRules
) -> tuple[Source, list[_Item], list[str]]:
    source = rules.view(source)
    items = _match(params, source, rules)
    return source, items, _leftovers(items, source, rules)


def row_blocks(info: TensorInfo, block_bytes: int, rows: int | None = None) -> Iterable[tuple[int, int]]:
    """Split `rows` rows of a tensor into ranges of about `block_bytes`, each starting at a multiple of ROW_QUANTUM."""
    row_bytes = max(info.nbytes // info.shape[0], 1)
    rows = info.shape[0] if rows is None else rows
    step = max(block_bytes // row_bytes // ROW_QUANTUM, 1) * ROW_QUANTUM
    return ((start, min(start + step, rows)) for start in range(0, rows, step))


def _blocks(item: _Item, block_bytes: int) -> Iterable[tuple[int, int]]:
    """The row blocks of an item; one block if its rows are the columns of the parameter."""
    return [(0, item.rows)] if item.part.transposed else row_blocks(item.info, block_bytes, item.rows)


class _Ahead:
    """Prefetches AHEAD_BYTES of blocks beyond the current one."""

    def __init__(self, source: Source, blocks: Sequence[tuple[TensorInfo, int, int]]) -> None:
        self._source = source if isinstance(source, PrefetchingSource) else None
        self._blocks = iter(blocks)
        self._asked = 0

    def reach(self, done: int) -> None:
        """Prefetch after `done` bytes have been read."""
        while self._source is not None and self._asked < done + AHEAD_BYTES:
            block = next(self._blocks, None)
            if block is None:
                self._source = None
                return
            info, start, stop = block
            self._source.prefetch(info.name, start, stop)
            self._asked += (stop - start) * (info.nbytes // max(info.shape[0], 1))


def _move(item: _Item, start: int, stop: int, source: Source, sink: Sink) -> int:
    """Read, check and pass on one row block; return its bytes."""
    name, first = item.info.name, item.first
    if isinstance(source, CodesSource) and _is_codes(item, source):
        return _move_codes(item, start, stop, source, sink)
    data = source.read(name, first + start, first + stop)
    if item.columns is not None:
        data = np.ascontiguousarray(data[:, item.columns])
    if not data.flags.aligned:  # the format allows any offset; kernels need aligned numbers
        data = data.copy()
    shape, nbytes, dtype, at = data.shape, data.nbytes, item.info.dtype, item.row_offset + start
    if item.part.added:
        data, dtype = widened(data, dtype) + np.float32(item.part.added), "F32"
    if item.part.transposed:
        data = np.ascontiguousarray(data.T)
    if not item.part.cols:  # a vector of any stored shape
        data, at = data.reshape(-1), item.row_offset + start * (data.size // len(data))
    if isinstance(sink, CheckingSink):
        bad = sink.put_checked(item.param, at, data, dtype)
    else:
        bad = first_nonfinite(data, dtype, item.param.dtype)
    if bad is not None:
        index = [int(i) for i in np.unravel_index(bad, shape[::-1] if item.part.transposed else shape)]
        index = index[::-1] if item.part.transposed else index
        index[0] += first + start
        if item.columns is not None:
            index[1] += item.part.first_col
        raise _refused(item, index, widened(data.reshape(-1)[bad : bad + 1], dtype)[0])
    if not isinstance(sink, CheckingSink):
        sink.put(item.param, at, data, dtype)
    del data
    source.release(name)
    return nbytes


def _refused(item: _Item, index: list[int], value: np.float32) -> CheckpointError:
    """Why the element at `index` of a tensor cannot be held."""
    where = f"tensor {item.info.name}: element {index} is"
    if not np.isfinite(value):
        return CheckpointError(f"{where} NaN or infinite")
    if item.param.dtype == "bf16_24":
        return CheckpointError(
            f"{where} the third of four neighbours that is not zero, but quire_pruning in config.json says that at "
            "most two are: remove that entry"
        )
    return CheckpointError(
        f"{where} {value:g}, which exceeds the limit of float16, 65504: use --dtype bfloat16 or float32"
    )


def _is_codes(item: _Item, source: CodesSource) -> bool:
    """Whether the parameter has exactly the format of the tensor's codes, and whole rows of them."""
    same = item.param.groups is not None and source.packed(item.info.name) == item.param.format
    return same and item.columns is None


def _move_codes(item: _Item, start: int, stop: int, source: CodesSource, sink: Sink) -> int:
    """The same for a row block whose codes are passed on unchanged."""
    name, first = item.info.name, item.first
    try:
        codes = source.read_codes(name, first + start, first + stop)
        sink.put_codes(item.param, item.row_offset + start, codes)
    except ValueError as error:  # a scale that is not finite
        raise CheckpointError(f"tensor {name}: {error}") from None
    source.release(name)
    return item.bytes_of(stop - start)


def widened(data: Array, dtype: str) -> npt.NDArray[np.float32]:
    """Convert F32, F16 or BF16 (as uint16) to float32, exactly."""
    if dtype == "BF16":
        return (data.astype(np.uint32) << 16).view(np.float32)
    return data.astype(np.float32)


def _match(params: Sequence[Param], source: Source, rules: LoadRules) -> list[_Item]:
    """Find the tensor of each part and check its shape and format."""
    names = set(source.names())
    missing: list[str] = []
    items: list[_Item] = []
    for param in params:
        row_offset = 0
        for part in param.parts:
            name = part.tensor
            if name not in names and rules.twins.get(name) in names:
                name = rules.twins[name]
            if name not in names:
                missing.append(name)
            else:
                info = source.info(name)
                _check(info, part)
                items.append(_Item(param, row_offset, part, info))
            row_offset += part.rows
    if missing:
        raise CheckpointError(f"the checkpoint lacks {_listed(missing)}{_hint(missing, names)}")
    return items


def _check(info: TensorInfo, part: Part) -> None:
    if info.shape != part.shape:
        raise CheckpointError(
            f"tensor {info.name}: shape {list(info.shape)}, but the config implies {list(part.shape)}"
        )
    if info.dtype not in FLOAT_FORMATS:
        raise CheckpointError(
            f"tensor {info.name}: dtype {info.dtype} is not one of {', '.join(sorted(FLOAT_FORMATS))}"
        )


def _leftovers(items: Sequence[_Item], source: Source, rules: LoadRules, *, read: bool = True) -> list[str]:
    """Return names that may be ignored. Any other unexpected tensor means that config and weights disagree.

    `read` false: tensors whose check needs numbers may be ignored.
    """
    used = {item.info.name for item in items}
    expected = used | rules.elsewhere
    ignored = [re.compile(pattern) for pattern in rules.ignored]
    skipped: list[str] = []
    unexpected: list[str] = []
    for name in source.names():
        if name in expected:
            continue
        twin = next(
            (asked for asked, other in rules.twins.items() if other == name and asked in expected), None
        )
        if twin is not None:
            if read and twin in used:
                _check_equal(twin, name, source)
        elif any(re.fullmatch(pattern, name) for pattern in rules.zeros) and not (
            read and source.read(name).any()
        ):
            pass  # some writers store a bias of zeros for every linear
        elif not any(pattern.fullmatch(name) for pattern in ignored):
            unexpected.append(name)
            continue
        skipped.append(name)
    if unexpected:
        raise CheckpointError(
            f"the checkpoint has tensors that its config does not imply: {_listed(unexpected)}"
        )
    return skipped


def _check_equal(name: str, twin: str, source: Source) -> None:
    """Refuse a twin with other values: config and weights disagree, and either may be right."""
    a, b = source.info(name), source.info(twin)
    equal = (a.dtype, a.shape) == (b.dtype, b.shape)
    if equal:
        for start, stop in row_blocks(a, BLOCK_BYTES):
            one, other = (source.read(n, start, stop).reshape(-1).view(np.uint8) for n in (name, twin))
            equal = equal and np.array_equal(one, other)
            source.release(name)
            source.release(twin)
    if not equal:
        raise CheckpointError(
            f"tensor {twin} differs from {name}, but config.json has tie_word_embeddings = true: set it to "
            "false if the model has a separate head"
        )


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(name[:200] for name in names[:_SHOWN])
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{len(names)} tensor{'s'[: len(names) > 1]}: {shown}{more}"


def _hint(missing: Sequence[str], names: set[str]) -> str:
    if missing == ["lm_head.weight"]:
        return " (is tie_word_embeddings = true missing in the config?)"
    if any(name.removeprefix("model.") in names for name in missing):
        return " (names lack the 'model.' prefix: this is a base model without a head)"
    return ""
