"""The router of a server: `key=/etc/quire/router.key,announce=http://router:8000`."""

from __future__ import annotations

from quire.records import dataclass
from quire.routing.addresses import is_server_url
from quire.routing.announcing import MOST_WEIGHT

_FORM = "write key=FILE, announce=URL, url=URL, name=NAME, weight=NUMBER, by commas"


@dataclass(frozen=True, slots=True)
class RouterLink:
    """`key_file`: the key that a server and its routers have. `announce`: the routers that the server tells of itself.
    `url`: where it can be reached; "" for the address that it listens on. `name`: its name there; "" for that of its
    host and port. `weight`: its share of the requests, 1 for the usual one."""

    key_file: str = ""
    announce: tuple[str, ...] = ()
    url: str = ""
    name: str = ""
    weight: float = 1.0


def parse_router(text: str | None) -> RouterLink:
    """The router of an option's text. Raises ValueError naming what is wrong."""
    found: dict[str, str] = {}
    announce: list[str] = []
    for part in () if text is None else text.split(","):
        name, _, value = part.strip().partition("=")
        if name == "announce" and is_server_url(value):
            announce.append(value.rstrip("/"))
        elif name in {"key", "url", "name", "weight"} and value and name not in found:
            if name == "url" and not is_server_url(value):
                raise ValueError(f"router: url: {value!r} is not an address such as http://host:8000")
            found[name] = value.rstrip("/") if name == "url" else value
        else:
            raise ValueError(f"router: {part.strip()!r} is wrong; {_FORM}")
    if text is not None and "key" not in found:
        raise ValueError(
            f"router: key: missing, by which the router and this server know each other; {_FORM}"
        )
    for name in ("url", "name", "weight"):
        if name in found and not announce:
            raise ValueError(f"router: {name}: is for announce, which is not there")
    weight = _weight(found.get("weight", "1"))
    return RouterLink(
        found.get("key", ""), tuple(announce), found.get("url", ""), found.get("name", ""), weight
    )


def _weight(text: str) -> float:
    try:
        weight = float(text)
    except ValueError:
        weight = 0.0
    if not 0 < weight <= MOST_WEIGHT:
        raise ValueError(f"router: weight: {text!r} is not a number above 0 and up to {MOST_WEIGHT}")
    return weight


def key_file_of(router: str | None, tiers_key: str) -> str:
    """The file of the key by which a server knows its router: that of the option, or of its server of blocks."""
    return parse_router(router).key_file or tiers_key
