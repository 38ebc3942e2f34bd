"""Predicted caches: chains of digests, and what is forgotten first."""

from __future__ import annotations

import random

import pytest

from quire.routing.prefix_index import PIECE_BYTES, PrefixIndex, prompt_digests


def test_prompts_have_as_many_digests_in_common_as_whole_pieces() -> None:
    generator = random.Random(1)
    for _ in range(100):
        common, length = generator.randrange(0, 3000), generator.randrange(1, 2000)
        begin = generator.randbytes(common)
        one = prompt_digests(b"m", [begin + b"\x01" + generator.randbytes(length)])
        two = prompt_digests(b"m", [begin + b"\x02" + generator.randbytes(length)])
        same = sum(a == b for a, b in zip(one, two, strict=True))
        assert same == common // PIECE_BYTES
        assert one[:same] == two[:same]


def test_domains_share_nothing() -> None:
    text = [b"x" * 4 * PIECE_BYTES]
    assert not set(prompt_digests(b"one", text)) & set(prompt_digests(b"two", text))


def test_parts_are_told_apart() -> None:
    assert prompt_digests(b"", [b"ab" * PIECE_BYTES, b"c" * PIECE_BYTES]) != prompt_digests(
        b"", [b"ab" * PIECE_BYTES + b"c" * PIECE_BYTES]
    )


@pytest.mark.parametrize("limit", [8, 40, 1000])
def test_bisection_finds_what_a_walk_finds(limit: int) -> None:
    """Conversations that branch, under a limit that forgets: what is known from its beginning on."""
    generator, index = random.Random(limit), PrefixIndex(limit)
    prompts: list[bytes] = [b"system" * 200]
    for _ in range(300):
        prompt = generator.choice(prompts) + generator.randbytes(generator.randrange(1, 900))
        prompts = [*prompts[-30:], prompt]
        digests = prompt_digests(b"", [prompt])
        found = index.matched("a", digests)
        walked = next(
            (n for n, digest in enumerate(digests) if digest not in index._seen.get("a", ())), len(digests)
        )
        assert found == walked
        index.add("a", digests)
        assert index.size("a") <= limit
        assert index.matched("a", digests) == min(limit, len(digests))
        assert index.matched("b", digests) == 0
    index.forget("a")
    assert index.size("a") == 0
