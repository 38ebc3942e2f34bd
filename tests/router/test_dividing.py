"""Prompts that a router has computed elsewhere: which ones, and what becomes of them when that fails."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers.fake_llm import Behaviour
from helpers.process import until
from helpers.raw_server import RawServer, answer
from helpers.routed import Routed, routed
from helpers.server import GUARD
from quire.config.routing import RouterConfig, backend_entries
from quire.routing.tickets import is_peer
from quire.routing.transfer import MovingCosts

KEY = b"a key that all of them have"
FAST = {"ttft": 0.0, "itl": 0.0}
TEXT = "word " * 400
PARAMS = b'{"remote_request_id": "ticket", "remote_host": "10.0.0.1"}'
TICKET = b'{"kv_transfer_params": %b, "usage": {"prompt_tokens": 500}}' % PARAMS


@contextlib.contextmanager
def dividing(
    folder: Path, made: bytes, *, hangs: bool = False, **options: Any
) -> Iterator[tuple[Routed, RawServer]]:
    """A router with a server that computes prompts, and one that answers."""
    (folder / "key").write_bytes(KEY)
    other = RawServer(made, hangs=hangs)
    chosen = {"prefill_over": 50, "prefill_timeout": GUARD, "breaker_failures": 99} | options
    try:
        with routed(
            Behaviour(**FAST), prefill=(other.url,), kv_key_file=str(folder / "key"), **chosen
        ) as router:
            until(lambda: all(each.healthy for each in router.backends.all))
            yield router, other
    finally:
        other.close()


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MovingCosts, "pays", lambda *_: True)


@pytest.mark.usefixtures("always")
def test_the_server_that_answers_gets_the_ticket(tmp_path: Path) -> None:
    with dividing(tmp_path, answer(200, TICKET)) as (router, other):
        reply = router.chat(TEXT, stream=True)
        assert reply.status == 200
        assert reply.headers["x-quire-backend"] == "backend-1"
        headers, asked = other.asked[0]
        assert is_peer(KEY, headers["x-request-id"], headers["x-quire-peer"])
        assert asked["kv_transfer_params"] == {"do_remote_decode": True}
        ((_, seen),) = router.fakes[0].seen
        assert seen.pop("kv_transfer_params") == {"do_remote_prefill": True, "remote_request_id": "ticket"}, (
            "no address"
        )
        asked.pop("kv_transfer_params")
        assert seen == asked, "else the same"
        assert router.service.context.dividing.divided == 1
        assert router.service.context.dividing.tokens == 500


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize(
    ("made", "hangs", "why"),
    [
        (answer(429, b"{}"), True, "refused"),
        (answer(503, b"{}"), False, "refused"),
        (answer(400, b"{}"), False, "refused"),
        (answer(200, b"no JSON"), False, "refused"),
        (answer(200, b'{"kv_transfer_params": 7}'), False, "refused"),
        (answer(200, b'{"kv_transfer_params": null}'), False, "nothing"),
        (answer(200, b'{"choices": []}'), False, "nothing"),
        (b"", False, "failed"),
        (answer(200, TICKET)[:-20], False, "failed"),
        (b"no HTTP\r\n\r\n", False, "failed"),
        (b"", True, "late"),
        (answer(200, TICKET)[:-20], True, "late"),
    ],
    ids=str,
)
def test_what_goes_wrong_there_costs_no_answer(tmp_path: Path, made: bytes, hangs: bool, why: str) -> None:
    limit = {"prefill_timeout": 0.05} if why == "late" else {}
    with dividing(tmp_path, made, hangs=hangs, **limit) as (router, other):
        for number in range(3):
            reply = router.chat(f"{number} {TEXT}")
            assert reply.status == 200, reply.text
            assert reply.json["choices"][0]["message"]["content"] == " word" * 4
        assert all("kv_transfer_params" not in seen for _, seen in router.fakes[0].seen)
        found = router.service.context.dividing
        assert found.fallbacks == {why: 1 if why == "nothing" else 3}, "it is left alone after that"
        assert len(other.asked) >= 1 or why == "late"
        assert found.divided == 0
        # a client may have its answer a moment before the router counts it
        until(lambda: all(each.requests == 0 and each.work == 0 for each in router.backends.all))


@pytest.mark.usefixtures("always")
def test_one_that_is_slower_than_expected_has_not_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire.router.dividing._MARGIN", 0.05)
    with dividing(tmp_path, b"", hangs=True, breaker_failures=1) as (router, _):
        found = router.service.context.dividing
        router.do(lambda: found.costs.computed(1000, 1e-6))
        for number in range(2):
            assert router.chat(f"{number} {TEXT}").status == 200
        assert found.fallbacks == {"late": 1}, "it is left alone after that"
        assert router.backends.all[1].state(0.0) == "ready"


@pytest.mark.usefixtures("always")
def test_what_cannot_be_divided_is_not(tmp_path: Path) -> None:
    with dividing(tmp_path, answer(200, TICKET)) as (router, other):
        router.chat("short")
        for fields in (
            {"echo": True},
            {"prompt_logprobs": 1},
            {"kv_transfer_params": {"do_remote_prefill": True}},
        ):
            router.chat(TEXT, **fields)
        router.request("POST", "/generate", {"inputs": TEXT, "parameters": {"max_new_tokens": 2}})
        once = {"messages": [{"role": "user", "content": TEXT}]}
        router.request("POST", "/v1/chat/completions", once, {"idempotency-key": "k"})
        for prompt in ([TEXT, "other"], [[1] * 400, [2]]):
            router.request("POST", "/v1/completions", {"prompt": prompt, "max_tokens": 2})
        router.request("POST", "/v1/completions", {"prompt": TEXT, "prompt_embeds": "AAAA", "max_tokens": 2})
        assert not other.asked
        assert len(router.fakes[0].seen) == 9
        for number, empty in enumerate((None, {}), 1):
            router.chat(f"{number} {TEXT}", kv_transfer_params=empty)
            assert len(other.asked) == number
            assert "kv_transfer_params" in router.fakes[0].seen[-1][1]


def test_nobody_is_asked_while_nobody_is_held_up(tmp_path: Path) -> None:
    with dividing(tmp_path, answer(200, TICKET)) as (router, other):
        router.chat(TEXT)
        assert not other.asked
        router.do(lambda: setattr(router.backends.all[0], "requests", 3))
        router.chat("other " + TEXT)
        assert len(other.asked) == 1
        router.do(lambda: setattr(router.backends.all[1], "work", 1e6))
        router.chat("third " + TEXT)
        assert len(other.asked) == 1, "too much waits there"
        router.do(lambda: setattr(router.backends.all[0], "requests", 0))
        router.do(lambda: setattr(router.backends.all[1], "work", 0))


@pytest.mark.usefixtures("always")
def test_one_that_computes_prompts_answers_when_nobody_else_can(tmp_path: Path) -> None:
    with dividing(tmp_path, answer(200, b'{"choices": []}')) as (router, other):
        router.do(lambda: setattr(router.backends.all[0], "draining", True))
        reply = router.chat(TEXT)
        assert reply.headers["x-quire-backend"] == "prefill-1"
        assert "kv_transfer_params" not in other.asked[0][1]
        assert "x-quire-peer" not in other.asked[0][0]


def test_what_only_they_have_is_listed(tmp_path: Path) -> None:
    with dividing(tmp_path, answer(200, TICKET)) as (router, _):
        router.do(lambda: setattr(router.backends.all[1], "models", [{"id": "rare"}]))
        listed = router.request("GET", "/v1/models").json["data"]
        assert [each["id"] for each in listed] == ["fake-model", "rare"]


def test_roles_are_in_the_file(tmp_path: Path) -> None:
    file = tmp_path / "backends.toml"
    file.write_text(
        '[[backend]]\nurl = "http://a"\nrole = "prefill"\n[[backend]]\nurl = "http://b"\nrole = "both"\n'
    )
    config = RouterConfig(backends_file=str(file), prefill=("http://c",), kv_key_file="k")
    assert [each.role for each in backend_entries(config)] == ["prefill", "prefill", "both"]
    file.write_text('[[backend]]\nurl = "http://a"\nrole = "draft"\n')
    with pytest.raises(ValueError, match="backend 1: role: 'draft' is not one of prefill, decode, both"):
        backend_entries(RouterConfig(backends_file=str(file)))
    for role in ("prefill", "both"):
        file.write_text(f'[[backend]]\nurl = "http://a"\nrole = "{role}"\n')
        with pytest.raises(ValueError, match=f"backend-1: role: '{role}' needs kv_key_file"):
            backend_entries(RouterConfig(backends_file=str(file)))
    with pytest.raises(ValueError, match="prefill: needs kv_key_file"):
        RouterConfig(backend=("http://a",), prefill=("http://b",))
    for wrong in ({"prefill_over": 0}, {"prefill_timeout": 0.0}):
        with pytest.raises(ValueError, match="prefill_"):
            RouterConfig(backend=("http://a",), **wrong)  # type: ignore[arg-type]


@pytest.mark.usefixtures("always")
def test_a_role_changes_while_the_router_runs(tmp_path: Path) -> None:
    """A server computes prompts for the other, answers like it, and computes prompts again."""
    one, other = RawServer(answer(200, b'{"choices": []}')), RawServer(answer(200, TICKET))
    file = tmp_path / "backends.toml"
    (tmp_path / "key").write_bytes(KEY)

    def given(role: str) -> None:
        file.write_text(
            f'[[backend]]\nurl = "{one.url}"\n[[backend]]\nurl = "{other.url}"\nrole = "{role}"\n'
        )

    given("prefill")
    try:
        with routed(
            urls=[],
            backends_file=str(file),
            kv_key_file=str(tmp_path / "key"),
            prefill_over=50,
            policy="round-robin",
        ) as router:
            for role in ("prefill", "decode", "both", "prefill"):
                given(role)
                router.do(router.service.reload)
                until(lambda: all(each.healthy for each in router.backends.all))
                before, computed = len(other.asked), role != "decode"
                names = {router.chat(f"{role} {n} {TEXT}").headers["x-quire-backend"] for n in range(4)}
                assert len(names) == (1 if role == "prefill" else 2), role
                asked = [body for _, body in other.asked[before:]]
                assert any("do_remote_decode" in str(body) for body in asked) == computed, role
                until(lambda: all(each.requests == 0 for each in router.backends.all))
    finally:
        one.close()
        other.close()
