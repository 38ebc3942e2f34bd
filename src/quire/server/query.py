"""The query of an address: its parameters, and the page of a list that it asks for."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TypeVar
from urllib.parse import parse_qsl

from quire.server.errors import bad_request, shorten

T = TypeVar("T")

_MAX_PARAMETERS = 32
PAGE = ("limit", "order", "after")  # the parameters of `page_of`


def query_of(query: bytes, known: Collection[str] | None = None) -> dict[str, str]:
    """The parameters by name. Raises ApiError 400 for other names than the known ones, if these are given, for a name
    that is sent twice, and for too many."""
    try:
        pairs = parse_qsl(query.decode("latin-1"), keep_blank_values=True, max_num_fields=_MAX_PARAMETERS)
    except ValueError:
        raise bad_request(None, f"more than {_MAX_PARAMETERS} parameters in the query") from None
    found: dict[str, str] = {}
    for name, value in pairs:
        if known is not None and name not in known:
            raise bad_request(name[:100], f"{name[:100]}: not a parameter of this path", "unknown_field")
        if name in found:
            raise bad_request(name, f"{name}: sent more than once")
        found[name] = value
    return found


def replica_of(query: bytes, count: int) -> int:
    """The parameter `replica`, the only one, of `count` replicas; by default the first. Raises ApiError 400."""
    asked = query_of(query, ("replica",)).get("replica", "0")
    if not (asked.isascii() and asked.isdigit() and len(asked) < 9 and int(asked) < count):
        raise bad_request("replica", f"replica: {shorten(asked, 20)!r} is not one of 0 to {count - 1}")
    return int(asked)


def page_of(
    items: Sequence[T], name_of: Callable[[T], str], query: dict[str, str], default: int, most: int
) -> tuple[list[T], bool]:
    """The items after `after`, at most `limit`, the last first unless `order` is asc, and whether there are more.

    Raises ApiError 400 for a limit beyond `most`, another order, and an id that no item has.
    """
    text, order = query.get("limit", str(default)), query.get("order", "desc")
    limit = int(text) if text.isascii() and text.isdigit() and len(text) < 9 else 0
    if not 1 <= limit <= most:
        raise bad_request("limit", f"limit: {text[:20]!r} is not from 1 to {most}")
    if order not in {"asc", "desc"}:
        raise bad_request("order", f"order: {order[:20]!r} is not asc or desc")
    found = list(items) if order == "asc" else list(reversed(items))
    if after := query.get("after"):
        names = [name_of(item) for item in found]
        if after not in names:
            raise bad_request("after", f"after: {after[:100]!r} is not the id of an item of this list")
        found = found[names.index(after) + 1 :]
    return found[:limit], len(found) > limit
