"""Markers: the parts of a region's openers and closers that are one token of the vocabulary.

A marker is recognised by its id alone, so text that spells one is text. Inside the reader a marker is one lone
surrogate, a character that no decoded text contains: formats are then matched in a string, whatever is a token.
"""

from __future__ import annotations

from collections.abc import Mapping

from quire.text.regions.spec import RegionSpec


class Markers:
    """The markers of a spec in a vocabulary. Immutable; made once for a model."""

    def __init__(self, ids: Mapping[str, int]) -> None: ...

    @classmethod
    def of(cls, spec: RegionSpec, tokenizer: object) -> Markers:
        """The texts of `spec` that are added tokens of a tokenizer."""
        raise NotImplementedError

    def encode(self, text: str) -> str:
        """A text of the spec as the reader sees it: markers are characters."""
        raise NotImplementedError

    def spell(self, text: str, *, hide: bool = False) -> str:
        """The inverse: markers are spelled, or left out."""
        raise NotImplementedError
