"""Request bodies: one strict scan of the bytes, without the interpreter lock, then a typed decode.

What RFC 8259 leaves open is refused: repeated keys, NaN and Infinity, lone surrogates, anything but UTF-8. Nesting
is limited before anything recurses.
"""

from __future__ import annotations

import re
from typing import Any, TypeVar

import msgspec

from quire.server.errors import ApiError, bad_request, shorten

MAX_DEPTH = 64
# Longer bodies, in bytes, are parsed in a thread so that the event loop stays free.
INLINE_BYTES = 16 * 1024

# Limits on the brackets, strings and keys of a body, and on all its values. They bound the memory of the scan, and the
# time of the decode, which holds the interpreter lock.
MAX_PARTS = 2**18
MAX_VALUES = 2**20

# What msgspec says of a value, and its names of types in the words of JSON.
_PATH = re.compile(r"^(.*) - at `([^`]*)`$", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `([^`]+)`$")
_NO_MEMBER = re.compile(r"Invalid (?:enum )?value (.+)$", re.DOTALL)
_TYPES = re.compile(r"Expected `([^`]+)`, got `([^`]+)`$")
_IN_JSON = {"str": "string", "int": "integer", "float": "number", "bool": "boolean"}
_TYPE_NAME = re.compile(rf"\b({'|'.join(_IN_JSON)})\b")

T = TypeVar("T")


def decode(body: bytes, kind: type[T]) -> tuple[T, set[str]]:
    """The body as a `kind`, and the names of its top-level fields.

    Raises ApiError 400: invalid_json for text that is not strict JSON; invalid_type, naming the field, for a value
    of the wrong type, and invalid_value for one that is too long, or not one of those that there are.
    """
    fields = top_level_keys(body)
    try:
        return _decoder(kind).decode(body), fields
    except msgspec.ValidationError as error:
        message, param = _located(str(error))
        wrong_value = " of length " in message or " is not one of its values" in message
        code = "invalid_value" if wrong_value else "invalid_type"
        raise bad_request(param, message, code) from None
    except (msgspec.DecodeError, ValueError) as error:
        raise _invalid(str(error)) from None
    except RecursionError:
        raise _invalid("nested too deeply") from None


def top_level_keys(body: bytes) -> set[str]:
    """The names of the top-level fields of a body. Raises ApiError 400 for one that is not strict JSON in UTF-8, as far
    as `check_structure` finds out.
    """
    try:
        body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _invalid(f"not valid UTF-8 at byte {error.start}") from None
    if not body.strip():
        raise _invalid("the body is empty")
    return check_structure(body)


def check_structure(body: bytes) -> set[str]:
    """The top-level keys of a body in UTF-8. Raises ApiError for a key repeated in one object, nesting deeper than
    MAX_DEPTH, and more than MAX_PARTS or MAX_VALUES.

    Keys are compared with their escapes resolved. Malformed text may pass: the decode refuses it.
    """
    from quire._native import scan_json  # with the first body: a server starts without the kernels

    keys, refused, key = scan_json(body, MAX_DEPTH, MAX_PARTS, MAX_VALUES)
    if refused:
        raise _invalid(refused if key is None else f"the key {shorten(key, 100)!r} {refused}")
    return set(keys)


_decoders: dict[type[Any], msgspec.json.Decoder[Any]] = {}


def _decoder(kind: type[T]) -> msgspec.json.Decoder[T]:
    if kind not in _decoders:
        _decoders[kind] = msgspec.json.Decoder(kind)
    return _decoders[kind]


def _invalid(detail: str) -> ApiError:
    return bad_request(None, f"the body is not valid JSON: {detail}", "invalid_json")


def _located(message: str) -> tuple[str, str | None]:
    """msgspec's message, and the path of the field in common notation: "$.stop[0]" becomes stop[0]."""
    match = _PATH.match(message)
    what, path = (message, "") if match is None else (match[1], match[2])
    path = path.removeprefix("$").removeprefix(".").replace("[...]", "")
    if missing := _MISSING.match(what):
        path = f"{path}.{missing[1]}".removeprefix(".")
        return f"{path}: is missing", path
    if enum := _NO_MEMBER.match(what):
        what = f"{enum[1]} is not one of its values"
    elif types := _TYPES.match(what):
        expected, got = (_TYPE_NAME.sub(lambda name: _IN_JSON[name[0]], named) for named in types.groups())
        what = f"expected {expected}, got {got}"
    else:
        what = what.replace("Expected `", "expected `", 1)
    return (f"{path}: {what}", path) if path else (what, None)
