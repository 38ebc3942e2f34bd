"""Speculation in the step loop: what became of the last drafts, and which ones the next step runs."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple, TypeVar

from quire.answers import RowDrafts
from quire.speculate.allotment import Allotment
from quire.speculate.proposer import DraftTree, FeatureProposer, Offer, Proposer, Room
from quire.types import DRAFT, NewSeq, ScheduledSeq, SchedulerOutput, StepOutput, draft_depths

_log = logging.getLogger("quire")
T = TypeVar("T")


def _now() -> tuple[float, float]:
    """Of the clock, and of this thread's computing."""
    return time.perf_counter(), time.thread_time()


class Drafts(NamedTuple):
    """What became of the drafts of a step."""

    drafted: int
    accepted: int


NO_DRAFTS = Drafts(0, 0)


class Speculation:
    """Runs a proposer for an engine of up to `max_rows` sequences over `vocab` tokens: up to `most` drafts a step, up
    to `depth` of them for a sequence.

    After a step it asks for as many drafts of each sequence as are worth it; those that the scheduler has room for are
    made just before the next step runs. Sequences for which the proposer fails go on without drafts.

    Grades below `predicted` are those of predictions. Unless it is for `everyone`, the proposer has drafts only for
    sequences with a prediction.
    """

    def __init__(
        self,
        proposer: Proposer,
        *,
        vocab: int,
        max_rows: int,
        most: int,
        depth: int,
        predicted: int = 0,
        everyone: bool = True,
    ) -> None:
        self.proposer, self._vocab, self._depth = proposer, vocab, depth
        # Found once: to ask whether an object has a protocol takes longer than a step's drafts.
        self._features = proposer if isinstance(proposer, FeatureProposer) else None
        self._predicted, self._everyone = predicted, everyone
        self._allotment = Allotment(most, max_rows, proposer.GRADES, proposer.passes)
        self._following: set[int] = set()  # sequences that the proposer knows
        self._offers: dict[int, Offer] = {}  # the last one of each sequence
        self._logged = False
        self.last = NO_DRAFTS
        self.rows = self.drafted = self.faults = 0  # rows with drafts
        self.accepted = [0] * depth  # by position in the row
        self.chosen = [0] * (most + 1)  # rows by their drafts
        self.seconds_won = 0.0  # by steps with drafts, as far as the costs of others are known
        self._spent = 0.0  # seconds for the drafts of a step

    def fill(self, out: SchedulerOutput) -> None:
        """Make the drafts of a step that is about to run; rows for which there are none lose them."""
        for seq_id in out.gone:
            self._forget(seq_id)
        for new in out.new:
            if self._everyone or new.prediction:
                self._start(new)
        rows = [row for row in out.scheduled if row.logits > 1]
        if not rows:
            return
        rooms = {
            row.seq_id: Room(row.drafts, row.depth or row.drafts)
            for row in rows
            if row.seq_id in self._following
        }
        made = self._propose(rooms) if rooms else {}
        for row in rows:
            drafts, parents = self._fit(row, made.get(row.seq_id, []))
            row.token_ids[len(row.token_ids) - row.drafts :] = drafts
            row.logits, row.parents = 1 + len(drafts), parents or None

    def advance(self, out: SchedulerOutput, result: StepOutput) -> None:
        """Take in a step and its result, and ask for drafts of the next one."""
        if not self._following:
            self.last = NO_DRAFTS
            return
        self._show(out, result)
        places: dict[int, int] = {}  # rows of the sequences that the proposer follows
        prompts, rows, drafted, accepted = False, 0, 0, 0
        for i, row in enumerate(out.scheduled):
            prompts = prompts or len(row.token_ids) - row.drafts > 1
            if row.drafts:
                became = self._count(row, result.token_ids[i])
                drafted += became.drafted
                accepted += became.accepted
                if result.token_ids[i]:
                    result.drafted[i] = became
            if result.token_ids[i] and i not in result.complete:
                rows += 1
                if row.seq_id in self._following:
                    places[row.seq_id] = i
        self.last = Drafts(drafted, accepted)
        if not prompts:
            self._weigh(out, sum(result.seconds.values()))
        result.seconds["drafts"], self._spent = self._spent, 0.0
        if places:
            for seq_id, room in self._shared(places, result, rows).items():
                result.drafts[places[seq_id]] = [DRAFT] * room.drafts
                if self._offers[seq_id].depth:
                    result.depths[places[seq_id]] = room.depth

    def _show(self, out: SchedulerOutput, result: StepOutput) -> None:
        """Let the proposer take what a step left."""
        features = self._features
        if features is not None and out.scheduled:
            self._try(self._following, lambda: features.ran(out.scheduled, result.token_ids))

    def _weigh(self, out: SchedulerOutput, seconds: float) -> None:
        """Take in what a step without prompts cost."""
        rows, costs = len(out.scheduled), self._allotment.costs
        if self.last.drafted and (plain := costs.seconds(rows)):
            self.seconds_won += plain / rows * (rows + self.last.accepted) - seconds - self._spent
        self._allotment.observe_step(out.num_tokens, seconds)

    def _shared(self, places: Mapping[int, int], result: StepOutput, rows: int) -> dict[int, Room]:
        """How many drafts each sequence is to get."""
        started = _now()
        offers = self._try(places, lambda: self._looked(places, result))
        if offers is None or self._is_slow(places, started):
            return {}
        self._offers.update(offers)
        return self._allotment.share(rows, offers)

    def _propose(self, rooms: Mapping[int, Room]) -> Mapping[int, list[int] | DraftTree]:
        started = _now()
        made = self._try(rooms, lambda: self.proposer.propose(rooms))
        return {} if made is None or self._is_slow(rooms, started) else made

    def _is_slow(self, seq_ids: Iterable[int], started: tuple[float, float]) -> bool:
        """Whether the proposer computed for too long. Time in which others had the processor does not count."""
        most, (wall, computing) = self.proposer.MOST_SECONDS, _now()
        self._spent += wall - started[0]
        if computing - started[1] <= most:
            return False
        self._fault(seq_ids, f"it took longer than {most:g} s")
        return True

    def _fit(self, row: ScheduledSeq, made: list[int] | DraftTree) -> tuple[list[int], tuple[int, ...]]:
        """The drafts of a row, and for a tree their parents, as far as there is room for it; none if they are wrong."""
        parents: tuple[int, ...] = ()
        most = row.depth or row.drafts  # of a chain
        if isinstance(made, DraftTree):
            if not made.is_tree():
                self._fault([row.seq_id], "the drafts are no tree")
                return [], ()
            tree, most = made.within(row.drafts, row.depth), row.drafts
            drafts, parents = tree.token_ids, tree.parents
            if parents == tuple(range(len(parents))):
                parents = ()  # a chain
        else:
            drafts = made
        if len(drafts) > most:
            self._fault([row.seq_id], f"{len(drafts)} drafts where {most} were asked for")
        elif not all(0 <= token < self._vocab for token in drafts):
            self._fault([row.seq_id], f"a draft is not below the vocabulary size {self._vocab}")
        else:
            return drafts, parents
        return [], ()

    def _count(self, row: ScheduledSeq, tokens: list[int]) -> RowDrafts:
        """Note what became of the drafts of a row."""
        count, accepted = row.drafts, row.right(tokens)
        self.rows += 1
        self.drafted += count
        self.chosen[count] += 1
        for position in range(accepted):
            self.accepted[position] += 1
        offer = self._offers.get(row.seq_id)
        grade = self._predicted if offer is None else offer.grade
        if tokens and row.seq_id in self._following:
            if offer is not None and offer.grows and row.parents is not None:
                right = _first_right(row.parents, row.path(tokens))
            else:
                deep = count if row.parents is None else max(draft_depths(row.parents))
                right = [place < accepted for place in range(min(accepted + 1, deep))]
            self._allotment.observe(row.seq_id, grade, right)
        return RowDrafts(count, accepted, grade < self._predicted)

    def _try(self, seq_ids: Iterable[int], ask: Callable[[], T]) -> T | None:
        """What the proposer answers; None where it raises: these sequences then go on without drafts."""
        try:
            return ask()
        except Exception as error:
            self._fault(seq_ids, f"{type(error).__name__}: {error}")
            return None

    def _looked(self, places: Mapping[int, int], result: StepOutput) -> dict[int, Offer]:
        for seq_id, i in places.items():
            self.proposer.extend(seq_id, result.token_ids[i])
        return self.proposer.look(places, self._depth)

    def _start(self, new: NewSeq) -> None:
        self._following.add(new.seq_id)
        self._allotment.start(new.seq_id)
        self._try([new.seq_id], lambda: self.proposer.start(new))

    def _forget(self, seq_id: int) -> None:
        self._following.discard(seq_id)
        self._offers.pop(seq_id, None)
        self._allotment.stop(seq_id)
        self._try((), lambda: self.proposer.stop(seq_id))

    def _fault(self, seq_ids: Iterable[int], why: str) -> None:
        """Count a fault of each sequence, which goes on without drafts; without any, of the proposer."""
        gone = list(seq_ids)
        self.faults += max(1, len(gone))
        if not self._logged:
            self._logged = True
            _log.warning("speculation: drafts failed, and their sequences go on without: %s", why)
        for seq_id in gone:
            self._forget(seq_id)


def _first_right(parents: tuple[int, ...], path: list[int]) -> list[bool]:
    """For each draft that had others behind it, from the last known token along the path that was right: whether the
    first of these was."""
    firsts: dict[int, int] = {}
    for draft, parent in enumerate(parents, 1):
        firsts.setdefault(parent, draft)
    return [firsts[at] == then for at, then in zip([0, *path], [*path, 0], strict=True) if at in firsts]
