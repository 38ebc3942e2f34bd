"""State per sequence in fixed rows, and the step arrays gathered from it.

A sequence keeps its slot while it runs: its row of every block table is written once and appended to. A step names
slots; nothing is copied or reordered.
"""

from __future__ import annotations

from typing import Protocol

from quire.executor.base import F32, I32, Embeddings, StepArrays
from quire.records import dataclass
from quire.types import NEXT_TOKEN, NewSeq, ScheduledSeq, SoftSpan
from quire.worker.trees import PlantedTree, StepBranches, plant


class EmbeddingStore(Protocol):
    """The embeddings of soft tokens, by the digests of spans: made by an encoder, or given with a request."""

    def get(self, digest: bytes) -> F32:
        """Rows [tokens of the span, dim], for as long as a request with that span has not ended."""


@dataclass(slots=True)
class Slot:
    """The worker's state of one running sequence."""

    line: int
    filled: list[int]  # entries used in its row, per cache group
    prompt: list[int]  # kept only for prompt logprobs
    scored: int  # how many tokens at its end get logprobs
    last: int = 0  # the token sampled last, for a row that was scheduled before it was known
    surprised: bool = False  # it goes by mirostat


class Slots:
    """Rows of the block tables, by sequence id. `soft` are the soft tokens of sequences that have any, `leaders` the
    sequences whose tokens others take: see NewSeq.leader."""

    def __init__(self, arrays: StepArrays, max_rows: int) -> None:
        self.soft: dict[int, tuple[SoftSpan, ...]] = {}
        self.leaders: dict[int, int] = {}
        self._tables, self._adapters = arrays.block_tables, arrays.adapters
        self._free = list(range(max_rows))[::-1]
        self._slots: dict[int, Slot] = {}

    def __getitem__(self, seq_id: int) -> Slot:
        return self._slots[seq_id]

    def admit(self, new: NewSeq, adapter: int = -1) -> Slot:
        """Give a sequence a slot whose rows start with its first blocks; `adapter` is the slot of its adapter."""
        scored = new.params.scored_tokens(new.prompt_len)
        prompt = new.token_ids[: new.prompt_len] if scored else []
        slot = Slot(self._free.pop(), [0] * len(self._tables), prompt, scored)
        slot.surprised = new.params.mirostat > 0
        self._slots[new.seq_id] = slot
        self._adapters[slot.line] = adapter
        if new.soft_tokens:
            self.soft[new.seq_id] = new.soft_tokens
        if new.leader is not None:
            self.leaders[new.seq_id] = new.leader
        self.append(slot, new.blocks)
        return slot

    def append(self, slot: Slot, blocks: tuple[list[int], ...]) -> None:
        """Append block ids to the sequence's row in the table of each group."""
        for group, ids in enumerate(blocks):
            if ids:
                start = slot.filled[group]
                self._tables[group][slot.line, start : start + len(ids)] = ids
                slot.filled[group] = start + len(ids)

    def release(self, seq_id: int) -> Slot | None:
        """Free the slot; None if the sequence never had one."""
        slot = self._slots.pop(seq_id, None)
        self.soft.pop(seq_id, None)
        self.leaders.pop(seq_id, None)
        if slot is not None:
            self._free.append(slot.line)
        return slot


def soft_rows(
    slots: Slots, store: EmbeddingStore, scheduled: list[ScheduledSeq], starts: I32
) -> list[Embeddings]:
    """The embeddings of the soft tokens of a step, whose rows begin at tokens `starts`.

    Raises ValueError for a span with another number of rows.
    """
    found: list[Embeddings] = []
    for token, item in zip(starts.tolist(), scheduled, strict=True):
        stop = item.start + len(item.token_ids)
        for span in slots.soft.get(item.seq_id, ()):
            first, last = max(item.start, span.start), min(stop, span.end)
            if first < last:
                rows = store.get(span.digest)
                if len(rows) != span.length:
                    raise ValueError(
                        f"soft_tokens: {len(rows)} embeddings for a span of {span.length} tokens"
                    )
                found.append(
                    Embeddings(token + first - item.start, rows[first - span.start : last - span.start])
                )
    return found


@dataclass(slots=True)
class Filled:
    """What the arrays of a step hold: tokens, and rows, those of branches last. `sampling` has the row of each position
    whose logits are needed, an index into scheduled.
    """

    tokens: int
    rows: int
    sampling: list[int]
    trees: list[PlantedTree]


def fill_rows(
    arrays: StepArrays, slots: Slots, scheduled: list[ScheduledSeq], branches: StepBranches
) -> Filled:
    """Write a step's rows into the arrays, in order.

    arrays.logit_rows lists the tokens at positions whose logits are needed: the last of each row that samples, and one
    more per draft.
    """
    start = 0
    sampling: list[int] = []
    trees: list[PlantedTree] = []
    for row, item in enumerate(scheduled):
        slot = slots[item.seq_id]
        arrays.slots[row] = slot.line
        arrays.query_start[row] = start
        tokens = item.token_ids
        if item.parents:
            tree, tokens = plant(item, row, slot.line, start, len(sampling))
            trees.append(tree)
        count = len(tokens)
        if count == 1:
            token = tokens[0]
            arrays.token_ids[start] = slot.last if token == NEXT_TOKEN else token
            arrays.positions[start] = item.start
        else:
            arrays.token_ids[start : start + count] = tokens
            arrays.positions[start : start + count] = range(item.start, item.start + count)
        start += count
        if item.parents:
            sampling += [row] * item.logits
        elif item.sample:
            for token in range(start - 1 - item.drafts, start):
                arrays.logit_rows[len(sampling)] = token
                sampling.append(row)
    arrays.query_start[len(scheduled)] = start
    rows = len(scheduled)
    if trees:
        rows, start = branches.grow(trees, rows, start)
    return Filled(start, rows, sampling, trees)
