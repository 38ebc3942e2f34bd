"""Tickets and proofs: what was changed in any place, or belongs to something else, is none."""

from __future__ import annotations

import base64

import pytest

from quire.routing.tickets import MOST_TICKET, blocks_of, is_peer, peer_proof, prompt_mark, ticket_for
from quire.routing.transfer import MovingCosts

KEY = b"a key that both sides have"
MARK = prompt_mark("fp", "tenant", "shared:", b"tokens")


def test_a_ticket_is_of_one_prompt_and_one_key() -> None:
    ticket = ticket_for(KEY, MARK, 74)
    assert blocks_of(KEY, MARK, ticket) == 74
    assert len(ticket) <= MOST_TICKET
    assert blocks_of(b"another key of sixteen", MARK, ticket) is None
    for other in (
        ("fq", "tenant", "shared:", b"tokens"),
        ("fp", "", "shared:", b"tokens"),
        ("fp", "tenant", "shared:x", b"tokens"),
        ("fp", "tenant", "shared:", b"tokenz"),
        ("fptenant", "", "shared:", b"tokens"),
        ("fp", "tenantshared:", "", b"tokens"),
    ):
        assert blocks_of(KEY, prompt_mark(*other), ticket) is None


def test_a_ticket_with_any_bit_changed_is_none() -> None:
    raw = base64.urlsafe_b64decode(ticket_for(KEY, MARK, 74) + "=")
    for bit in range(8 * len(raw)):
        changed = bytearray(raw)
        changed[bit // 8] ^= 1 << bit % 8
        assert blocks_of(KEY, MARK, base64.urlsafe_b64encode(changed).decode().rstrip("=")) is None


@pytest.mark.parametrize(
    "text", ["", "a", "AAAA", "=", "ü" * 27, "A" * 27, "A" * 10_000, "../../etc", "\0" * 27]
)
def test_what_is_no_ticket_is_none(text: str) -> None:
    assert blocks_of(KEY, MARK, text) is None
    assert blocks_of(KEY, MARK, ticket_for(KEY, MARK, 1) + text) == (1 if text in {"", "="} else None)


def test_a_proof_is_of_one_request() -> None:
    proof = peer_proof(KEY, "request")
    assert is_peer(KEY, "request", proof)
    for key, request, shown in (
        (KEY, "other", proof),
        (b"k" * 16, "request", proof),
        (KEY, "request", ""),
        (KEY, "", "ü"),
    ):
        assert not is_peer(key, request, shown)


def test_a_prompt_is_computed_elsewhere_where_that_holds_up_less() -> None:
    costs = MovingCosts()
    assert not costs.pays(1000, 0, 0), "there is nobody to hold up"
    assert costs.pays(1000, 0, 1)
    assert not costs.pays(3, 0, 1), "as long as the way"
    assert not costs.pays(1000, 5000, 2), "too much waits there"
    costs.computed(10, 100.0)
    assert costs.compute == 1e-3, "nothing is learned of so few tokens"
    costs.computed(1000, 0.01)
    assert costs.compute == pytest.approx(1e-5)
    assert not costs.pays(1000, 0, 1), "a fast machine over a slow link"
    for _ in range(50):
        costs.moved(1000, costs.hop)
    assert costs.pays(1000, 0, 1)
