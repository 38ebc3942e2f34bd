"""Pass requests on to servers, each to the one that answers it soonest. docs/router.md explains the options."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.cli.config_file import read_config
from quire.cli.options import add_config_options
from quire.config.routing import RouterConfig
from quire.config.serving import ServingConfig

if TYPE_CHECKING:
    from quire.router.backends import Backends
    from quire.server.logs import ServerLog

# The options of `quire serve` that also concern a router.
_SHARED = (
    "host", "port", "uds", "api_key", "api_key_file", "tenants", "ssl_keyfile", "ssl_certfile", "allowed_hosts",
    "allowed_origins", "api", "max_num_queued_reqs", "max_body_bytes", "max_connections", "header_timeout",
    "body_timeout", "keep_alive_timeout", "reader_timeout", "shutdown_timeout", "log_format", "log_level",
    "access_log", "quiet",
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", metavar="FILE", help="options from a YAML, TOML or JSON file")
    add_config_options(parser, RouterConfig, explicit_only=True)
    others = [each.name for each in dataclasses.fields(ServingConfig) if each.name not in _SHARED]
    add_config_options(parser, ServingConfig, skip=others, explicit_only=True)


def run(args: argparse.Namespace) -> int:
    given = dict(vars(args))
    given.pop("environment", None)
    file = given.pop("config")
    options: dict[str, Any] = ({} if file is None else read_config(Path(file), RouterConfig)) | given
    return _serve(*settings(options))


def settings(options: Mapping[str, Any]) -> tuple[RouterConfig, ServingConfig]:
    """The configs of a router with these options. Raises ValueError naming the one that is wrong."""
    own = {each.name for each in dataclasses.fields(RouterConfig)}
    for name in options:
        if name not in own and name not in _SHARED:
            raise ValueError(f"{name}: is no option of a router")
    chosen: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in options.items()
    }
    routing = RouterConfig(**{name: value for name, value in chosen.items() if name in own})
    return routing, ServingConfig(**{name: value for name, value in chosen.items() if name not in own})


def _serve(routing: RouterConfig, serving: ServingConfig) -> int:
    import uvloop

    from quire.router.backends import Backends
    from quire.router.router_service import RouterService
    from quire.server.logs import ServerLog
    from quire.server.run import address, bind, serve

    sock = bind(serving)
    try:
        with ServerLog(serving) as log:
            backends = Backends(routing)

            def announce() -> None:
                if not serving.quiet:
                    _announce(log, backends)
                    log.say(f"quire: routing by {routing.policy} at {address(serving, sock)}")

            return uvloop.run(serve(backends, RouterService(backends, serving), serving, sock, announce))
    finally:
        sock.close()
        if serving.uds is not None:
            Path(serving.uds).unlink(missing_ok=True)


def _announce(log: ServerLog, backends: Backends) -> None:
    import time

    now = time.monotonic()
    for each in backends.all:
        models = ", ".join(str(model["id"]) for model in each.models)
        log.say(
            f"  {each.name}: {each.client.server.url}: {each.state(now)}{f', {models}' if models else ''}"
        )
