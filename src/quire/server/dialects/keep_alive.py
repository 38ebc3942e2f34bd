"""How long a model stays after a request, as Ollama's clients say it."""

from __future__ import annotations

import math
import re

from quire.server.errors import ApiError, bad_request, shorten
from quire.server.exchange import Exchange

HEEDED = "quire.keep_alive"  # of the scope of a request: the seconds, where they are heeded
_UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_PART = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(ns|us|µs|ms|s|m|h)", re.ASCII)
_WHOLE = re.compile(rf"[+-]?(?:(?:{_PART.pattern})+|\d+)", re.ASCII)
_MOST = 64  # characters


def keep_seconds(given: str | float) -> float:
    """Seconds of a number, or of a duration of Go ("5m", "1h30m"); below 0: for ever. Raises ApiError 400."""
    if isinstance(given, str):
        if len(given) > _MOST or _WHOLE.fullmatch(given) is None:
            raise _wrong(given)
        sign = -1.0 if given.startswith("-") else 1.0
        if given.lstrip("+-").isdigit():
            return sign * float(given)
        return sign * sum(float(count) * _UNITS[unit] for count, unit in _PART.findall(given))
    if not math.isfinite(given):
        raise _wrong(str(given))
    return float(given)


def check_keep_alive(exchange: Exchange, given: str | float | None) -> None:
    """Raise ApiError 400 for what is no time, and for one that asks to unload a model which stays."""
    if given is not None and keep_seconds(given) == 0 and HEEDED not in exchange.scope:
        message = (
            "keep_alive: the model cannot be unloaded by this request; a server with several models and "
            "--allow-keep-alive does it, or with an administrator's key"
        )
        raise bad_request("keep_alive", message, "unsupported_parameter")


def _wrong(given: str) -> ApiError:
    message = (
        f"keep_alive: {shorten(given, _MOST)!r} is neither seconds nor a duration as 5m; below 0 is for ever"
    )
    return bad_request("keep_alive", message)
