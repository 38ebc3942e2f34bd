"""Damage in stored weights: non-finite numbers, holes of zeros, other digests."""

from __future__ import annotations

import hashlib
import subprocess
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.weight_files import write
from quire.loader import Checkpoint
from quire.loader.scan import (
    PAGE,
    ZERO_RUN,
    Finding,
    _ZeroRuns,
    compare_digests,
    file_digests,
    promised_digest,
    scan_tensor,
)


def findings(folder: Path, **tensors: np.ndarray) -> list[Finding]:
    write(folder / "model.safetensors", tensors)
    seen = 0

    def advance(size: int) -> None:
        nonlocal seen
        seen += size

    with Checkpoint(folder) as source:
        found = [finding for name in source.names() for finding in scan_tensor(source, name, advance)]
    assert seen == sum(array.nbytes for array in tensors.values())
    return found


def weights(rows: int = 256, cols: int = 256) -> np.ndarray:
    return np.random.default_rng(0).standard_normal((rows, cols)).astype(np.float32)


def test_sound_weights_have_no_findings(tmp_path: Path) -> None:
    zero_vector = np.zeros(64, np.float32)  # differences from one, or a bias
    assert findings(tmp_path, a=weights(), b=weights(3, 1000), bias=zero_vector) == []


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_the_first_number_that_is_none(tmp_path: Path, bad: float) -> None:
    data = weights()
    data[200, 7] = data[255, 255] = bad
    assert findings(tmp_path, w=data) == [Finding("w", "element [200, 7] is NaN or infinite", True)]


def test_a_hole_is_found_with_its_place_and_length(tmp_path: Path) -> None:
    data = weights(512)
    hole = data.reshape(-1)[PAGE // 4 * 3 : PAGE // 4 * 40]
    hole[:] = 0
    (found,) = findings(tmp_path, w=data)
    assert (found.tensor, found.fatal) == ("w", False)
    assert f"{hole.nbytes} zero bytes in a row from byte {3 * PAGE}" in found.message


def test_a_zero_matrix_is_reported(tmp_path: Path) -> None:
    (found,) = findings(tmp_path, w=np.zeros((8, 8), np.float32))
    assert found == Finding("w", "every byte is zero", False)


def test_short_runs_of_zeros_are_fine(tmp_path: Path) -> None:
    data = weights(512)
    data.reshape(-1)[: (ZERO_RUN - PAGE) // 4] = 0
    assert findings(tmp_path, w=data) == []


@settings(max_examples=100)
@given(st.lists(st.lists(st.booleans(), max_size=6), min_size=1, max_size=5), st.integers(0, PAGE - 1))
def test_runs_across_blocks_equal_a_plain_count(blocks: list[list[bool]], tail: int) -> None:
    """Blocks of used and zero pages, and a last one that ends inside a page."""
    runs, whole = _ZeroRuns(), bytearray()
    for index, pages in enumerate(blocks):
        data = b"".join((b"\1" if used else b"\0") * PAGE for used in pages)
        if index == len(blocks) - 1:
            data += b"\0" * tail
        if data:
            runs.add(np.frombuffer(data, np.uint8))
        whole += data
    zeros = [len(run) for run in bytes(whole).split(b"\1")]
    assert runs.longest == max(zeros)
    assert runs.total == sum(zeros)
    assert bytes(whole[runs.at : runs.at + runs.longest]) == b"\0" * runs.longest


def test_digests_are_those_of_sha256sum_and_git(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(b"{}\n" * 1000)
    git = subprocess.run(["git", "hash-object", str(path)], capture_output=True, text=True, check=True)
    expected = {"sha256": hashlib.sha256(path.read_bytes()).hexdigest(), "git": git.stdout.strip()}
    assert file_digests(path) == expected


@pytest.mark.parametrize(("length", "kind"), [(64, "sha256"), (40, "git"), (39, None)])
def test_the_cache_of_the_hub_names_blobs_by_digest(tmp_path: Path, length: int, kind: str | None) -> None:
    blob = tmp_path / "blobs" / ("a" * length)
    blob.parent.mkdir()
    blob.write_bytes(b"x")
    link = tmp_path / "config.json"
    link.symlink_to(blob)
    assert promised_digest(link) == (None if kind is None else (kind, "a" * length))
    assert promised_digest(blob) is None


def test_files_that_changed_came_and_went() -> None:
    changes = compare_digests({"a": "1", "b": "2", "c": "3"}, {"a": "1", "b": "9", "d": "4"})
    assert [line.split(":")[0] for line in changes] == ["b", "d", "c"]
    assert compare_digests({"a": "1"}, {"a": "1"}) == []
