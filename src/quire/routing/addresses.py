"""Which addresses a server may have for a router."""

from __future__ import annotations

from urllib.parse import urlsplit


def is_server_url(text: str) -> bool:
    """Whether requests can be sent there: http or https, a host, and neither a user, a query nor a fragment."""
    if not text.isascii() or not text.isprintable() or " " in text:
        return False
    try:
        parts = urlsplit(text)
        known = parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False
    return known and not (parts.username or parts.query or parts.fragment)
