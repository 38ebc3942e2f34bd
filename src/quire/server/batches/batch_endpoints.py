"""The routes that a batch may call."""

from __future__ import annotations

from collections.abc import Iterable

from quire.server.routes import HttpRoute, Post

_ALLOWED = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")


def batch_endpoints(routes: Iterable[HttpRoute]) -> frozenset[str]:
    """Those of OpenAI's batch endpoints that this server has."""
    return frozenset(route.path for route in routes if isinstance(route, Post) and route.path in _ALLOWED)
