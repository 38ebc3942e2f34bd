"""Contents that come in beside sequences take a bounded part of a step."""

from __future__ import annotations

import math
from typing import Any, cast

import numpy as np
import pytest

from quire.cache_kinds import Move
from quire.core.tier import Name
from quire.executor.base import Runnable
from quire.worker import block_moves
from quire.worker.block_moves import BlockMoves
from quire.worker.kv_file import U8


class Blocks:
    """An executor whose copies take a time, and a store with contents at hand ("h…") and others that come ("c…")."""

    block_bytes = 8

    def __init__(self) -> None:
        self.now = 0.0
        self.written: list[int] = []
        self.read: list[int] = []
        self.kept: list[bytes] = []
        self.reading = self.took = 0.0  # seconds of readers: for a content, and those that were not told yet

    def perf_counter(self) -> float:
        return self.now

    def write_blocks(self, blocks: list[int], content: U8) -> None:
        self.now += 0.001
        assert (content == blocks[0]).all()
        self.written += blocks

    def read_blocks(self, blocks: list[int], into: U8) -> None:
        into[:] = blocks[0]

    def put(self, name: Name, content: U8) -> None:
        assert (content == name[1]).all()
        self.kept.append(name[0])

    def comes(self, block: int, name: Name) -> bool:
        if name[0].startswith(b"c"):
            self.read.append(block)
        return name[0].startswith(b"c")

    def arrived(self, most: int) -> list[tuple[int, U8 | None]]:
        found, self.read = self.read[:most], self.read[most:]
        self.took += self.reading * len(found)
        return [(block, None if block == 33 else np.full(8, block, np.uint8)) for block in found]

    def spent(self) -> float:
        took, self.took = self.took, 0.0
        return took

    def get(self, name: Name) -> U8 | None:
        return None if name[1] == 7 else np.full(8, name[1], np.uint8)


@pytest.fixture
def blocks(monkeypatch: pytest.MonkeyPatch) -> Blocks:
    made = Blocks()
    monkeypatch.setattr(block_moves, "time", made)
    return made


def moves_of(kind: bytes, *numbers: int) -> list[Move]:
    return [Move(number, kind + bytes([number]), number, fill=True) for number in numbers]


def made(blocks: Blocks) -> BlockMoves:
    return BlockMoves(cast("Runnable", cast("Any", blocks)), blocks)


def test_without_sequences_everything_comes_at_once(blocks: Blocks) -> None:
    moves = made(blocks)
    filled = moves.run(moves_of(b"h", *range(1, 31)) + moves_of(b"c", *range(31, 41)), math.inf)
    assert sorted(filled) == [*range(1, 41)]
    assert {number for number, came in filled.items() if not came} == {7, 33}
    assert not moves


@pytest.mark.parametrize("kind", [b"h", b"c"])
def test_beside_sequences_a_part_of_a_step(blocks: Blocks, kind: bytes) -> None:
    """A copy takes a millisecond: eight are 2 % of 0.39 s. What is above that, later steps have less."""
    moves = made(blocks)
    counts = [len(moves.run(moves_of(kind, *range(40, 80)), 0.39))]
    for step in (0.19, 0.03, 0.02, 0.015, 0.39):
        began = len(blocks.written)
        assert moves
        filled = moves.run([], step)
        assert list(filled) == blocks.written[began:]
        counts.append(len(filled))
    assert counts == [8, 4, 1, 0, 0, 8]
    assert len(moves.run([], math.inf)) == 40 - 21
    assert not moves


@pytest.mark.parametrize("kind", [b"h", b"c"])
def test_a_short_step_takes_one_block(blocks: Blocks, kind: bytes) -> None:
    moves = made(blocks)
    counts = [len(moves.run(moves_of(kind, *range(40, 44)), 0.001))]
    counts += [len(moves.run([], 0.001)) for _ in range(3)]
    assert counts == [1] * 4
    assert not moves


def test_what_readers_took_counts(blocks: Blocks) -> None:
    """Reading takes four times as long as copying, so a block comes in every fifth step."""
    moves, blocks.reading = made(blocks), 0.004
    moves.run(moves_of(b"c", *range(40, 80)), 0.0499)
    for _ in range(50):
        moves.run([], 0.0499)
    assert 10 <= len(blocks.written) <= 12


def test_what_leaves_is_copied_at_once(blocks: Blocks) -> None:
    moves = made(blocks)
    leaving = [Move(number, b"x" + bytes([number]), number, fill=False) for number in range(5)]
    assert moves.run([*moves_of(b"h", 40, 41), *leaving], 0.001).keys() == {40}
    assert blocks.kept == [b"x" + bytes([number]) for number in range(5)]


def test_what_is_at_hand_and_what_comes_take_turns(blocks: Blocks) -> None:
    moves = made(blocks)
    filled = [next(iter(moves.run(moves_of(b"h", 90) + moves_of(b"c", *range(40, 50)), 0.001)))]
    for number in range(50, 56):
        filled += moves.run(moves_of(b"c", number), 0.001)
    assert 90 in filled[:2]
    assert len(filled) == 7


def test_what_is_lost_takes_no_time(blocks: Blocks) -> None:
    assert list(made(blocks).run(moves_of(b"c", 33, 34, 35), 0.001).values()) == [False, True]
