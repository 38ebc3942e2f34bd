"""Servers that an endpoint picker has chosen, by the headers of the Gateway API Inference Extension.

`x-gateway-destination-endpoint` names addresses in the order in which they are to be tried, and
`x-gateway-destination-endpoint-subset` those among which the router may choose. A gateway shows by a code in
`x-quire-gateway`, which it sets in place of what a client says, that it has the key of the router. Only servers of the
router are meant, whoever asks.
"""

from __future__ import annotations

import hmac
from collections.abc import Sequence

from quire.records import dataclass
from quire.router.backend_server import BackendServer
from quire.routing.tickets import is_code
from quire.server.errors import bad_request
from quire.server.exchange import Exchange
from quire.util.http_client import host_of_url

PICKED = b"x-gateway-destination-endpoint"
SUBSET = b"x-gateway-destination-endpoint-subset"
SERVED = b"x-gateway-destination-endpoint-served"  # of answers, to a gateway
GATEWAY = b"x-quire-gateway"
_MOST = 64  # addresses


def gateway_code(key: bytes) -> str:
    """What a gateway shows."""
    return hmac.digest(key, b"gateway", "sha256").hex()


def address_of(server: BackendServer) -> str:
    """The address of a server as an endpoint picker names it."""
    at = server.client.server
    return f"{host_of_url(at.host)}:{at.port}"


@dataclass(frozen=True, slots=True)
class PickedServers:
    """What a gateway has said: addresses in order, and those among which the router may choose; empty for nothing."""

    order: tuple[str, ...] = ()
    subset: tuple[str, ...] = ()

    def among(self, able: Sequence[BackendServer]) -> list[BackendServer]:
        """The servers, of those that are able, among which the router may choose: one, if an order was given."""
        allowed = [each for each in able if not self.subset or address_of(each) in self.subset]
        if not self.order:
            return allowed
        by_address = {address_of(each): each for each in allowed}
        first = next((by_address[at] for at in self.order if at in by_address), None)
        return [] if first is None else [first]


def picked_servers(exchange: Exchange, key: bytes) -> PickedServers | None:
    """What a gateway has said about a request; None if it comes from no gateway that has the key. Raises ApiError for
    too many addresses."""
    shown = exchange.header(GATEWAY)
    if not (key and shown and is_code(gateway_code(key), shown)):
        return None
    return PickedServers(*(_addresses(exchange, name) for name in (PICKED, SUBSET)))


def _addresses(exchange: Exchange, name: bytes) -> tuple[str, ...]:
    found = tuple(each.strip().lower() for each in exchange.header(name).split(",") if each.strip())
    if len(found) > _MOST:
        raise bad_request(
            name.decode(), f"{name.decode()}: {len(found)} addresses are over the limit of {_MOST}"
        )
    return found
