"""A server that runs, as its clients and administrators reach it from the command line."""

from __future__ import annotations

import argparse
import http.client
import json
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from quire.config.env import option_variables
from quire.types import QuireError

_VARIABLE, _CLIENT_VARIABLE = "QUIRE_ADMIN_API_KEY", "QUIRE_API_KEY"
_SECONDS, _MOST = 10.0, 64 << 20
_SHOWN = 500  # characters of an answer that is not JSON


class ServerRefusedError(QuireError):
    """The server did not do what was asked, or was not reached."""


def add_server_options(parser: argparse.ArgumentParser) -> None:
    """--url and --admin-api-key-file."""
    _add_url(parser)
    parser.add_argument(
        "--admin-api-key-file", metavar="FILE",
        help=f"file with an administrator's key in its first line; else {_VARIABLE} has it",
    )  # fmt: skip


def add_client_options(parser: argparse.ArgumentParser) -> None:
    """--url and --api-key-file."""
    _add_url(parser)
    add_client_key(parser)


def add_client_key(parser: argparse.ArgumentParser) -> None:
    """--api-key-file, for a command that has an address of its own."""
    _add_key(parser, "--api-key-file", "an API key", _CLIENT_VARIABLE)


def add_key_options(parser: argparse.ArgumentParser) -> None:
    """--api-key-file and --admin-api-key-file, for what works without keys where a server has none."""
    add_client_key(parser)
    _add_key(parser, "--admin-api-key-file", "an administrator's key", _VARIABLE)


def _add_url(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--url", default="http://127.0.0.1:8000", metavar="URL", help="the server (default: %(default)s)"
    )


def _add_key(parser: argparse.ArgumentParser, name: str, of: str, variable: str) -> None:
    parser.add_argument(name, metavar="FILE", help=f"file with {of} in its first line; else {variable}")


def fetch(args: argparse.Namespace, path: str, *, administrator: bool = False) -> bytes:
    """What a server answers, with the key there is: of two a client's, for `administrator` an administrator's. Raises
    ServerRefusedError, with what it says."""
    keys = [_given(args.api_key_file, _CLIENT_VARIABLE), _given(args.admin_api_key_file, _VARIABLE)]
    key = next(filter(None, reversed(keys) if administrator else keys), "")
    return _ask(args.url, "GET", path, None, key, _SECONDS)


def ask_as_client(args: argparse.Namespace, path: str) -> Any:
    """The JSON of what a client may read. Raises as `ask_server`."""
    return _json(args.url, _ask(args.url, "GET", path, None, _given(args.api_key_file, _CLIENT_VARIABLE)))


def fetch_metrics(args: argparse.Namespace) -> str:
    """The Prometheus page of a server, with a client's key if there is one. Raises as `ask_server`."""
    key = _given(args.api_key_file, _CLIENT_VARIABLE)
    return _ask(args.url, "GET", "/metrics", None, key, _SECONDS).decode("utf-8", "replace")


def fetch_log(args: argparse.Namespace) -> bytes:
    """The latest rows of a server's log, for an administrator. Raises as `ask_server`."""
    return _ask(args.url, "GET", "/admin/log", None, _administrator(args), _SECONDS)


def ask_server(args: argparse.Namespace, verb: str, path: str, body: Any = None) -> Any:
    """The JSON of an answer; None for an empty one. Raises ServerRefusedError, with what the server says, and
    ValueError for options that are wrong.
    """
    return _json(args.url, _ask(args.url, verb, path, body, _administrator(args)))


def _administrator(args: argparse.Namespace) -> str:
    key = _given(args.admin_api_key_file, _VARIABLE)
    if not key:
        raise ValueError(f"admin_api_key_file: no key; set {_VARIABLE}, or name a file that has one")
    return key


def _ask(url: str, verb: str, path: str, body: Any, key: str, seconds: float | None = None) -> bytes:
    """Without `seconds` it takes as long as it takes: a model may be loaded."""
    if urlsplit(url).scheme not in {"http", "https"}:
        raise ValueError(f"url: {url!r} is not an address like http://host:port")
    data = None if body is None else json.dumps(body).encode()
    headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {key}"} if key else {})
    request = urllib.request.Request(url.rstrip("/") + path, data, headers, method=verb)
    try:
        with urllib.request.urlopen(request, timeout=seconds) as response:
            return bytes(response.read(_MOST))
    except urllib.error.HTTPError as error:
        raise ServerRefusedError(f"{error.code}: {_message(error.read(_MOST))}") from None
    except (urllib.error.URLError, http.client.HTTPException, OSError, ValueError) as error:
        raise ServerRefusedError(f"{url}: {getattr(error, 'reason', error)}") from None


def _json(url: str, text: bytes) -> Any:
    try:
        return json.loads(text) if text else None
    except ValueError as error:
        raise ServerRefusedError(f"{url}: {error}") from None


def _given(file: str | None, variable: str) -> str:
    """The key of a file, or of a variable; "" without one. Raises ValueError for one that cannot be read or sent."""
    name = variable.removeprefix("QUIRE_").lower() + "_file"
    if file is None:
        key = option_variables().get(variable, "").partition(",")[0]
    else:
        try:
            key = Path(file).read_text("utf-8").partition("\n")[0]
        except (OSError, ValueError) as error:
            raise ValueError(f"{name}: {error}") from None
    key = key.strip()
    if not key.isascii() or (key and not key.isprintable()):
        raise ValueError(f"{name}: no key; set {variable}, or name a file that has one")
    return key


def _message(text: bytes) -> str:
    try:
        return str(json.loads(text)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return text[:_SHOWN].decode("utf-8", "replace")
