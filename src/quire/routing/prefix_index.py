"""What each server has probably cached, predicted from the prompts that it was sent.

A prompt is a chain of digests, one for each piece of its text, so that two prompts have as many digests in common as
they have pieces from their beginning on. Nothing is tokenized: a router has no model.

The idea of predicting instead of asking is that of SGLang's router (Zheng et al. 2024, "SGLang: Efficient Execution of
Structured Language Model Programs", section 3) and of the prefix scorer of llm-d.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence

PIECE_BYTES = 256  # some sixty tokens: a few blocks of a cache
MAX_PIECES = 8192  # of a prompt; what is behind them adds nothing that a server could be chosen by
_DIGEST_BYTES = 8


def prompt_digests(domain: bytes, parts: Iterable[bytes]) -> list[bytes]:
    """The digests of a prompt's pieces: each also stands for all before it, and for `domain`, which separates models
    and tenants that share nothing. An incomplete piece at the end has none.
    """
    text = b"\0".join(parts)
    digest = hashlib.blake2b(domain, digest_size=_DIGEST_BYTES).digest()
    found = []
    for begin in range(0, min(len(text) - PIECE_BYTES + 1, MAX_PIECES * PIECE_BYTES), PIECE_BYTES):
        digest = hashlib.blake2b(
            text[begin : begin + PIECE_BYTES], key=digest, digest_size=_DIGEST_BYTES
        ).digest()
        found.append(digest)
    return found


class PrefixIndex:
    """The pieces that each server has seen, at most `limit` for each; those used longest ago are forgotten first.

    A digest is never forgotten before those that follow it in its chain, so that what a server has of a prompt is found
    by bisection.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._seen: dict[str, OrderedDict[bytes, None]] = {}

    def matched(self, server: str, digests: Sequence[bytes]) -> int:
        """The number of a prompt's first pieces that a server has probably cached."""
        seen = self._seen.get(server)
        if not seen:
            return 0
        low, high = 0, len(digests)
        while low < high:
            middle = (low + high) // 2
            if digests[middle] in seen:
                low = middle + 1
            else:
                high = middle
        return low

    def add(self, server: str, digests: Sequence[bytes]) -> None:
        """Note that a server has been sent a prompt."""
        seen = self._seen.setdefault(server, OrderedDict())
        for digest in reversed(digests[: self._limit]):  # the beginning is used last, and stays longest
            seen[digest] = None
            seen.move_to_end(digest)
        while len(seen) > self._limit:
            seen.popitem(last=False)

    def forget(self, server: str) -> None:
        """Forget a server, whose cache is empty or gone."""
        self._seen.pop(server, None)

    def size(self, server: str) -> int:
        """The number of pieces that are remembered for a server."""
        return len(self._seen.get(server, ()))
