"""Outputs are looked up in those of the same origin alone, within their memory."""

from __future__ import annotations

import random

from quire._native import NgramIndex
from quire.speculate.ngram import NgramProposer
from quire.speculate.proposer import Room
from quire.speculate.recent_outputs import ORIGINS, RecentOutputs
from quire.types import NewSeq, SamplingParams

ANN, BOB = ("key a", ""), ("key b", "")


def new(seq_id: int, tokens: list[int], origin: tuple[str, str], prompt: int = 2) -> NewSeq:
    return NewSeq(
        seq_id=seq_id, token_ids=tokens, prompt_len=prompt, params=SamplingParams(), sample_index=0, seed=0, blocks=(),
        origin=origin,
    )  # fmt: skip


def text(tokens: list[int]) -> NgramIndex:
    made = NgramIndex(2, 8, 256)
    made.append(tokens)
    return made


def drafts(proposer: NgramProposer, seq_id: int, most: int = 3) -> list[int]:
    offers = proposer.look([seq_id], most)
    return proposer.propose({seq_id: Room(most, most)})[seq_id] if offers else []


def test_an_ended_output_is_found_by_its_origin_alone() -> None:
    proposer = NgramProposer(2, 8, recent=64)
    proposer.start(new(0, [1, 2], ANN))
    proposer.extend(0, [10, 11, 12, 13, 14])
    proposer.start(new(1, [3, 4, 10, 11], ANN))
    assert drafts(proposer, 1) == []  # it has not ended
    proposer.stop(0)
    assert drafts(proposer, 1) == [12, 13, 14]
    assert proposer.look([1], 3)[1].grade == 2
    for origin in (BOB, ("key a", "salt"), ("", "")):
        proposer.start(new(2, [3, 4, 10, 11], origin))
        assert drafts(proposer, 2) == []
    proposer.start(new(3, [1, 2, 7, 1, 2], ANN))
    assert drafts(proposer, 3) == [7, 1, 2]  # its own text goes first


def test_prompts_are_not_outputs_and_a_resumed_one_counts_once() -> None:
    proposer = NgramProposer(2, 8, recent=64)
    proposer.start(new(0, [1, 2], ANN))
    proposer.extend(0, [10, 11])
    proposer.stop(0)
    proposer.start(new(0, [1, 2, 10, 11], ANN))
    proposer.extend(0, [12, 13])
    proposer.stop(0)
    proposer.start(new(1, [9, 1, 2], ANN))
    assert drafts(proposer, 1) == []
    proposer.start(new(2, [9, 10, 11], ANN))
    assert drafts(proposer, 2) == [12, 13, 12]


def test_old_tokens_and_old_origins_go_first() -> None:
    recent, rng = RecentOutputs(2, 8, 64), random.Random(0)
    recent.add(ANN, text([1, 2, 3]), 3)
    for _ in range(4):
        recent.add(ANN, text([rng.randrange(10, 1000) for _ in range(30)]), 30)
    assert recent.lookup(ANN, text([1, 2]), 1) == (0, [])
    recent.add(BOB, text([1, 2, 3]), 3)
    for at in range(ORIGINS - 1):
        recent.add(("key", str(at)), text([1, 2, 3]), 3)
    assert recent.lookup(ANN, text([1, 2]), 1) == (0, [])
    assert recent.lookup(BOB, text([1, 2]), 1) == (2, [3])
    recent.add(("key", "more"), text([1, 2, 3]), 3)
    assert recent.lookup(BOB, text([1, 2]), 1) == (0, [])


def test_memory_is_bounded() -> None:
    recent, rng = RecentOutputs(2, 8, 1000), random.Random(0)
    for at in range(40):
        recent.add(("key", str(at)), text([rng.randrange(50) for _ in range(200)]), 200)
        held = sum(known.memory() for known in recent._texts.values())
        assert held <= RecentOutputs.memory_bound(1000)
    assert RecentOutputs.memory_bound(0) == 0
