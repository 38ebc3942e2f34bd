"""What a router and its servers say to each other of streams that may have to go on elsewhere.

    router ── a request, x-quire-stream: a proof ──▶ server
       ◀── x-quire-stream: the mark of the request; `: ids …` behind the events ──┘
                                    the server is lost
    router ── the request, resumed_output: mark, ids, a code over both ──▶ another server

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
from collections.abc import Sequence

from quire.routing.tickets import is_code

STREAM = "x-quire-stream"  # header of a request, with the proof, and of its answer, with the mark
FIELD = "resumed_output"  # of the body
_ID_BYTES = 4
_IDS = re.compile(rb"^: ids (\d{1,9}(?: \d{1,9})*)\n\n", re.MULTILINE)
_IDS_BEGIN = b": ids "


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


def packed(ids: Sequence[int]) -> str:
    """Token ids as text: int32, little endian, in base64."""
    numbers = array("i", ids)
    if sys.byteorder == "big":
        numbers.byteswap()
    return base64.b64encode(numbers).decode()


def unpacked(text: str) -> list[int] | None:
    """The inverse of `packed`; None for a text that is none."""
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


def ids_event(ids: Sequence[int]) -> bytes:
    """A comment of a stream of events: the ids of the tokens whose text has been sent."""
    return b": ids %b\n\n" % " ".join(map(str, ids)).encode()


def take_ids(events: bytes, ids: array[int]) -> bytes:
    """Complete events without such comments, whose ids are put behind `ids`."""
    if _IDS_BEGIN not in events:
        return events

    def take(found: re.Match[bytes]) -> bytes:
        ids.extend(map(int, found[1].split()))
        return b""

    return _IDS.sub(take, events)
