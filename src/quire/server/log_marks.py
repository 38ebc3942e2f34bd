"""What the server adds to the engine's log: the times of a request before and after the engine; and whose it is."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Sequence

from quire.engine.api import Engine, GenerateAsk
from quire.server.exchange import Exchange
from quire.steplog.log_rows import ServerMarks, Turned, encode

_REMEMBERED = 2048  # latest requests


class Owners:
    """Whose the latest requests are, by the id of their answers and by that of the exchange."""

    def __init__(self) -> None:
        self._found: OrderedDict[str, tuple[str, str, str]] = OrderedDict()

    def add(self, exchange: Exchange, request_id: str) -> None:
        """A request to the engine."""
        for name in (request_id, exchange.request_id):
            self._found[name] = exchange.tenant, request_id, exchange.request_id
            self._found.move_to_end(name)
        while len(self._found) > 2 * _REMEMBERED:
            self._found.popitem(last=False)

    def find(self, name: str, exchange: Exchange) -> str | None:
        """The engine's name of a request of the tenant that asks, or of any if an administrator does; None for an
        unknown one and for that of another."""
        owner, request_id, _ = self._found.get(name, (None, "", ""))
        if owner is None:
            return None
        return request_id if exchange.administrator or owner == exchange.tenant else None

    def exchange_of(self, request_id: str) -> str:
        """The id of the exchange of a request to the engine, or that of the request itself if it is not known."""
        return self._found[request_id][2] if request_id in self._found else request_id


def tell_refused(engine: Engine, asks: Sequence[GenerateAsk], error: Exception) -> None:
    """Requests were not admitted, all of an exchange together. Messages have no text of requests."""
    for ask in asks:
        name = ask.request.request_id
        engine.tell(encode(Turned(time.monotonic_ns(), name, type(error).__name__)), name)


def tell_marks(engine: Engine, exchange: Exchange) -> None:
    """The last byte of an answer is written, or its client is gone."""
    now, times = time.monotonic(), exchange.timings
    finished = times.finished if times is not None and times.finished else now
    for request_id in exchange.asked:
        engine.tell(
            encode(
                ServerMarks(
                    request_id, exchange.begun, exchange.received or exchange.begun, exchange.parsed,
                    exchange.compiled, exchange.admitted or exchange.compiled, finished, now, exchange.unread,
                )
            ),
            request_id,
        )  # fmt: skip
