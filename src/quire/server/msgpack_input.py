"""Bodies in MessagePack (https://github.com/msgpack/msgpack/blob/master/spec.md): the same values as JSON, and back.

A body is rewritten as JSON before anything else sees it, so that every limit and check is the one of JSON.
"""

from __future__ import annotations

import math
import struct

import msgspec

from quire.server.errors import ApiError, bad_request
from quire.server.json_input import MAX_DEPTH, MAX_PARTS, MAX_VALUES

MSGPACK = b"application/msgpack"
NAMES = frozenset({"application/msgpack", "application/x-msgpack", "application/vnd.msgpack"})

_CONSTANTS = {0xC0: b"null", 0xC2: b"false", 0xC3: b"true"}
_NUMBERS = {
    0xCA: ">f", 0xCB: ">d", 0xCC: ">B", 0xCD: ">H", 0xCE: ">I", 0xCF: ">Q", 0xD0: ">b", 0xD1: ">h", 0xD2: ">i",
    0xD3: ">q",
}  # fmt: skip
_TEXTS = {0xD9: ">B", 0xDA: ">H", 0xDB: ">I"}
_ARRAYS = {0xDC: ">H", 0xDD: ">I"}
_MAPS = {0xDE: ">H", 0xDF: ">I"}
_encode = msgspec.json.Encoder().encode


def to_json(body: bytes, limit: int) -> bytes:
    """The body as JSON. Raises ApiError 400 for what is not MessagePack or has no place in JSON, and 413 for more than
    `limit` bytes of JSON.
    """
    reader = _MsgpackReader(body, limit)
    try:
        reader.value(0)
    except (struct.error, IndexError):
        raise _malformed("it ends within a value") from None
    except UnicodeDecodeError:
        raise _malformed("a text is not valid UTF-8") from None
    if reader.at != len(body):
        raise _malformed(f"{len(body) - reader.at} bytes follow its value")
    return bytes(reader.out)


def from_json(body: bytes) -> bytes:
    """JSON as MessagePack."""
    return msgspec.msgpack.encode(msgspec.json.decode(body))


class _MsgpackReader:
    """Appends the values from `at` on to `out`, as JSON; keeps nothing else."""

    def __init__(self, body: bytes, limit: int) -> None:
        self._body, self._limit = body, limit
        self._values, self._parts = 0, 0
        self.at = 0
        self.out = bytearray()

    def value(self, depth: int) -> None:
        """Read one value."""
        kind = self._body[self.at]
        self.at += 1
        self._values += 1
        if self._values > MAX_VALUES:
            raise _malformed(f"it has more than {MAX_VALUES} values")
        if kind < 0x80 or kind >= 0xE0:
            self.out += b"%d" % (kind if kind < 0x80 else kind - 256)
        elif kind in _CONSTANTS:
            self.out += _CONSTANTS[kind]
        elif kind in _NUMBERS:
            self._number(_NUMBERS[kind])
        elif 0xA0 <= kind < 0xC0 or kind in _TEXTS:
            self._text(kind)
        elif 0x90 <= kind < 0xA0 or kind in _ARRAYS:
            self._array(kind & 0x0F if kind < 0xA0 else self._unpack(_ARRAYS[kind]), depth)
        elif kind < 0x90 or kind in _MAPS:
            self._map(kind & 0x0F if kind < 0x90 else self._unpack(_MAPS[kind]), depth)
        else:
            raise _malformed(f"values of type 0x{kind:02x} (binary data, extensions) have no form in JSON")
        if len(self.out) > self._limit:
            message = f"the body has more than {self._limit} bytes as JSON, the limit"
            raise ApiError(413, message, code="request_too_large")

    def _unpack(self, form: str) -> int:
        (found,) = struct.unpack_from(form, self._body, self.at)
        self.at += struct.calcsize(form)
        return int(found)

    def _number(self, form: str) -> None:
        (found,) = struct.unpack_from(form, self._body, self.at)
        self.at += struct.calcsize(form)
        if isinstance(found, float) and not math.isfinite(found):
            raise _malformed("it has a number that is not finite")
        self.out += _encode(found)

    def _text(self, kind: int) -> None:
        self._part()
        size = kind & 0x1F if kind < 0xC0 else self._unpack(_TEXTS[kind])
        text = self._body[self.at : self.at + size]
        if len(text) < size:
            raise IndexError
        self.at += size
        self.out += _encode(text.decode())

    def _array(self, size: int, depth: int) -> None:
        self._open(size, depth)
        self.out += b"["
        for index in range(size):
            if index:
                self.out += b","
            self.value(depth + 1)
        self.out += b"]"

    def _map(self, size: int, depth: int) -> None:
        self._open(size, depth)
        self.out += b"{"
        for index in range(size):
            if index:
                self.out += b","
            kind = self._body[self.at]
            if not (0xA0 <= kind < 0xC0 or kind in _TEXTS):
                raise _malformed("a key is not a text")
            self.at += 1
            self._text(kind)
            self.out += b":"
            self.value(depth + 1)
        self.out += b"}"

    def _open(self, size: int, depth: int) -> None:
        self._part()
        if depth >= MAX_DEPTH:
            raise _malformed(f"it is nested deeper than {MAX_DEPTH} levels")
        if size > len(self._body) - self.at:  # each value has a byte
            raise IndexError

    def _part(self) -> None:
        self._parts += 1
        if self._parts > MAX_PARTS:
            raise _malformed(f"it has more than {MAX_PARTS} texts, maps and arrays")


def _malformed(detail: str) -> ApiError:
    return bad_request(None, f"the body is not valid MessagePack: {detail}", "invalid_msgpack")
