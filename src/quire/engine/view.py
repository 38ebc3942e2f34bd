"""What an engine shows of itself to those who look at it."""

from __future__ import annotations

from typing import NamedTuple

from quire.records import dataclass

SHARED = -2  # of EngineView.blocks


class ViewedSequence(NamedTuple):
    """A running sequence: its tokens, how many of them are computed, were cached, and the blocks that it holds."""

    request_id: str
    sample: int
    prompt_tokens: int
    computed: int
    tokens: int
    cached_tokens: int
    blocks: int


class ViewedBranch(NamedTuple):
    """A run of the tree of cached prefixes, without its text: the index of the branch before it, -1 for none; its
    tokens; and how many sequences end in it."""

    parent: int
    tokens: int
    sequences: int


@dataclass(frozen=True, slots=True)
class EngineView:
    """What an engine holds between two steps. `blocks` has every `stride`-th block up to the last one that was ever
    taken: free (0), cached (-1), held by several (SHARED), or the number of the sequence that holds it, from 1 on.
    `log` has rows of the engine's log (see quire.steplog) up to number `rows`; what began before `oldest`, in
    seconds of the monotonic clock, cannot be explained any more.
    """

    stride: int = 1
    blocks: tuple[int, ...] = ()
    sequences: tuple[ViewedSequence, ...] = ()
    branches: tuple[ViewedBranch, ...] = ()
    log: bytes = b""
    rows: int = 0
    oldest: float = 0.0
