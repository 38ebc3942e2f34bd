"""Requests to a hub, or to a mirror of it: redirects, retries, waits, and refusals in words.

The API is that of https://huggingface.co/docs/hub/api. The token goes to the hub's own origin only. Connections are the
standard library's, which honours HTTPS_PROXY, NO_PROXY and SSL_CERT_FILE.
"""

from __future__ import annotations

import contextlib
import email.message
import email.utils
import http.client
import json
import re
import ssl
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from urllib.parse import quote, urljoin, urlsplit

from quire import __version__
from quire.types import CheckpointError
from quire.util.sizes import format_size

TRIES = 5  # of a request, and of a download in a row that bring nothing
MAX_WAIT = 300  # seconds that a hub may ask to wait before a request
_TIMEOUT = 10  # seconds without a byte
_REDIRECTS = 10
_MAX_ANSWER = 64 * 2**20
_BUSY = {408, 429, 500, 502, 503, 504}
_LIMITED = re.compile(r";\s*r\s*=\s*0\s*;\s*t\s*=\s*(\d+)")

# What a connection raises when it is cut, refused, reset or silent.
CUT = (urllib.error.URLError, http.client.HTTPException, OSError)


class HubError(CheckpointError):
    """A hub has refused a request. `status` is that of HTTP; `code` is the hub's own word for it, or ""."""

    def __init__(self, message: str, status: int, code: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.code = code


class StoppedError(Exception):
    """Another part of the same pull has failed, or was interrupted."""


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        return None


class HubClient:
    """Requests to `endpoint`, from any number of threads. `tell` gets a line when a hub makes us wait."""

    def __init__(self, endpoint: str, token: str | None, tell: Callable[[str], None]) -> None:
        parts = urlsplit(endpoint)
        if parts.scheme not in {"http", "https"} or not parts.hostname:
            raise CheckpointError(f"HF_ENDPOINT: {endpoint!r} is not an address like https://host")
        self.endpoint = endpoint.rstrip("/")
        self.stopped = threading.Event()
        self._token, self._tell = token, tell
        handlers = [_NoRedirect(), urllib.request.HTTPSHandler(context=_certificates())]
        self._opener = urllib.request.build_opener(*handlers)

    def values(self, path: str) -> tuple[Any, str | None]:
        """The JSON answer to a path or an address of the hub, and the address of its next page.

        Raises HubError, or CheckpointError if there is no connection or the answer is no JSON.
        """
        url = urljoin(f"{self.endpoint}/", path)
        try:
            with self.opened(url) as response:
                data = response.read(_MAX_ANSWER + 1)
                links = response.headers.get("Link", "")
        except CUT as error:
            raise CheckpointError(f"{self.endpoint}: no answer: {reason_of(error)}") from None
        try:
            if len(data) > _MAX_ANSWER:
                raise ValueError(f"more than {format_size(_MAX_ANSWER)}")
            value = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise CheckpointError(
                f"{self.endpoint}: its answer is not that of a hub: {error}; is HF_ENDPOINT right?"
            ) from None
        following = re.search(r'<([^>]+)>\s*;\s*rel="next"', links)
        if following and _origin(urljoin(url, following[1])) != _origin(url):
            raise CheckpointError(f"{self.endpoint}: the next page of a list is on another host")
        return value, following[1] if following else None

    def file_address(self, repository: str, commit: str, name: str) -> str:
        """The address of a file of a repository."""
        return f"{self.endpoint}/{repository}/resolve/{quote(commit, safe='')}/{quote(name)}"

    @contextlib.contextmanager
    def opened(
        self, url: str, headers: Mapping[str, str] | None = None
    ) -> Iterator[http.client.HTTPResponse]:
        """The answer to a GET, after redirects. A busy hub is asked again, as late as it says.

        Raises HubError for other answers than success, StoppedError, and what `CUT` lists.
        """
        failures = 0
        while True:
            if self.stopped.is_set():
                raise StoppedError
            try:
                response = self._follow(url, dict(headers or {}))
            except urllib.error.HTTPError as error:
                with error:
                    if error.code not in _BUSY or failures >= TRIES:
                        raise self._refusal(error) from None
                    seconds = self._wait(url, error, failures)
            except CUT:
                if failures >= 2:
                    raise
                seconds = pause(failures)
            else:
                with response:
                    yield response
                return
            failures += 1
            self.rest(seconds)

    def rest(self, seconds: float) -> None:
        """Wait. Raises StoppedError if the pull ends meanwhile."""
        if self.stopped.wait(seconds):
            raise StoppedError

    def _follow(self, url: str, headers: dict[str, str]) -> http.client.HTTPResponse:
        home, at = _origin(self.endpoint), url
        headers |= {"User-Agent": f"quire/{__version__}", "Accept-Encoding": "identity"}
        for _ in range(_REDIRECTS):
            request = urllib.request.Request(at, headers=headers)
            if self._token and _origin(at) == home:
                request.add_unredirected_header("Authorization", f"Bearer {self._token}")
            try:
                return self._opener.open(request, timeout=_TIMEOUT)  # type: ignore[no-any-return]
            except urllib.error.HTTPError as error:
                there = error.headers.get("Location")
                if error.code not in {301, 302, 303, 307, 308} or there is None:
                    raise
                error.close()
                following = urljoin(at, there)
                if urlsplit(following).scheme not in {"https", urlsplit(at).scheme}:
                    raise HubError(
                        f"{at}: redirects to {following}, which is not https", error.code
                    ) from None
                at = following
        raise HubError(f"{url}: more than {_REDIRECTS} redirects", 310)

    def _wait(self, url: str, error: urllib.error.HTTPError, failures: int) -> float:
        """Seconds until the next try. Raises HubError if the hub asks for more than MAX_WAIT."""
        asked = _asked_wait(error.headers)
        if asked is None:
            return pause(failures)
        if asked > MAX_WAIT:
            raise HubError(
                f"{self.endpoint}: too many requests (HTTP {error.code}): it asks to wait {asked:.0f} s, more than"
                f" {MAX_WAIT}; try again later" + ("" if self._token else ", or with a token in HF_TOKEN"),
                error.code,
            ) from None
        self._tell(f"{_host(url)} is busy (HTTP {error.code}) and asks to wait {asked:.0f} s")
        return asked

    def _refusal(self, error: urllib.error.HTTPError) -> HubError:
        code = error.headers.get("X-Error-Code", "")
        said = error.headers.get("X-Error-Message", "") or error.reason
        have = "the token of HF_TOKEN is not allowed to" if self._token else "no token is set to"
        match error.code, code:
            case _, "GatedRepo":
                how = f"accept its terms on its page, and set HF_TOKEN to a token of that account; {have} read it"
            case 401 | 403, _:
                how = f"it does not exist, or {have} read it: set HF_TOKEN ({self.endpoint}/settings/tokens)"
            case 404, "RevisionNotFound":
                how = "there is no such revision"
            case 404, _:
                how = "there is no such repository or file"
            case 429, _:
                how = "too many requests, and again after waiting; try later"
            case _:
                how = "the hub does not serve it"
        return HubError(f"HTTP {error.code} ({str(said)[:200]}): {how}", error.code, code)


def pause(failures: int) -> float:
    """Seconds to wait after so many failures in a row."""
    return float(min(0.25 * 2**failures, 8))


def reason_of(error: BaseException) -> str:
    """What went wrong with a connection, in a few words."""
    inner = error.reason if isinstance(error, urllib.error.URLError) else error
    return str(inner) or type(inner).__name__


def _asked_wait(headers: email.message.Message) -> float | None:
    """Seconds that an answer asks to wait: Retry-After in seconds or as a date, or the hub's RateLimit."""
    asked = headers.get("Retry-After", "").strip()
    if asked.isdigit():
        return float(asked)
    if asked:
        with contextlib.suppress(ValueError, TypeError):
            return max(0.0, email.utils.parsedate_to_datetime(asked).timestamp() - time.time())
    limited = _LIMITED.search(headers.get("RateLimit", ""))
    return float(limited[1]) if limited else None


def _origin(url: str) -> tuple[str, str | None, int | None]:
    parts = urlsplit(url)
    return parts.scheme, parts.hostname, parts.port or {"http": 80, "https": 443}.get(parts.scheme)


def _host(url: str) -> str:
    return urlsplit(url).netloc


def _certificates() -> ssl.SSLContext:
    """The system's certificates, or those that come with huggingface_hub where the system has none."""
    context = ssl.create_default_context()
    if not context.cert_store_stats()["x509_ca"] and not ssl.get_default_verify_paths().capath:
        with contextlib.suppress(ImportError):
            import certifi

            context.load_verify_locations(certifi.where())
    return context
