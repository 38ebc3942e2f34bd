"""The published tolerances of logits hold and are no looser than they need be; docs/tolerances.md."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers import tolerances
from helpers.checkpoints import TinyModel, random_tokens, reference_logits
from helpers.golden import MakeGolden
from helpers.tolerances import COLUMNS, STALE, measured, one_of_each_family, published

FAMILIES = one_of_each_family()
CELLS = [(model, column) for model in FAMILIES for column in COLUMNS]
# Each column twice or more, each time for another family; the others with the marker.
SAMPLE = [(FAMILIES[at * 5 % len(FAMILIES)], column) for at, column in enumerate(2 * COLUMNS)]


def _check(golden: MakeGolden, model: TinyModel, column: str, folder: Path) -> None:
    made = golden(model)
    limit = published()[model.name][column]
    found = measured(made.folder, column, reference_logits(made.model, random_tokens(0)), folder)
    assert (found is None) == (limit is None)
    if found is not None and limit is not None:
        assert found <= limit
        assert limit <= max(STALE * found, 1e-6)


@pytest.mark.parametrize(("model", "column"), SAMPLE, ids=str)
def test_a_sample_of_tolerances(golden: MakeGolden, model: TinyModel, column: str, tmp_path: Path) -> None:
    _check(golden, model, column, tmp_path)


@pytest.mark.quantize
@pytest.mark.parametrize(("model", "column"), CELLS, ids=str)
def test_all_tolerances(golden: MakeGolden, model: TinyModel, column: str, tmp_path: Path) -> None:
    _check(golden, model, column, tmp_path)


def test_the_page_has_every_family() -> None:
    assert list(published()) == [model.name for model in FAMILIES]


def test_the_check_can_fail(golden: MakeGolden, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A number format that is 1 % off is noticed in float32."""
    model = FAMILIES[0]
    whole = tolerances.logits
    monkeypatch.setattr(tolerances, "logits", lambda folder, options: 1.01 * whole(folder, options))
    with pytest.raises(AssertionError):
        _check(golden, model, "float32", tmp_path)
