"""Sequences that resumed: they are not preempted again before they have got further than they were.

What each still needs to get there is kept from the others. Otherwise a sequence that is computed again over many steps
would lose its blocks to those that decode meanwhile, again and again.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from quire.core.guided_pairs import halves
from quire.core.policy import displaces
from quire.core.sequence import Sequence, Status
from quire.core.sequence_blocks import SequenceBlocks


class Resumed:
    """Running sequences that were preempted and have not got further since."""

    def __init__(self, blocks: SequenceBlocks) -> None:
        self._blocks = blocks
        self._seqs: list[Sequence] = []

    def __bool__(self) -> bool:
        return bool(self._seqs)

    def look(self) -> None:
        """Let go of those that ended, or got further."""
        running = Status.RUNNING
        self._seqs = [seq for seq in self._seqs if seq.status is running and seq.computed <= seq.reached]

    def clear(self) -> None:
        """Let all of them be preempted."""
        self._seqs = []

    def started(self, seq: Sequence) -> None:
        """A sequence runs, perhaps again."""
        if seq.preemptions:
            self._seqs.append(seq)

    def preempted(self, seq: Sequence) -> None:
        """A sequence is about to give everything back."""
        seq.reached = max(seq.reached, seq.computed)
        if seq in self._seqs:
            self._seqs.remove(seq)

    def kept(self, seq: Sequence) -> int:
        """Blocks that they need, but for `seq` and the other of its pair."""
        if not self._seqs:
            return 0
        others = [other for other in self._seqs if other is not seq and other is not seq.partner]
        return sum([self._blocks.outstanding(other, other.computed) for other in others])

    def guards(self, seq: Sequence) -> bool:
        """Whether a sequence, or the other of its pair, may not be preempted."""
        return bool(self._seqs) and any(half in self._seqs for half in halves(seq, Status.RUNNING))

    def last_to_give(
        self, running: Seq[Sequence], seq: Sequence, tenant: str | None = None
    ) -> Sequence | None:
        """The last in rank that may be preempted for a running sequence, perhaps itself; None if it has to wait."""
        for victim in reversed(running):
            guarded = self.guards(victim)
            if victim is seq or victim is seq.partner:
                return None if guarded else victim
            if not guarded and (tenant is None or victim.state.tenant == tenant):
                return victim
        return None

    def first_to_yield(self, running: Seq[Sequence], seq: Sequence) -> Sequence | None:
        """The running sequence that gives way first to a waiting one of a more urgent level; None if none does."""
        for victim in reversed(running):
            if not displaces(seq, victim):
                return None
            if not self.guards(victim):
                return victim
        return None

    def would_free(self, running: Seq[Sequence], seq: Sequence, short: int, places: int) -> tuple[bool, bool]:
        """Whether a waiting sequence would be alone if all that gives way to it did, and whether some of these would
        free so many blocks and places.

        Blocks shared by several of them are counted more than once: rarely, a preemption is in vain.
        """
        alone = True
        for victim in reversed(running):
            if not displaces(seq, victim):
                return False, False
            if self.guards(victim):
                alone = False
                continue
            places -= 1
            short -= len(victim.table.live()) + self._blocks.num_groups
            if short <= 0 and places <= 0:
                return False, True
        return alone, False
