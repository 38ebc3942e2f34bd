"""What a router and its servers say to each other of streams that may have to go on elsewhere.

    router ── a request, x-quire-stream: a proof ──▶ server
       ◀── x-quire-stream: the mark of the request; `: ids …` behind the events ──┘
                                    the server is lost
    router ── the request, resumed_output: mark, ids, a code over both ──▶ another server

Ids are those of each sample of a request: `: ids@2 …` those of sample 2, `: ids …` of sample 0.

A mark stands for all that determines the output: engine, weights, prompt, parameters, grammar. Penalties, stop strings
and grammars have no other state than the output so far, so its ids carry it. All proofs are made with the key that
router and servers have, and cover the id of one request.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import re
import sys
from array import array
from collections.abc import Iterable, Sequence

from quire.routing.tickets import is_code

STREAM = "x-quire-stream"  # header of a request, with the proof, and of its answer, with the mark
FIELD = "resumed_output"  # of the body
_ID_BYTES = 4
_IDS = re.compile(rb"^: ids(?:@(\d{1,9}))? (\d{1,9}(?: \d{1,9})*)\n\n", re.MULTILINE)
_IDS_BEGIN = b": ids"


def stream_proof(key: bytes, request_id: str) -> str:
    """What the router sends with a request whose ids it wants to know."""
    return hmac.digest(key, b"stream\0" + request_id.encode("utf-8", "replace"), "sha256").hex()


def is_stream_proof(key: bytes, request_id: str, shown: str) -> bool:
    """Whether who has sent a request has the key."""
    return is_code(stream_proof(key, request_id), shown)


def resume_code(key: bytes, request_id: str, mark: str, ids: str) -> str:
    """The code over what is resumed; `ids` as `packed`."""
    parts = [each.encode("utf-8", "replace") for each in (request_id, mark, ids)]
    return hmac.digest(key, b"\0".join((b"resume", *parts)), "sha256").hex()


def is_resume_code(key: bytes, request_id: str, mark: str, ids: str, shown: str) -> bool:
    """Whether a code is that of who has the key."""
    return is_code(resume_code(key, request_id, mark, ids), shown)


def packed(outputs: Iterable[Sequence[int]]) -> str:
    """The token ids of each output as text: int32, little endian, in base64, and commas."""
    return ",".join(map(_packed, outputs))


def unpacked(text: str) -> list[list[int]] | None:
    """The inverse of `packed`; None for a text that is none."""
    found = [_unpacked(part) for part in text.split(",")]
    outputs = [ids for ids in found if ids is not None]
    return outputs if len(outputs) == len(found) else None


def _packed(ids: Sequence[int]) -> str:
    numbers = array("i", ids)
    if sys.byteorder == "big":
        numbers.byteswap()
    return base64.b64encode(numbers).decode()


def _unpacked(text: str) -> list[int] | None:
    try:
        raw = base64.b64decode(text.encode("ascii"), validate=True)
    except (ValueError, binascii.Error):
        return None
    if len(raw) % _ID_BYTES:
        return None
    numbers = array("i", raw)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tolist()


def ids_event(ids: Sequence[int], sample: int = 0) -> bytes:
    """A comment of a stream of events: the ids of the tokens of a sample whose text has been sent."""
    return b": ids%b %b\n\n" % (b"@%d" % sample if sample else b"", " ".join(map(str, ids)).encode())


class OutputIds(dict[int, "array[int]"]):
    """The ids of each sample of a request, by its number, as far as they are known."""

    def take(self, events: bytes) -> bytes:
        """Complete events without the comments that name ids, which are taken."""
        if _IDS_BEGIN not in events:
            return events

        def taken(found: re.Match[bytes]) -> bytes:
            self.setdefault(int(found[1] or 0), array("i")).extend(map(int, found[2].split()))
            return b""

        return _IDS.sub(taken, events)

    @property
    def size(self) -> int:
        """Bytes of them."""
        return _ID_BYTES * sum(map(len, self.values()))

    def given(self, samples: int) -> list[array[int]]:
        """Behind what each sample goes on: all but the last id, which is drawn again, and ends the output again if it
        had done so."""
        return [self.get(sample, array("i"))[:-1] for sample in range(samples)]
