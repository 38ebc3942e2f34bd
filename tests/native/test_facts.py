"""Facts that Python and C++ both state are the same, and the types of the compiled module are those it has."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

from tools import native_stub

from quire import _native, types
from quire.program import formats, memory
from quire.program.ops.linear import MAXIMA_COLS


def test_numbers() -> None:
    assert memory.PACKED_ROWS == _native.PANEL_ROWS
    assert MAXIMA_COLS == _native.MAXIMA_COLS
    assert formats.GROUP_BITS == _native.GROUP_BITS
    assert types.MAX_LOGPROBS == _native.MAX_LOGPROBS
    assert formats.SUPER_GROUPS == _native.SUPER_GROUPS


def test_names() -> None:
    """Formats cross by name. i4 is a weight's in groups, which crosses as its bits."""
    assert (
        {kind.name for kind in _native.DType}
        == set(formats.DTYPE_BYTES)
        == set(get_args(formats.DType)) - {"i4"}
    )
    kinds = {kind.name.replace("_", "*") for kind in _native.GroupKind}
    assert kinds == set(get_args(formats.OffsetKind)) == set(get_args(formats.ScaleKind)) | {"none", "u8"}


def test_types(tmp_path: Path) -> None:
    assert native_stub.render(tmp_path) == native_stub.STUB.read_text(), "run python -m tools.native_stub"
