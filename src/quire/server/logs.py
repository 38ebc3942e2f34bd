"""The server's log: a separate thread formats and writes the lines. Lines may be dropped but never block."""

from __future__ import annotations

import json
import logging
import logging.handlers
import queue
import time
import urllib.parse
from typing import Any

from quire.config.serving import ServingConfig
from quire.server.errors import ApiError
from quire.server.exchange import Exchange
from quire.util.printable import printable, printable_lines
from quire.util.standard_error import PATIENCE, Writer

MAX_WAITING_LINES = 10_000
log = logging.getLogger("quire.server")
access = logging.getLogger("quire.access")
notice = logging.getLogger("quire.notice")  # messages shown at every log level
notice.setLevel(logging.WARNING)


class JsonFormatter(logging.Formatter):
    """One JSON object per line."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
            + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "details", {}),
        }
        if record.exc_text:
            line["exception"] = record.exc_text
        return json.dumps(line, default=str)


class HumanFormatter(logging.Formatter):
    """Time, level, message, and details as name=value. All lines of a record but the first are indented."""

    def format(self, record: logging.LogRecord) -> str:
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        line = f"{clock} {record.levelname.lower():<7} {printable_lines(record.getMessage())}"
        details = getattr(record, "details", {})
        if details:
            line += " " + " ".join(f"{name}={printable(str(value))}" for name, value in details.items())
        return f"{line}\n  {printable_lines(record.exc_text)}" if record.exc_text else line


class _Handler(logging.handlers.QueueHandler):
    def prepare(self, record: logging.LogRecord) -> logging.LogRecord:
        """Keep the record unformatted: the writer thread formats it."""
        if record.exc_info:
            record.exc_text = logging.Formatter().formatException(record.exc_info)
            record.exc_info = None
        return record


class _Writer(logging.StreamHandler[Writer]):
    def format(self, record: logging.LogRecord) -> str:
        return super().format(record) if record.name else printable_lines(record.getMessage())


class ServerLog:
    """Writes the log to standard error as long as the context lasts."""

    def __init__(self, config: ServingConfig) -> None:
        self._level = logging.ERROR if config.quiet else getattr(logging, config.log_level.upper())
        self._stream = Writer()
        writer = _Writer(self._stream)
        writer.setFormatter(JsonFormatter() if config.log_format == "json" else HumanFormatter())
        waiting: queue.Queue[Any] = queue.Queue(MAX_WAITING_LINES)
        self._waiting = waiting
        self._handler = _Handler(waiting)
        self._listener = logging.handlers.QueueListener(waiting, writer)

    def __enter__(self) -> ServerLog:
        logging.raiseExceptions = False  # a closed pipe or a full queue loses lines, never requests
        root = logging.getLogger()
        root.addHandler(self._handler)
        root.setLevel(max(self._level, logging.WARNING))
        logging.getLogger("quire").setLevel(self._level)
        # invalid input from clients is answered, not logged
        logging.getLogger("uvicorn").setLevel(logging.ERROR)
        self._listener.start()
        return self

    def __exit__(self, *_: object) -> None:
        logging.getLogger().removeHandler(self._handler)
        self._stream.end(PATIENCE)
        self._waiting.join()  # a full queue would not accept the signal to stop
        self._listener.stop()

    def say(self, line: str) -> None:
        """Write a line without a timestamp."""
        self._handler.emit(logging.makeLogRecord({"name": "", "msg": line}))


def log_access(exchange: Exchange) -> None:
    """Log an answered request; status 499 for a client that left."""
    details = {
        "id": exchange.request_id,
        "status": exchange.status or 499,
        "ms": round((time.monotonic() - exchange.arrival) * 1000, 3),
        "bytes_in": exchange.bytes_in,
        "bytes_out": exchange.bytes_out,
        **exchange.details,
    }
    path = urllib.parse.quote(exchange.path[:200])  # as it was sent: decoding could produce any character
    access.info("%s %s", exchange.method, path, extra={"details": details})


def log_refusal(error: ApiError) -> None:
    """Log a refusal that came before there was a request."""
    access.info("refused", extra={"details": {"status": error.status, "error": error.code}})
