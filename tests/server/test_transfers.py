"""Requests that two servers share, and who may have them do so: the same text as from one, whatever is lost."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from helpers.kv_servers import ServerHere
from helpers.process import until
from helpers.routed import Routed, routed
from helpers.server import GUARD, LiveServer, Reply, served_folder
from quire.routing.tickets import peer_proof
from quire.routing.transfer import MovingCosts
from quire.worker.kv_server import KvServer
from quire.worker.kv_wire import Peer

KEY = b"a key that all of them have"
TEXT = " ".join(f"room {n} is of colour {n * 7 % 12}." for n in range(40))
ASKED: dict[str, Any] = {"max_tokens": 12, "temperature": 0.8, "seed": 3, "ignore_eos": True}


class Faulty(KvServer):
    """Answers `left` requests; then it is as if it had died, for one connection, or while that is `lasting`."""

    left = -1  # without end
    lasting = False

    def _answer(self, peer: Peer, fingerprint: bytes, size: int) -> None:
        if self.left == 0:
            self.left -= not self.lasting
            raise ConnectionError("it is gone")
        self.left -= self.left > 0
        super()._answer(peer, fingerprint, size)


@dataclass
class Pair:
    """One that computes prompts, and one that answers."""

    shelf: ServerHere[Faulty]
    key: Path
    prefill: LiveServer
    decode: LiveServer
    model: Path
    asked: int = 0

    def post(
        self, server: LiveServer, body: dict[str, Any], name: str = "request", key: bytes = KEY
    ) -> Reply:
        """A request as a router sends it."""
        proof = {"x-request-id": name, "x-quire-peer": peer_proof(key, name)}
        return server.post("/v1/completions", ASKED | body, proof)

    def ticket(self, prompt: str, **fields: Any) -> dict[str, Any] | None:
        reply = self.post(
            self.prefill, {"prompt": prompt, "kv_transfer_params": {"do_remote_decode": True}} | fields
        )
        assert reply.status == 200, reply.text
        found: dict[str, Any] | None = reply.json["kv_transfer_params"]
        assert set(reply.json) == {"kv_transfer_params"} | ({"usage"} if found else set()), "no text"
        return found

    def answer(self, prompt: str, params: dict[str, Any] | None, **fields: Any) -> tuple[Any, int]:
        reply = self.post(self.decode, {"prompt": prompt, "kv_transfer_params": params} | fields)
        assert reply.status == 200, reply.text
        return reply.json["choices"], reply.json["usage"]["prompt_tokens_details"]["cached_tokens"]

    def alone(self, prompt: str, **fields: Any) -> Any:
        """The answer without anything that is known of the prompt."""
        self.asked += 1
        return self.decode.complete(prompt, **(ASKED | {"cache_salt": f"{self.asked}"} | fields)).json[
            "choices"
        ]

    def up(self) -> None:
        """Wait until both use the server of blocks: until a prompt comes from one to the other."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("quire.core.coming_blocks.PATIENCE", 0.05)
            until(self.comes)

    def comes(self) -> bool:
        self.asked += 1
        prompt, before = f"probe {self.asked} {TEXT}", self.decode.metric("quire_transferred_prompts_total")
        self.answer(prompt, self.ticket(prompt), max_tokens=1)
        self.decode.wait(self.decode.idle)
        return self.decode.metric("quire_transferred_prompts_total") > before

    def idle(self) -> None:
        """Wait until nothing runs, and no block is held."""
        for server in (self.prefill, self.decode):
            server.wait(server.idle)


@pytest.fixture(scope="module", autouse=True)
def patient() -> Iterator[None]:
    """However slow this machine is, blocks that are sent come in time, and a server that is back is asked soon."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("quire.core.coming_blocks.PATIENCE", GUARD)
        patch.setattr("quire.core.coming_blocks.MOST_SECONDS", GUARD)
        patch.setattr("quire.worker.remote_tier.CALL_SECONDS", GUARD)
        patch.setattr("quire.worker.outages.PAUSES", (0.05, 0.05))
        patch.setattr("quire.worker.kept_blocks._LOOK_SECONDS", 0.05)
        patch.setattr("quire.router.dividing._MARGIN", GUARD)
        yield


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("transfers")
    key = folder / "kv.key"
    key.write_bytes(KEY)
    shelf, model = ServerHere(Faulty, KEY, 2**26), served_folder(folder / "model")
    tiers = f"remote=127.0.0.1:{shelf.port}:{key}"
    serving = {"api_key": ("one", "two"), "stall_timeout": GUARD, "hang_timeout": GUARD}
    made = [
        LiveServer(model, {"max_model_len": 2048, **options}, serving)
        for options in ({"kv_tiers": f"{tiers},role=prefill"}, {"kv_tiers": f"{tiers},role=decode"})
    ]
    for server in made:
        server.headers = {"authorization": "Bearer one"}
    pair = Pair(shelf, key, *made, model)
    pair.up()
    yield pair
    for server in made:
        server.close()
    shelf.close()


def test_two_servers_give_the_text_of_one(pair: Pair) -> None:
    """With samples, log-probabilities, penalties and a grammar; the blocks have come."""
    before = pair.decode.metric("quire_transferred_prompts_total")
    for number, fields in enumerate((
        {"logprobs": 2}, {"n": 3}, {"frequency_penalty": 0.5, "repetition_penalty": 1.2},
        {"structured_outputs": {"regex": "[a-z]{12,}"}}, {"min_tokens": 12, "stop": ["zzz"]},
    )):  # fmt: skip
        prompt = f"{number} {TEXT}"
        ticket = pair.ticket(prompt, **fields)
        assert ticket is not None
        assert [name for name, value in ticket.items() if value] == ["do_remote_prefill", "remote_request_id"]
        assert pair.answer(prompt, ticket, **fields)[0] == pair.alone(prompt, **fields)
    assert pair.decode.metric("quire_transferred_prompts_total") == before + 5
    assert pair.decode.metric("quire_remote_tier_loaded_bytes_total") > 0, (
        "at least the first, whose cost is not known"
    )
    pair.idle()


def test_a_short_prompt_has_no_ticket(pair: Pair) -> None:
    pair.idle()
    before = pair.prefill.metric("quire_step_prefill_tokens_total")
    assert pair.ticket("short") is None
    assert pair.prefill.metric("quire_step_prefill_tokens_total") == before, "it is not computed there"
    assert pair.answer("short", {}) == (pair.alone("short"), 0)


def test_only_a_router_with_the_key_may_divide_requests(pair: Pair) -> None:
    ticket = pair.ticket(f"mine {TEXT}")
    for params in ({"do_remote_decode": True}, ticket):
        body = {"prompt": "x", "kv_transfer_params": params}
        for headers in (
            {},
            {"x-quire-peer": "0" * 64},
            {"x-quire-peer": peer_proof(KEY, "other"), "x-request-id": "r"},
        ):
            for server in (pair.prefill, pair.decode):
                reply = server.post("/v1/completions", body, headers)
                reply.error(400, "unsupported_parameter", "kv_transfer_params")
        reply = pair.post(pair.decode, body, key=b"a key that nobody has")
        reply.error(400, "unsupported_parameter", "kv_transfer_params")
    refusal = pair.post(pair.decode, {"prompt": "x", "kv_transfer_params": {"do_remote_decode": True}})
    refusal.error(400, "unsupported_parameter", "kv_transfer_params")
    for name, value in (
        ("remote_host", "10.0.0.1"),
        ("remote_port", 22),
        ("remote_engine_id", "e"),
        ("other", 1),
    ):
        reply = pair.post(pair.decode, {"prompt": "x", "kv_transfer_params": {name: value}})
        assert reply.error(400, "invalid_type" if name != "other" else None), "addresses are configured"


def test_a_ticket_of_something_else_counts_for_nothing(pair: Pair) -> None:
    """Changed, of another prompt, salt or tenant: the prompt is computed, and nobody waits."""
    prompt, before = f"yours {TEXT}", pair.decode.metric("quire_refused_tickets_total")
    ticket = pair.ticket(prompt)
    assert ticket is not None
    name = ticket["remote_request_id"]
    changed = ticket | {"remote_request_id": name[:-2] + ("AA" if name[-2:] != "AA" else "BB")}
    alone = pair.alone(prompt)
    salted = pair.answer(prompt, ticket, cache_salt="other")
    assert salted == (alone, 0)
    assert pair.answer(f"not {TEXT}", ticket) == (pair.alone(f"not {TEXT}"), 0)
    assert pair.answer(f"no {TEXT}", {"do_remote_prefill": True}) == (pair.alone(f"no {TEXT}"), 0)
    pair.decode.headers = {"authorization": "Bearer two"}
    try:
        assert pair.answer(prompt, ticket) == (alone, 0), "another tenant finds nothing of the first one"
    finally:
        pair.decode.headers = {"authorization": "Bearer one"}
    assert pair.answer(prompt, changed)[0] == alone
    assert pair.decode.metric("quire_refused_tickets_total") == before + 5
    pair.idle()


def test_blocks_that_are_lost_are_computed(pair: Pair) -> None:
    """The server of blocks ends before the prompt is asked for, and begins again with nothing."""
    first, second = f"first {TEXT}", f"second {TEXT}"
    ticket = pair.ticket(first)
    pair.shelf.stop()
    assert pair.answer(first, ticket)[0] == pair.alone(first)
    until(lambda: pair.prefill.metric("quire_remote_tier_failed") == 1)
    pair.idle()
    before = pair.prefill.metric("quire_step_prefill_tokens_total")
    other = pair.ticket(second)
    assert other is None
    assert pair.prefill.metric("quire_step_prefill_tokens_total") == before, "it is not computed there"
    assert pair.answer(second, other)[0] == pair.alone(second)
    pair.shelf.start()
    pair.up()
    before, third = pair.decode.metric("quire_transferred_prompts_total"), f"second {TEXT} and more"
    ticket = pair.ticket(third)  # most of it is cached there, and is sent again
    assert pair.answer(third, ticket)[0] == pair.alone(third)
    assert pair.decode.metric("quire_transferred_prompts_total") == before + 1
    pair.idle()


MOST_FRAMES = 120  # of a prompt: each block is sent once and read once, and lists are asked for
FAULTS = [(at, lasting) for lasting in (False, True) for at in range(MOST_FRAMES)]


def with_a_fault(pair: Pair, number: int, at: int, *, lasting: bool) -> None:
    """A prompt whose blocks are lost from some frame on, over one connection or over all."""
    prompt = f"fault {number} {TEXT}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("quire.core.coming_blocks.PATIENCE", 0.05)  # some never come
        pair.shelf.server.left, pair.shelf.server.lasting = at, lasting
        ticket = pair.ticket(prompt)
        assert pair.answer(prompt, ticket)[0] == pair.alone(prompt)
        pair.shelf.server.left = -1
    pair.up()
    pair.idle()


@pytest.mark.parametrize(("at", "lasting"), FAULTS[5:MOST_FRAMES:37] + FAULTS[MOST_FRAMES + 20 :: 61])
def test_a_fault_at_any_frame_changes_no_text(pair: Pair, at: int, lasting: bool) -> None:
    with_a_fault(pair, 2 * at + lasting, at, lasting=lasting)


@pytest.mark.chaos
def test_faults_at_all_frames_change_no_text(pair: Pair) -> None:
    for at, lasting in FAULTS:
        with_a_fault(pair, 1000 + 2 * at + lasting, at, lasting=lasting)
    assert pair.decode.metric("quire_transferred_prompts_total") > 0
    assert pair.decode.metric("quire_late_transfers_total") > 0
    assert pair.decode.metric("quire_remote_tier_damaged_blocks_total") == 0


@pytest.fixture
def router(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> Iterator[Routed]:
    """A router that divides all requests of 100 tokens or more."""
    monkeypatch.setattr(MovingCosts, "pays", lambda *_: True)
    urls = [f"{pair.decode.url}"]
    with routed(
        urls=urls, prefill=(pair.prefill.url,), kv_key_file=str(pair.key), prefill_over=100,
        prefill_timeout=GUARD,
    ) as made:  # fmt: skip
        yield made


def test_a_router_divides_requests(pair: Pair, router: Routed) -> None:
    headers = {"authorization": "Bearer one"}
    dividing = router.service.context.dividing
    for number, stream in enumerate((False, True)):
        prompt = f"routed {number} {TEXT}"
        reply = router.request(
            "POST", "/v1/completions", {"prompt": prompt, "stream": stream} | ASKED, headers
        )
        assert reply.status == 200, reply.text
        assert reply.headers["x-quire-backend"] == "backend-1"
        text = (
            "".join(choice["text"] for event in reply.events[:-1] for choice in event["choices"])
            if stream
            else reply.json["choices"][0]["text"]
        )
        assert text == pair.alone(prompt)[0]["text"]
        assert dividing.divided == number + 1
    assert dividing.tokens > 600
    assert dividing.costs.learned
    assert not dividing.fallbacks
    shown = router.request("GET", "/metrics").text
    assert "quire_router_divided_requests_total 2.0" in shown
    assert [each["role"] for each in router.request("GET", "/router/backends").json["data"]] == [
        "decode",
        "prefill",
    ]


def test_what_a_client_says_of_transfers_is_refused(pair: Pair, router: Routed) -> None:
    ticket = pair.ticket(f"stolen {TEXT}")
    for params in (ticket, {"do_remote_decode": True}):
        body = {"prompt": TEXT, "kv_transfer_params": params}
        headers = {"authorization": "Bearer one", "x-quire-peer": peer_proof(KEY, "r"), "x-request-id": "r"}
        reply = router.request("POST", "/v1/completions", body, headers)
        reply.error(400, "unsupported_parameter", "kv_transfer_params")
    assert router.service.context.dividing.divided == 0


@pytest.mark.parametrize("has", ["no role", "another key", "other blocks"])
def test_a_server_that_takes_no_tickets_answers_nevertheless(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has: str
) -> None:
    """It computes the prompt at once, and the router soon knows."""
    monkeypatch.setattr(MovingCosts, "pays", lambda *_: True)
    (tmp_path / "other").write_bytes(b"a key that nobody else has")
    key = tmp_path / "other" if has == "another key" else pair.key
    tiers = {} if has == "no role" else {"kv_tiers": f"remote=127.0.0.1:{pair.shelf.port}:{key},role=decode"}
    options = {"max_model_len": 2048, "block_size": 32 if has == "other blocks" else 16} | tiers
    serving = {"api_key": ("one",), "stall_timeout": GUARD, "hang_timeout": GUARD}
    server = LiveServer(pair.model, options, serving)
    headers = {"authorization": "Bearer one"}
    try:
        with routed(
            urls=[server.url], prefill=(pair.prefill.url,), kv_key_file=str(pair.key), prefill_over=100,
            prefill_timeout=GUARD,
        ) as router:  # fmt: skip
            for number in range(2):
                prompt = f"{has} {number} {TEXT}"
                body = {"prompt": prompt} | ASKED
                reply = router.request("POST", "/v1/completions", body, headers)
                assert reply.status == 200, reply.text
                assert "x-quire-ticket" not in reply.headers
                assert reply.json["choices"][0]["text"] == pair.alone(prompt)[0]["text"]
            dividing = router.service.context.dividing
            assert dividing.divided == 1, "it is left alone after that"
            assert dividing.fallbacks == ({} if has == "other blocks" else {"ticket": 1})
    finally:
        server.close()
