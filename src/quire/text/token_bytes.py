"""The bytes of all tokens of a vocabulary, as they cross between processes."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import accumulate

from quire.records import dataclass

# Bytes of a token, on the average of a vocabulary that the engine may be given. Large vocabularies have 6 to 9.
MAX_MEAN_BYTES = 10


@dataclass(frozen=True, slots=True)
class TokenBytes:
    """The bytes that each token adds to a text: token i is data[ends[i - 1]:ends[i]], with `ends` as int32.

    The memory plan has room for MAX_MEAN_BYTES a token.
    """

    data: bytes
    ends: bytes

    @classmethod
    def of(cls, pieces: Sequence[bytes]) -> TokenBytes:
        """Of the bytes of every token."""
        return cls(b"".join(pieces), array("i", accumulate(map(len, pieces))).tobytes())

    def __len__(self) -> int:
        return len(self.ends) // 4

    def __getitem__(self, token_id: int) -> bytes:
        if not 0 <= token_id < len(self):
            raise IndexError(f"{token_id} is not a token id below {len(self)}")
        ends = memoryview(self.ends).cast("i")
        return self.data[ends[token_id - 1] if token_id else 0 : ends[token_id]]

    def all(self) -> list[bytes]:
        """The bytes of every token."""
        ends = memoryview(self.ends).cast("i").tolist()
        return [self.data[start:end] for start, end in zip([0, *ends], ends, strict=False)]
