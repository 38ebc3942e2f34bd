"""What shows a server that a request comes from its router, and what stands for a prompt that another server computed.

Both are codes made with the key that servers and router have. A peer's proof covers the id of one request. A ticket
says how many blocks were computed, and its code covers those with the whole prompt, its tenant and the model: on any
other request, and with any other number, it is none. It names no address, and reads nothing: blocks are found by the
names that a server makes of its own request.
"""

from __future__ import annotations

import base64
import binascii
import functools
import hmac
from hashlib import blake2b
from pathlib import Path

PEER = "x-quire-peer"  # header with the proof
TICKET = "x-quire-ticket"  # header of an answer: "refused" by a server that cannot take this router's tickets
_CODE = 16
_COUNT = 4
MOST_TICKET = 64  # characters
LEAST_KEY, MOST_KEY = 16, 4096  # bytes


def read_key(path: str) -> bytes:
    """The shared key in a file: all of it but space around it. Raises ValueError naming what is wrong."""
    try:
        with Path(path).open("rb") as file:
            key = file.read(MOST_KEY + 1).strip()
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror or error}") from None
    if not LEAST_KEY <= len(key) <= MOST_KEY:
        raise ValueError(f"{path}: a key has {LEAST_KEY} to {MOST_KEY} bytes")
    return key


kept_key = functools.cache(read_key)  # for each request: what was in the file when it was first read


def is_code(made: str, shown: str) -> bool:
    """Whether what somebody shows is the code that was made with the key. The time tells nothing of it."""
    return hmac.compare_digest(made.encode(), shown.encode("utf-8", "replace"))


def peer_proof(key: bytes, request_id: str) -> str:
    """What the router sends with a request."""
    return hmac.digest(key, b"peer\0" + request_id.encode("utf-8", "replace"), "sha256").hex()


def is_peer(key: bytes, request_id: str, shown: str) -> bool:
    """Whether a request comes from who has the key."""
    return is_code(peer_proof(key, request_id), shown)


def prompt_mark(fingerprint: str, tenant: str, space: str, tokens: bytes) -> bytes:
    """What stands for a prompt: its tokens, and all that separates its blocks from those of others: the tier's
    fingerprint, of weights, formats and the code that computes, the tenant and the namespace."""
    names = [name.encode("utf-8", "surrogatepass") for name in (fingerprint, tenant, space)]
    lengths = b"".join([len(name).to_bytes(8, "little") for name in names])
    return blake2b(lengths + b"".join(names) + tokens, digest_size=32).digest()


def ticket_for(key: bytes, mark: bytes, blocks: int) -> str:
    """A ticket for so many blocks of the prompt with a mark."""
    count = blocks.to_bytes(_COUNT, "little")
    return base64.urlsafe_b64encode(count + _code(key, mark, count)).rstrip(b"=").decode()


def blocks_of(key: bytes, mark: bytes, ticket: str) -> int | None:
    """The blocks that a ticket stands for; None if it is not one for the prompt with this mark."""
    try:
        if len(ticket) > MOST_TICKET:
            return None
        raw = base64.b64decode(ticket.encode("ascii") + b"=" * (-len(ticket) % 4), b"-_", validate=True)
    except (ValueError, binascii.Error):
        return None
    count, code = raw[:_COUNT], raw[_COUNT:]
    if not hmac.compare_digest(code, _code(key, mark, count)):
        return None
    return int.from_bytes(count, "little")


def _code(key: bytes, mark: bytes, count: bytes) -> bytes:
    return hmac.digest(key, b"ticket\0" + count + mark, "sha256")[:_CODE]
