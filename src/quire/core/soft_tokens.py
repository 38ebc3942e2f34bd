"""What soft tokens add to the keys of a prompt's blocks, so that equal placeholders of two images are not one prefix.

    tokens    3 9 9 9   9 9 4 1   8 …       block size 4, an image at positions 1 … 5
    key       3 9 9 9 + mark(1, 5, image)    where the image starts in the block, its length, its digest
              9 9 4 1 + mark(-3, 5, image)
              8 …

A mark is part of the block's key: of the prefix cache, and of the digest by which a tier knows the block.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence

from quire.types import SOFT_DIGEST_BYTES, RequestError, SoftSpan

Marks = Mapping[int, bytes]  # block of a prompt -> what is appended to its key
NO_MARKS: Marks = {}


def block_marks(spans: Sequence[SoftSpan], block_size: int) -> Marks:
    """The marks of the blocks in which a prompt has soft tokens."""
    found: dict[int, bytes] = {}
    for span in spans:
        for block in range(span.start // block_size, (span.end - 1) // block_size + 1):
            mark = struct.pack("<qq", span.start - block * block_size, span.length) + span.digest
            found[block] = found.get(block, b"") + mark
    return found


def block_keys(key: bytes, block_bytes: int, marks: Marks) -> list[bytes]:
    """The keys of the whole blocks of a prefix."""
    starts = range(0, len(key) - block_bytes + 1, block_bytes)
    return [key[at : at + block_bytes] + marks.get(at // block_bytes, b"") for at in starts]


def check_soft_tokens(spans: Sequence[SoftSpan], prompt: int) -> None:
    """Raise RequestError for spans that overlap, leave the prompt or have no whole digest."""
    before = 0
    for number, span in enumerate(spans):
        if not isinstance(span, SoftSpan) or {type(span.start), type(span.length)} != {int}:
            raise RequestError("soft_tokens", f"span {number}: must be a start, a length and a digest")
        if not isinstance(span.digest, bytes) or len(span.digest) != SOFT_DIGEST_BYTES:
            raise RequestError("soft_tokens", f"span {number}: the digest must be {SOFT_DIGEST_BYTES} bytes")
        if span.length < 1:
            raise RequestError("soft_tokens", f"span {number}: length {span.length} is not at least 1")
        if span.start < 0 or span.end > prompt:
            raise RequestError(
                "soft_tokens",
                f"span {number}: positions {span.start} to {span.end - 1} are not all in the prompt of {prompt} tokens",
            )
        if span.start < before:
            raise RequestError(
                "soft_tokens",
                f"span {number}: starts at {span.start}, before the end of span {number - 1} at {before}",
            )
        before = span.end
