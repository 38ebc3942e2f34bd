"""Servers of other kinds behind a router, by what each of them says of its health and its models."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from helpers.fake_llm import Behaviour, FakeLLM
from helpers.process import until
from helpers.routed import routed

ONE = {"id": "fake-model", "object": "model", "owned_by": "them"}
LISTED: dict[str, Any] = {"object": "list", "data": [ONE]}
# The bodies of their routes, None for one that they do not have.
KINDS: dict[str, dict[str, Any]] = {
    "vLLM": {"/health": "", "/v1/models": LISTED | {"data": [ONE | {"max_model_len": 4096}]}},
    "SGLang": {"/health": "", "/v1/models": LISTED},
    "llama-server": {
        "/health": {"status": "ok"},
        "/v1/models": LISTED | {"models": [{"name": "fake-model"}]},
    },
    "a cloud": {"/health": None, "/v1/models": LISTED},
}


class OfAKind(FakeLLM):
    """Answers GET as a kind of server does; while it is `loading` as llama-server does then."""

    loading = False

    def __init__(self, kind: str, behaviour: Behaviour) -> None:
        super().__init__(behaviour)
        self.routes = KINDS[kind]

    def respond(self, method: str, path: str, body: bytes) -> Iterator[tuple[float, bytes]]:
        if method != "GET":
            yield from super().respond(method, path, body)
            return
        found, status = self.routes.get(path), 200
        if self.loading and path == "/health":
            found, status = (
                {"error": {"code": 503, "message": "Loading model", "type": "unavailable_error"}},
                503,
            )
        elif found is None:
            found, status = {"detail": "Not Found"}, 404
        said = found.encode() if isinstance(found, str) else json.dumps(found).encode()
        yield 0.0, b"HTTP/1.1 %d X\r\ncontent-length: %d\r\n\r\n%b" % (status, len(said), said)


@pytest.mark.parametrize("crlf", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_they_are_well_and_answer(kind: str, crlf: bool) -> None:
    """Two of a kind, of which the first loses a stream: it goes on at the other one."""
    lost, other = (
        OfAKind(kind, Behaviour(ttft=0.0, itl=0.0, crlf=crlf, cut=cut)) for cut in ({1}, set[int]())
    )
    with routed(lost, other, policy="round-robin") as router:
        until(lambda: all(each.healthy for each in router.backends.all))
        assert [each["id"] for each in router.request("GET", "/v1/models").json["data"]] == ["fake-model"]
        whole = [router.chat("hello", model="fake-model").json["choices"][0]["message"] for _ in range(2)]
        assert whole[0] == whole[1]
        for _ in range(2):
            body = router.chat("hello", model="fake-model", stream=True, tokens=6).body
            assert body.count(b" word") == 6
            assert body.replace(b"\r\n", b"\n").endswith(b"data: [DONE]\n\n")
        until(lambda: router.service.context.metrics.resumed == 1)
        assert router.chat("hello", model="other").status == 404


def test_one_that_loads_its_model_gets_no_requests() -> None:
    servers = [OfAKind("llama-server", Behaviour(ttft=0.0, itl=0.0)) for _ in range(2)]
    servers[1].loading = True
    with routed(*servers, policy="round-robin") as router:
        until(lambda: router.backends.all[0].healthy)
        names = {router.chat("hello").headers["x-quire-backend"] for _ in range(4)}
        assert names == {"backend-1"}
        servers[1].loading = False
        until(lambda: router.backends.all[1].healthy)
        assert len({router.chat("hello").headers["x-quire-backend"] for _ in range(4)}) == 2
