"""Checks across the parts of a checkpoint, as functions of plain numbers."""

from __future__ import annotations

from collections.abc import Iterable

from quire.types import CheckpointError


def check_tokenizer_size(tokenizer_size: int, vocab: int) -> None:
    """`tokenizer_size` is the largest token id plus one. Embeddings may have spare rows, never too few.

    Raises CheckpointError when the tokenizer can produce an id that the embedding lacks.
    """
    if tokenizer_size > vocab:
        raise CheckpointError(
            f"the tokenizer has ids up to {tokenizer_size - 1}, but the model's vocabulary has only {vocab} tokens:"
            " tokenizer and weights do not match"
        )


def check_token_ids(name: str, ids: Iterable[int], vocab: int) -> None:
    """Raise CheckpointError when a special token id (`name` says which) is outside the vocabulary."""
    for token in ids:
        if not 0 <= token < vocab:
            raise CheckpointError(f"{name}: {token} is outside the vocabulary of {vocab} tokens")
