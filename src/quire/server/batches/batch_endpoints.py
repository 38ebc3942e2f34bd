"""The routes that a batch may call."""

from __future__ import annotations

from collections.abc import Iterable

from quire.server.routes import HttpRoute, Post

# OpenAI's, and those that vLLM's batches have beside them.
_ALLOWED = (
    "/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses", "/v1/score", "/score", "/v1/rerank",
    "/v2/rerank", "/rerank",
)  # fmt: skip


def batch_endpoints(routes: Iterable[HttpRoute]) -> frozenset[str]:
    """Those of them that this server has."""
    return frozenset(route.path for route in routes if isinstance(route, Post) and route.path in _ALLOWED)
