"""Routes for administrators: those that show or change the state of the server for all of its clients.

A route is one when it says `admin=True`; its handler checks nothing. Without an administrator's key it does not exist.
"""

from __future__ import annotations

from collections.abc import Iterable

from quire.config.serving import ServingConfig
from quire.server.access import AccessControl, presented, presented_key, read_keys
from quire.server.errors import ApiError
from quire.server.exchange import Exchange
from quire.server.routes import HttpRoute
from quire.server.tenant_access import TenantDirectory

_OPTION = "admin_api_key"


class AdminAccess:
    """The keys of administrators. They open nothing else: a client's key is no administrator's, nor the reverse. Only a
    tenant with `admin` in its file is both.
    """

    def __init__(self, config: ServingConfig, tenants: TenantDirectory) -> None:
        self._keys = [key.encode() for key in read_keys(config, _OPTION)]
        self._tenants = tenants
        self._apart = config.admin_port is not None

    def admin_only(self, exchange: Exchange) -> None:
        """Raise ApiError 401 unless an administrator's key was presented, 404 where there are none."""
        tenant = self._tenants.of_key(presented(exchange))
        if tenant is not None:
            if not tenant.admin:
                raise ApiError(403, "this key is not an administrator's", code="not_admin")
            exchange.tenant, exchange.details["admin"] = tenant.name, tenant.name
            return
        if not (self._keys or any(one.admin for one in self._tenants.all.by_name.values())):
            message = f"{exchange.path} is off; a server with --admin-api-key has it"
            raise ApiError(404, message, code="not_found")
        number = presented_key(exchange, self._keys, "administrator's key")
        exchange.details["admin"] = f"administrator {number + 1}"

    def is_presented(self, exchange: Exchange) -> bool:
        """Whether a request has an administrator's key, which it does not need."""
        try:
            self.admin_only(exchange)
        except ApiError:
            return False
        return True

    def check_route(self, access: AccessControl, exchange: Exchange, route: HttpRoute) -> None:
        """Raise ApiError unless the key that the route needs was presented: an administrator's, a client's, or none."""
        if self._apart and not exchange.inner:
            self.check_address(exchange, route)
        if route.admin:
            self.admin_only(exchange)
        elif route.either and not exchange.inner and self.is_presented(exchange):
            exchange.administrator = True
        elif not route.open and not exchange.inner:
            access.check_key(exchange)

    def check_address(self, exchange: Exchange, route: HttpRoute) -> None:
        """Raise ApiError 404 for a route for administrators on the clients' address, and the reverse; both have those
        about the status.
        """
        if route.tag != "status" and bool(exchange.scope.get("quire.admin")) is not route.admin:
            whose = "administrators" if route.admin else "clients"
            raise ApiError(404, f"{exchange.path} is on the address for {whose}", code="not_found")


def closed_routes(routes: Iterable[HttpRoute], config: ServingConfig) -> frozenset[HttpRoute]:
    """The routes for administrators that a server without administrators does not offer."""
    if config.admin_api_key or config.admin_api_key_file is not None or config.tenants is not None:
        return frozenset()
    return frozenset(route for route in routes if route.admin)


def check_all_keys(config: ServingConfig) -> None:
    """Raise ValueError for keys that cannot be read, and for a client's that is an administrator's too."""
    if set(read_keys(config)) & set(read_keys(config, _OPTION)):
        raise ValueError(
            f"{_OPTION}: a key is also one of api_key, so every client would be an administrator"
        )
