"""Per-sequence state in fixed lines, and the step arrays gathered from it.

A sequence keeps its slot while it runs: its line of every block table is written once and appended to. A step
names slots; nothing is copied or reordered.
"""

from __future__ import annotations

from dataclasses import dataclass

from quire.executor.base import StepArrays
from quire.types import NEXT_TOKEN, NewSeq, ScheduledSeq


@dataclass(slots=True)
class Slot:
    """What the worker remembers of one running sequence."""

    line: int
    filled: list[int]  # entries used of its line, per cache group
    prompt: list[int]  # kept only when prompt logprobs were asked for
    last: int = 0  # the token sampled last: the next step's, when that was scheduled before it was known


class Slots:
    """Lines of the block tables, by sequence id."""

    def __init__(self, arrays: StepArrays, max_rows: int) -> None:
        self._tables = arrays.block_tables
        self._free = list(range(max_rows))[::-1]
        self._slots: dict[int, Slot] = {}

    def __getitem__(self, seq_id: int) -> Slot:
        return self._slots[seq_id]

    def admit(self, new: NewSeq) -> Slot:
        """Give a sequence a line that holds the blocks it starts with."""
        prompt = new.token_ids[: new.prompt_len] if new.params.prompt_logprobs is not None else []
        slot = Slot(self._free.pop(), [0] * len(self._tables), list(prompt))
        self._slots[new.seq_id] = slot
        self.append(slot, new.blocks)
        return slot

    def append(self, slot: Slot, blocks: tuple[list[int], ...]) -> None:
        """Append block ids to a sequence's line of each group's table."""
        for group, ids in enumerate(blocks):
            if ids:
                start = slot.filled[group]
                self._tables[group][slot.line, start : start + len(ids)] = ids
                slot.filled[group] = start + len(ids)

    def release(self, seq_id: int) -> Slot | None:
        """Take the line back; None when the sequence never had one."""
        slot = self._slots.pop(seq_id, None)
        if slot is not None:
            self._free.append(slot.line)
        return slot


def fill_rows(arrays: StepArrays, slots: Slots, scheduled: list[ScheduledSeq]) -> tuple[int, list[int]]:
    """Write a step's rows into the arrays, in order.

    Returns the number of tokens, and for each position whose logits are wanted its row (an index into scheduled);
    arrays.logit_rows names those positions' tokens: the last of each row that samples, and one more for each draft.
    """
    start = 0
    sampling: list[int] = []
    for row, item in enumerate(scheduled):
        slot = slots[item.seq_id]
        slots.append(slot, item.new_blocks)
        arrays.slots[row] = slot.line
        arrays.query_start[row] = start
        count = len(item.token_ids)
        if count == 1:
            token = item.token_ids[0]
            arrays.token_ids[start] = slot.last if token == NEXT_TOKEN else token
            arrays.positions[start] = item.start
        else:
            arrays.token_ids[start : start + count] = item.token_ids
            arrays.positions[start : start + count] = range(item.start, item.start + count)
        start += count
        if item.sample:
            for token in range(start - 1 - item.drafts, start):
                arrays.logit_rows[len(sampling)] = token
                sampling.append(row)
    arrays.query_start[len(scheduled)] = start
    return start, sampling
