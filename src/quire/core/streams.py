"""Running sequences that decode, counted for what shares a step among them and with prompts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from quire.core.sequence import Sequence
from quire.records import dataclass


@dataclass(slots=True)
class StepLimits:
    """What a step may have, within the options of the scheduler: changed between steps, by a controller or a person."""

    tokens: int
    sequences: int
    drafts: int = 0


@dataclass(frozen=True, slots=True)
class Streams:
    """The decoding sequences: by class of service, their number, the keys that they read, and how many tokens of the
    first prompt under way have been computed."""

    by_class: list[int]
    rows: int
    keys: int
    depth: int


def count_streams(running: Iterable[Sequence], classes: int) -> Streams:
    """O(running)."""
    by_class, rows, keys, depth = [0] * classes, 0, 0, -1
    for seq in running:
        if seq.computed >= seq.prompt_len:
            rows += 1
            keys += seq.computed
            by_class[min(seq.state.request.terms.service_class, classes - 1)] += 1
        elif depth < 0:
            depth = seq.computed
    return Streams(by_class, rows, keys, max(0, depth))


def decoding(running: Iterable[Sequence]) -> Counter[float] | None:
    """Number of decoding sequences by level; None if all decode. Where prompts may rank ahead of them, each keeps a
    token of the budget: no stream stalls for a prompt of its level."""
    for seq in running:
        if seq.computed < seq.prompt_len:
            return Counter([seq.rank[0] for seq in running if seq.computed >= seq.prompt_len])
    return None


def most_tokens_of(seq: Sequence, budget: int, kept: Counter[float]) -> int:
    """Tokens of the budget that a running sequence may take; `kept` are decoding ones of each level that follow it."""
    level = seq.rank[0]
    if seq.computed >= seq.prompt_len:
        kept[level] -= 1
        return budget
    return max(min(budget, 1), budget - kept[level])


def partial_prompts(running: Iterable[Sequence]) -> list[tuple[str, int, int]]:
    """Running requests whose prompt is not complete: the id, how many of its tokens are computed, and how many of these
    were found in the cache."""
    return [
        (seq.state.request.request_id, seq.computed, seq.state.cached_tokens)
        for seq in running
        if seq.computed < seq.prompt_len and not seq.follows
    ]
