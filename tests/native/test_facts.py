"""Facts that both languages have to state are the same, and the types of the compiled module are those it has.

A number is stated once: layouts and limits of kernels in C++, limits of requests in Python, which hands them over.
Words are stated twice, because a type checker knows them only as literals. So are the limits of specs: the API process
reads specs, and does without the native module (two milliseconds and its memory).
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest
from tools import native_stub

from quire import _native
from quire.config import speculative
from quire.config.schema import EngineConfig
from quire.program import formats
from quire.spec import model
from quire.spec.families import common, experts


def words(literal: object) -> set[str]:
    """The words of a union of literals and records."""
    found = set()
    for each in get_args(literal):
        found |= (
            {each} if isinstance(each, str) else {each.__name__} if isinstance(each, type) else words(each)
        )
    return found


def test_words() -> None:
    """i4, i3 and i2 are of weights in groups, which cross as their bits."""
    assert {kind.name for kind in _native.DType} == words(formats.DType) - {"i4", "i3", "i2"}
    kinds = {kind.name.replace("_", "*") for kind in _native.GroupKind}
    assert kinds == words(formats.OffsetKind) == words(formats.ScaleKind) | {"none", "u8"}
    assert set(_native.ACTIVATIONS) == words(model.Activation)
    assert set(_native.NORM_KINDS) == words(model.NormKind)
    assert set(_native.ROUTER_SCORES) == words(model.ScoreKind)
    assert set(_native.GROUP_SCORES) == words(model.GroupScore)


def test_limits() -> None:
    assert common.MAX_HEAD_DIM == _native.MAX_HEAD_DIM
    assert (experts.MAX_EXPERTS, experts.MAX_TOP_K) == (_native.MAX_EXPERTS, _native.MAX_TOP_K)
    assert speculative.LONGEST_MATCH == _native.LONGEST_MATCH
    assert EngineConfig(block_size=_native.TILE_TOKENS).cache.block_size == _native.TILE_TOKENS
    for size in (_native.TILE_TOKENS // 2, _native.TILE_TOKENS + 1):
        with pytest.raises(ValueError, match="block_size"):
            EngineConfig(block_size=size)


def test_the_command_and_the_api_process_start_without_the_native_module() -> None:
    modules = "quire.cli.main, quire.cli.serve, quire.engine.front.async_engine, quire.server.run"
    code = f"import sys, {modules}; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "quire._native" not in loaded.split()


def test_types(tmp_path: Path) -> None:
    assert native_stub.render(tmp_path) == native_stub.STUB.read_text(), "run python -m tools.native_stub"
