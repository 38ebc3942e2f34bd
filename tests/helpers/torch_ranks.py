"""What ranks in torch answer, beside one process."""

from __future__ import annotations

from typing import Any

import numpy as np

TORCH: dict[str, Any] = {"executor": "torch", "dtype": "float32"}


def same_answers(found: list[Any], alone: list[Any]) -> None:
    """The same tokens; log-probabilities up to the order in which torch adds up products of other widths."""
    for ours, theirs in zip(found[0], alone[0], strict=True):
        for (tokens, scores), (expected, other_scores) in zip(ours, theirs, strict=True):
            assert tokens == expected
            np.testing.assert_allclose(scores, other_scores, atol=1e-4)
    for ours, theirs in zip(found[1], alone[1], strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-4)
