"""A server that runs, as its administrators reach it from the command line."""

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
_SHOWN = 500  # characters of an answer that is not JSON


class ServerRefusedError(QuireError):
    """The server did not do what was asked, or was not reached."""


def add_server_options(parser: argparse.ArgumentParser) -> None:
    """--url and --admin-api-key-file."""
    parser.add_argument(
        "--url", default="http://127.0.0.1:8000", metavar="URL", help="the server (default: %(default)s)"
    )
    parser.add_argument(
        "--admin-api-key-file", metavar="FILE",
        help=f"file with an administrator's key in its first line; else {_VARIABLE} has it",
    )  # fmt: skip


def add_client_options(parser: argparse.ArgumentParser) -> None:
    """--url and --api-key-file."""
    parser.add_argument(
        "--url", default="http://127.0.0.1:8000", metavar="URL", help="the server (default: %(default)s)"
    )
    parser.add_argument(
        "--api-key-file", metavar="FILE",
        help=f"file with an API key in its first line; else {_CLIENT_VARIABLE} may have it",
    )  # fmt: skip


def ask_as_client(args: argparse.Namespace, path: str) -> Any:
    """The JSON of what a client may read. Raises as `ask_server`."""
    given = option_variables().get(_CLIENT_VARIABLE, "").partition(",")[0].strip()
    key = given if args.api_key_file is None else _first_line("api_key_file", args.api_key_file)
    return _ask(args.url, "GET", path, None, key)


def ask_server(args: argparse.Namespace, verb: str, path: str, body: Any = None) -> Any:
    """The JSON of an answer; None for an empty one. Raises ServerRefusedError, with what the server says, and
    ValueError for options that are wrong.
    """
    return _ask(args.url, verb, path, body, _key(args))


def _ask(url: str, verb: str, path: str, body: Any, key: str) -> Any:
    if urlsplit(url).scheme not in {"http", "https"}:
        raise ValueError(f"url: {url!r} is not an address like http://host:port")
    data = None if body is None else json.dumps(body).encode()
    headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {key}"} if key else {})
    request = urllib.request.Request(url.rstrip("/") + path, data, headers, method=verb)
    try:
        with urllib.request.urlopen(request) as response:  # loading takes as long as it takes
            text = response.read()
        return json.loads(text) if text else None
    except urllib.error.HTTPError as error:
        raise ServerRefusedError(f"{error.code}: {_message(error.read())}") from None
    except (urllib.error.URLError, http.client.HTTPException, OSError, ValueError) as error:
        raise ServerRefusedError(f"{url}: {getattr(error, 'reason', error)}") from None


def _key(args: argparse.Namespace) -> str:
    if args.admin_api_key_file is None:
        key = option_variables().get(_VARIABLE, "").partition(",")[0]
    else:
        key = _first_line("admin_api_key_file", args.admin_api_key_file)
    key = key.strip()
    if not key or not key.isascii() or not key.isprintable():
        raise ValueError(f"admin_api_key_file: no key; set {_VARIABLE}, or name a file that has one")
    return key


def _first_line(option: str, path: str) -> str:
    try:
        return Path(path).read_text("utf-8").partition("\n")[0].strip()
    except (OSError, ValueError) as error:
        raise ValueError(f"{option}: {error}") from None


def _message(text: bytes) -> str:
    try:
        return str(json.loads(text)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return text[:_SHOWN].decode("utf-8", "replace")
