"""The log shows what strangers send, and obeys none of it; what must not be missed is not."""

from __future__ import annotations

import json
import logging
import socket
from pathlib import Path
from typing import Any

import pytest

from helpers.process import running
from helpers.server import read_all
from quire.config.serving import ServingConfig
from quire.server.access import exposure
from quire.server.logs import HumanFormatter, JsonFormatter
from quire.util.printable import printable, printable_lines

HOSTILE = "a\n12:00:00 info    forged\r\x1b[31mred\x9b2J\u202eright to left\u2028line\ud800\x00 é 字"


def test_printable() -> None:
    text = printable(HOSTILE)
    assert text.isprintable()
    assert text.startswith(
        "a\\n12:00:00 info    forged\\r\\x1b[31mred\\x9b2J\\u202eright to left\\u2028line\\ud800\\x00"
    )
    assert text.endswith("\\u2028line\\ud800\\x00 é 字")
    first, second = printable_lines(HOSTILE).split("\n")
    assert first == "a"
    assert second.startswith("  12:00:00")
    assert (printable("plain"), printable_lines("one\ntwo")) == ("plain", "one\n  two")


@pytest.mark.parametrize("formatter", [HumanFormatter(), JsonFormatter()], ids=["human", "json"])
def test_lines_cannot_be_forged(formatter: logging.Formatter) -> None:
    record = logging.LogRecord("quire", logging.INFO, "", 0, "%s", (HOSTILE,), None)
    record.details = {"model": HOSTILE}
    record.exc_text = f"Traceback\nValueError: {HOSTILE}"
    text = formatter.format(record)
    first, *rest = text.split("\n")
    assert all(line.startswith("  ") for line in rest)
    assert all(line.isprintable() for line in (first, *rest))
    if rest == []:
        assert json.loads(text)["message"] == HOSTILE


def test_the_access_log(folder: Path) -> None:
    with running(folder, "--access-log", "--api-key", "k") as server:

        def ask(head: bytes) -> None:
            with socket.create_connection(("127.0.0.1", server.port)) as sock:
                sock.sendall(head)
                read_all(sock)

        ask(
            b"GET /%0a12:00:00%20info%20forged%1b[31m%c2%9b?%0a HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n"
        )
        ask(b"POST /nothing HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\nxyz\r\n")
        ask(b"NONSENSE\r\n\r\n")
        status, log = server.end()
    assert status == 0
    lines = [line for line in log.splitlines() if "draining" not in line]
    assert len(lines) == 3, log
    assert all(line.isprintable() for line in lines)
    assert "GET /%0A12%3A00%3A00%20info%20forged%1B%5B31m%C2%9B id=" in lines[0]
    assert " status=403 " in lines[0]
    assert " POST /nothing id=" in lines[1]
    assert " refused status=400 error=invalid_http" in lines[2]


def test_a_server_that_is_open_to_all_says_so(folder: Path) -> None:
    """Whatever is logged else."""
    options = ("--host", "0.0.0.0", "--log-format", "json", "--log-level", "error", "--allowed-origins", "*")
    with running(folder, *options) as server:
        warnings = [json.loads(line) for line in server.lines if line.startswith("{")]
    assert [warning["level"] for warning in warnings] == ["warning", "warning"]
    assert "NO API KEY" in warnings[0]["message"]
    assert "--api-key-file" in warnings[0]["message"]
    assert "--allowed-origins '*'" in warnings[1]["message"]


@pytest.mark.parametrize(
    ("options", "warned"),
    [
        ({}, []),
        ({"host": "localhost"}, []),
        ({"host": "127.9.9.9"}, []),
        ({"host": "::1"}, []),
        ({"host": "0.0.0.0"}, ["NO API KEY"]),
        ({"host": "::"}, ["NO API KEY"]),
        ({"host": "box.example"}, ["NO API KEY"]),
        ({"host": "0.0.0.0", "api_key": ("k",)}, []),
        ({"host": "0.0.0.0", "uds": "/tmp/s"}, []),
        ({"allowed_hosts": ("*",)}, ["DNS rebinding"]),
        ({"host": "0.0.0.0", "api_key": ("k",), "allowed_hosts": ("*",)}, []),
        ({"allowed_origins": ("*", "a")}, ["every web page"]),
    ],
)
def test_warnings_about_exposure(options: dict[str, Any], warned: list[str]) -> None:
    found = exposure(ServingConfig(**options))
    assert len(found) == len(warned)
    assert all(part in text for part, text in zip(warned, found, strict=True))
