"""The web page's files: headers, sizes, access. What a browser makes of them is behind the marker web."""

from __future__ import annotations

import gzip
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import quire
from helpers.server import LiveServer, serving

BUILT = Path(quire.__file__).parent / "server/pages/built"
KEY = {"authorization": "Bearer secret"}


@pytest.fixture(scope="module")
def locked(folder: Path) -> Iterator[LiveServer]:
    with serving(folder, api_key=("secret",), allowed_hosts=("127.0.0.1",)) as live:
        yield live


@pytest.mark.parametrize("path", ["/", "/learn", "/dashboard", "/docs"])
def test_a_page_comes_with_its_policy(server: LiveServer, path: str) -> None:
    reply = server.get(path)
    assert reply.status == 200
    assert reply.headers["content-type"] == "text/html; charset=utf-8"
    policy = reply.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "frame-ancestors 'none'" in policy  # no page of somebody else may put it into a frame
    assert not re.search(r"https?:", policy)
    for name in re.findall(r'(?:src|href)="([^"]+)"', reply.body.decode()):
        assert name.startswith("/ui/")
        assert server.get(name).status == 200


def test_files_are_packed_and_kept_by_the_browser(server: LiveServer) -> None:
    plain, packed = server.get("/ui/index.js"), server.get("/ui/index.js", {"accept-encoding": "gzip, br"})
    assert packed.headers["content-encoding"] == "gzip"
    assert gzip.decompress(packed.body) == plain.body == (BUILT / "index.js").read_bytes()
    again = server.get("/ui/index.js", {"if-none-match": plain.headers["etag"]})
    assert (again.status, again.body) == (304, b"")
    assert server.request("HEAD", "/ui/index.js").body == b""


def test_the_first_load_is_small() -> None:
    first = [path.read_bytes() for path in BUILT.iterdir() if path.suffix in {".html", ".js", ".css", ".svg"}]
    assert sum(len(gzip.compress(data)) for data in first) <= 150_000


@pytest.mark.parametrize(
    "name", ["/ui/", "/ui/nothing.js", "/ui/../page_routes.py", "/ui/%2e%2e/page_routes.py"]
)
def test_other_files_are_not_there(server: LiveServer, name: str) -> None:
    assert server.get(name).status == 404


def test_pages_are_open_and_data_is_not(locked: LiveServer) -> None:
    assert locked.get("/").status == 200
    assert locked.get("/ui/index.js").status == 200
    for path in ("/v1/models", "/v1/overview", "/learn/api/sims", "/learn/api/sim/memory", "/openapi.json"):
        assert locked.get(path).status == 401
    assert locked.get("/v1/models", KEY).status == 200


def test_what_pages_show_needs_a_key(locked: LiveServer) -> None:
    """Of all routes that pages have for themselves, those of static files are open and no other."""
    described = locked.get("/openapi.json", KEY).json["paths"]
    own = [path for path, verbs in described.items() if "pages" in verbs.get("get", {}).get("tags", ())]
    assert len(own) >= 12
    for path in own:
        asked = path.replace("{file}", "index.js").replace("{name}", "memory").replace("{chapter}", "3")
        assert "{" not in asked
        assert locked.get(asked).status == (401 if "/api/" in path else 200), path


def test_pages_keep_to_the_allowed_hosts(locked: LiveServer) -> None:
    """A name that an attacker's DNS points here gets no page either."""
    for path in ("/", "/learn", "/dashboard", "/docs", "/ui/index.js"):
        assert locked.get(path, {"host": "evil.example"}).status == 403


def test_no_pages_where_they_are_off(folder: Path) -> None:
    with serving(folder, ui=False) as live:
        assert live.get("/").status == 405  # TGI has POST there
        assert live.get("/ui/index.js").status == 404
        assert "/ui/{file}" not in live.get("/openapi.json").json["paths"]


def test_what_is_bundled_has_its_licence(server: LiveServer) -> None:
    text = server.get("/ui/licenses.txt").body.decode()
    assert all(name in text for name in ("dompurify", "marked", "preact"))
