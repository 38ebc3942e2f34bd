"""Bodies of requests that concern several models."""

from __future__ import annotations

from typing import Any

import msgspec

from quire.config.serving import ServingConfig
from quire.server.errors import bad_request
from quire.server.exchange import Exchange


async def admin_body(config: ServingConfig, exchange: Exchange, kind: Any) -> Any:
    """The body of a request, as a value of the type `kind`. Raises ApiError 400."""
    raw = await exchange.body(config.max_body_bytes, config.body_timeout)
    try:
        return msgspec.json.decode(raw, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise bad_request(None, str(error)) from None
