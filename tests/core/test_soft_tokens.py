"""Soft tokens: marks in the keys of blocks, and spans that are refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from quire.core.radix import RadixTree
from quire.core.scheduler import Scheduler
from quire.core.scheduler_config import SchedulerConfig
from quire.core.soft_tokens import block_keys, block_marks
from quire.types import Request, RequestError, SamplingParams, SoftSpan, TokenIds

A, B = b"a" * 32, b"b" * 32
CONFIG = SchedulerConfig(num_blocks=20, block_size=4, soft_tokens=True)


def test_each_block_with_soft_tokens_has_a_mark() -> None:
    marks = block_marks([SoftSpan(1, 5, A), SoftSpan(6, 1, B), SoftSpan(12, 4, A)], 4)
    assert sorted(marks) == [0, 1, 3]
    assert [len(mark) for mark in marks.values()] == [48, 96, 48]
    keys = block_keys(b"k" * 18 * 4, 16, marks)
    assert [len(key) for key in keys] == [16 + 48, 16 + 96, 16, 16 + 48]


def test_a_mark_says_what_where_and_how_long() -> None:
    """No two of these have a block in common, and each is equal to itself."""
    spans = [SoftSpan(1, 3, A), SoftSpan(1, 3, B), SoftSpan(0, 3, A), SoftSpan(1, 2, A)]
    marks = [block_marks([span], 4)[0] for span in spans]
    assert len({*marks, b""}) == 5
    assert block_marks([spans[0]], 4)[0] == marks[0]
    assert block_marks([replace(spans[0], start=5)], 4) == {
        1: marks[0]
    }  # the block's place is not part of it


def test_a_tree_tells_marked_blocks_from_plain_ones() -> None:
    tree: RadixTree[int] = RadixTree(1)
    plain = tree.insert(b"xyz", [1, 2, 3])
    marked = tree.extend(tree.match(b"x")[0], b"y" + A, 4)
    assert tree.match(b"xyz")[-1] is plain
    assert tree.match(b"xyz", marks={1: A})[-1] is marked
    assert [node.value for node in tree.match(b"xyz", marks={1: B})] == [1]
    tree.audit()


@pytest.mark.parametrize(
    ("spans", "message"),
    [
        ([SoftSpan(0, 3, A), SoftSpan(2, 2, A)], "span 1: starts at 2, before the end of span 0 at 3"),
        ([SoftSpan(5, 2, A), SoftSpan(0, 2, A)], "span 1: starts at 0, before the end of span 0 at 7"),
        ([SoftSpan(8, 3, A)], "span 0: positions 8 to 10 are not all in the prompt of 10 tokens"),
        ([SoftSpan(-1, 3, A)], "span 0: positions -1 to 1 are not all in the prompt"),
        ([SoftSpan(1, 0, A)], "span 0: length 0 is not at least 1"),
        ([SoftSpan(1, 2, A[:16])], "span 0: the digest must be 32 bytes"),
        ([SoftSpan(1, 2, "a" * 32)], "span 0: the digest must be 32 bytes"),  # type: ignore[arg-type]
        ([SoftSpan(1, 2.0, A)], "span 0: must be a start, a length and a digest"),  # type: ignore[arg-type]
        ([(1, 2, A)], "span 0: must be a start, a length and a digest"),
    ],
)
def test_bad_spans_are_refused_by_name(spans: list[SoftSpan], message: str) -> None:
    with pytest.raises(RequestError, match=f"soft_tokens: {message}"):
        Scheduler(CONFIG).add(ask(spans))


def test_a_model_without_embeddings_refuses_soft_tokens() -> None:
    with pytest.raises(RequestError, match="soft_tokens: this model takes no embeddings"):
        Scheduler(replace(CONFIG, soft_tokens=False)).add(ask([SoftSpan(1, 2, A)]))
    Scheduler(replace(CONFIG, soft_tokens=False)).add(ask([]))


def test_a_worker_hears_of_soft_tokens_once() -> None:
    scheduler = Scheduler(CONFIG)
    scheduler.add(ask([SoftSpan(1, 2, A)]))
    [new] = scheduler.schedule().new
    assert new.soft_tokens == (SoftSpan(1, 2, A),)


def ask(spans: list[SoftSpan]) -> Request:
    return Request(
        request_id="r",
        prompt_token_ids=TokenIds(range(10)),
        params=SamplingParams(),
        soft_tokens=tuple(spans),
    )
