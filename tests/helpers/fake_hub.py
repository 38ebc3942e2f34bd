"""A hub on loopback: the API of the Hugging Face Hub for models, with files on a "CDN" of another port, and faults.

It serves /api/models/REPOSITORY/revision/R, .../tree/COMMIT in pages, /api/models?search=, and
/REPOSITORY/resolve/R/FILE: small files itself, large ones (LFS) by a redirect, both with ranges and digests.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

LFS_BYTES = 4096  # files from this size on are on the CDN
PAGE = 3  # entries of a page of the tree


def git_id(data: bytes) -> str:
    """The id of a git blob."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


@dataclass
class Faults:
    """What goes wrong, by file name. Counts are used up by the requests that they hit."""

    cut_after: dict[str, list[int]] = field(default_factory=dict)  # bytes of each answer that are sent
    wrong: Counter[str] = field(default_factory=Counter)  # answers with another last byte
    busy: list[tuple[int, dict[str, str]]] = field(
        default_factory=list
    )  # status and headers of the next answers
    no_ranges: bool = False
    held: dict[str, int] = field(
        default_factory=dict
    )  # bytes that are sent before the answer waits for `go_on`
    go_on: threading.Event = field(default_factory=threading.Event)
    redirect: str = ""  # where files are, in place of the CDN
    lie: dict[str, int] = field(default_factory=dict)  # sizes that the tree lists


@dataclass
class Seen:
    """A request, as it arrived."""

    server: str
    path: str
    range: str | None
    token: str | None


class FakeHub:
    """Repositories are {name: {revision: {file: bytes}}}."""

    def __init__(self) -> None:
        self.repositories: dict[str, dict[str, dict[str, bytes]]] = {}
        self.gated: set[str] = set()
        self.private: dict[str, str] = {}  # repository -> token
        self.licences: dict[str, str] = {}
        self.faults = Faults()
        self.seen: list[Seen] = []
        self.sent: Counter[str] = Counter()  # bytes of each file
        self._servers = [
            ThreadingHTTPServer(("127.0.0.1", 0), _handler(self, name)) for name in ("hub", "cdn")
        ]
        self.url, self.cdn = (f"http://127.0.0.1:{server.server_address[1]}" for server in self._servers)

    @contextmanager
    def running(self) -> Iterator[FakeHub]:
        """Serve until the block ends."""
        threads = [threading.Thread(target=s.serve_forever, args=(0.02,)) for s in self._servers]
        for server, thread in zip(self._servers, threads, strict=True):
            server.daemon_threads = True
            thread.start()
        try:
            yield self
        finally:
            self.faults.go_on.set()
            for server in self._servers:
                server.shutdown()
                server.server_close()

    def add(self, repository: str, files: dict[str, bytes], revision: str = "main") -> None:
        self.repositories.setdefault(repository, {})[revision] = files

    def commit(self, repository: str, revision: str) -> str:
        files = self.repositories[repository][revision]
        return hashlib.sha1(repr(sorted(files.items())).encode()).hexdigest()

    def files(self, repository: str, revision: str) -> dict[str, bytes] | None:
        """The files at a branch, tag or commit."""
        for name, files in self.repositories[repository].items():
            if revision in {name, self.commit(repository, name)}:
                return files
        return None

    def fetched(self, name: str) -> list[Seen]:
        """The requests for the bytes of a file."""
        return [seen for seen in self.seen if unquote(seen.path).endswith((f"/{name}", f"|{name}"))]


def _handler(hub: FakeHub, server: str) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None:
            pass

        def do_GET(self) -> None:
            self.answer()

        def do_HEAD(self) -> None:
            self.answer()

        def answer(self) -> None:
            token = self.headers.get("Authorization")
            hub.seen.append(Seen(server, self.path, self.headers.get("Range"), token))
            if hub.faults.busy:
                status, headers = hub.faults.busy.pop(0)
                self.reply(status, b"", headers)
                return
            path, query = unquote(urlsplit(self.path).path), parse_qs(urlsplit(self.path).query)
            if server == "cdn":
                self.content(*self.blob(path))
            elif path == "/api/models":
                found = [name for name in hub.repositories if query["search"][0].lower()[:3] in name.lower()]
                self.value([{"id": name} for name in found])
            elif match := re.fullmatch(r"/api/models/(.+?)/(revision|tree)/([^/]+)", path):
                self.facts(*match.groups(), query)
            elif match := re.fullmatch(r"/(.+?)/resolve/([^/]+)/(.+)", path):
                self.resolve(*match.groups())
            else:
                self.refuse(404, "RepoNotFound")

        def blob(self, path: str) -> tuple[str, bytes]:
            _, repository, revision, name = path.split("|")
            files = hub.files(repository, revision)
            assert files is not None
            return name, files[name]

        def allowed(self, repository: str, *, content: bool = False) -> bool:
            token = self.headers.get("Authorization")
            if repository not in hub.repositories:
                self.refuse(404, "RepoNotFound")
            elif hub.private.get(repository) not in {None, token}:
                self.refuse(401, "RepoNotFound")
            elif repository in hub.gated and token is None:
                self.refuse(401, "GatedRepo")
            else:
                return True
            return False

        def facts(self, repository: str, kind: str, revision: str, query: dict[str, list[str]]) -> None:
            if not self.allowed(repository):
                return
            files = hub.files(repository, revision)
            if files is None:
                self.refuse(404, "RevisionNotFound")
                return
            if kind == "revision":
                names = [
                    name
                    for name in hub.repositories[repository]
                    if files is hub.repositories[repository][name]
                ]
                card = {"license": hub.licences.get(repository, "mit")}
                self.value({"id": repository, "sha": hub.commit(repository, names[0]), "cardData": card})
                return
            entries = [self.entry(name, data) for name, data in files.items()]
            at = int(query.get("cursor", ["0"])[0])
            headers = {}
            if at + PAGE < len(entries):
                path = f"{hub.url}/api/models/{repository}/tree/{revision}?recursive=true&cursor={at + PAGE}"
                headers["Link"] = f'<{path}>; rel="next"'
            self.value(entries[at : at + PAGE], headers)

        def entry(self, name: str, data: bytes) -> dict[str, Any]:
            size = hub.faults.lie.get(name, len(data))
            found: dict[str, Any] = {"type": "file", "path": name, "size": size, "oid": git_id(data)}
            if len(data) >= LFS_BYTES:
                found["lfs"] = {"oid": hashlib.sha256(data).hexdigest(), "size": size, "pointerSize": 130}
            return found

        def resolve(self, repository: str, revision: str, name: str) -> None:
            if not self.allowed(repository):
                return
            files = hub.files(repository, revision)
            if files is None or name not in files:
                self.refuse(404, "EntryNotFound")
                return
            data, headers = files[name], {"X-Repo-Commit": revision}
            if len(data) < LFS_BYTES and not hub.faults.redirect:
                self.content(name, data, headers | {"ETag": f'"{git_id(data)}"'})
                return
            place = hub.faults.redirect or f"{hub.cdn}/|{repository}|{revision}|"
            digest = hashlib.sha256(data).hexdigest()
            linked = {"X-Linked-Etag": f'"{digest}"', "X-Linked-Size": str(len(data))}
            self.reply(302, b"", headers | linked | {"Location": place + name})

        def content(self, name: str, data: bytes, headers: dict[str, str] | None = None) -> None:
            faults, first, last, status = hub.faults, 0, len(data) - 1, 200
            match = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
            headers = dict(headers or {})
            if match and not faults.no_ranges:
                first, last, status = int(match[1]), min(int(match[2]), last), 206
                headers["Content-Range"] = f"bytes {first}-{last}/{len(data)}"
            body = data[first : last + 1]
            if faults.wrong[name] > 0:
                faults.wrong[name] -= 1
                body = body[:-1] + bytes([body[-1] ^ 1])
            self.head(status, len(body), headers)
            cuts, held = faults.cut_after.get(name), faults.held.get(name)
            count = len(body)
            if held is not None:
                self.send(name, body[:held])
                faults.go_on.wait()
                body = body[held:]
            elif cuts:
                count = cuts.pop(0)
                self.close_connection = True
            self.send(name, body[:count])

        def send(self, name: str, data: bytes) -> None:
            for at in range(0, len(data), 65536):
                try:
                    self.wfile.write(data[at : at + 65536])
                except OSError:
                    self.close_connection = True
                    return
                hub.sent[name] += len(data[at : at + 65536])

        def value(self, value: Any, headers: dict[str, str] | None = None) -> None:
            self.reply(
                200, json.dumps(value).encode(), {"Content-Type": "application/json"} | (headers or {})
            )

        def refuse(self, status: int, code: str) -> None:
            self.reply(status, b"{}", {"X-Error-Code": code, "X-Error-Message": f"refused: {code}"})

        def reply(self, status: int, body: bytes, headers: dict[str, str]) -> None:
            self.head(status, len(body), headers)
            self.wfile.write(body)

        def head(self, status: int, length: int, headers: dict[str, str]) -> None:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(length))
            self.end_headers()

    return Handler


def until(ready: Any, seconds: float = 60) -> None:
    """Wait until a condition holds; fails if it never does."""
    end = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.01)
