"""Speculation in the step loop: what became of the last drafts, and which ones the next step runs."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple, TypeVar

from quire.answers import RowDrafts
from quire.draft_paths import draft_depths
from quire.speculate.allotment import Allotment
from quire.speculate.proposer import DraftTree, FeatureProposer, Offer, Proposer, Room, WatchingProposer
from quire.speculate.rests import Rests
from quire.speculate.step_costs import median
from quire.types import DRAFT, NewSeq, ScheduledSeq, SchedulerOutput, StepOutput

_log = logging.getLogger("quire")
T = TypeVar("T")

_COLD = 2  # steps with drafts whose code is not in memory yet: they say nothing of costs
_WEIGHED = 64  # while nothing is looked for, one of so many steps is weighed
# Of the time, at most, in watching for what begins; one of so many steps is watched in any case; the median of so many
# watches counts.
_WATCHED, _RARELY, _WATCHES = 0.01, 16, 3
_TIMED = 64  # answers whose computing time is measured, after one that was late


class Drafts(NamedTuple):
    """What became of the drafts of a step."""

    drafted: int
    accepted: int


NO_DRAFTS = Drafts(0, 0)


class Speculation:
    """Runs a proposer for an engine of up to `max_rows` sequences over `vocab` tokens: up to `most` drafts a step, up
    to `depth` of them for a sequence.

    After a step it asks for as many drafts of each sequence as are worth it; those that the scheduler has room for are
    made just before the next step runs. Where there are none it rests (see Rests), and a step costs next to nothing.
    Sequences for which the proposer fails go on without drafts.

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
        self._watching = proposer if isinstance(proposer, WatchingProposer) else None
        self._predicted, self._everyone = predicted, everyone
        self._allotment = Allotment(most, max_rows, proposer.GRADES, proposer.passes)
        # Of sequences that the proposer knows: their texts, which grow, and how many tokens of them it knows.
        self._following: dict[int, list[int]] = {}
        self._told: dict[int, int] = {}
        self._predicting: set[int] = set()  # those of them with a prediction
        self._offers: dict[int, Offer] = {}  # the last one of each sequence
        self.longest = depth  # drafts for a sequence that are allowed now
        self._rests = Rests()
        self._drafting = False  # rows of this step have places for drafts
        self._logged = False
        self.last = NO_DRAFTS
        self.rows = self.drafted = self.faults = 0  # rows with drafts
        self.accepted = [0] * depth  # by position in the row
        self.chosen = [0] * (most + 1)  # rows by their drafts
        self.seconds_won = 0.0  # by steps with drafts, as far as the costs of others are known
        self._idle = self._idled = self._unweighed = 0  # steps: to come that idle, and passed
        self._watches = deque[float](maxlen=_WATCHES)  # seconds
        self._timed = 0  # answers to come
        self._looking = self._making = 0.0  # seconds for the drafts of a step: to choose them, to make them
        self._in_passes = 0.0  # seconds of passes, in making them
        self._kept = 0.0  # seconds in which features were taken since the last look, which it must pay, too
        self._cold = _COLD

    def idles(self, out: SchedulerOutput, drafts: int) -> bool:
        """Count a step with so many drafts, unless it needs `fill` and `advance`."""
        if drafts or out.new or out.gone or not (self._idle or not self._following):
            return False
        self.last = NO_DRAFTS
        self._idle -= self._idle > 0
        self._idled += 1
        return True

    def fill(self, out: SchedulerOutput, text_of: Callable[[int], list[int]]) -> None:
        """Make the drafts of a step that is about to run; rows for which there are none lose them.

        `text_of` has the tokens of a sequence that runs, in a list that grows with it.
        """
        self._rests.idled(self._idled)
        self._unweighed += 1 + self._idled
        self._idle = self._idled = 0
        begun = time.perf_counter()
        for seq_id in out.gone:
            if seq_id in self._following:
                self._extend(seq_id, [])
            self._forget(seq_id)
        for new in out.new:
            # Mirostat needs each token before the next.
            if new.speculate and (self._everyone or new.prediction) and not new.params.mirostat:
                self._start(new, text_of)
        rows = [row for row in out.scheduled if row.logits > 1]
        self._drafting = bool(rows)
        started, passes = time.perf_counter(), self.proposer.passes
        if self._features is not None:
            self._kept += started - begun
        if not rows:
            return
        before = passes.seconds if passes else 0.0
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
        self._making = time.perf_counter() - started
        self._in_passes = passes.seconds - before if passes else 0.0

    def advance(self, out: SchedulerOutput, result: StepOutput, seconds: float) -> None:
        """Take in a step that took so long and its result, and ask for drafts of the next one."""
        started = time.perf_counter()
        if not self._following:
            self.last = NO_DRAFTS
        elif self._drafting or self._is_due(out, result):
            if self._features is not None:
                self._kept += time.perf_counter() - started
            self._look_around(out, result, seconds)
        else:
            self.last = NO_DRAFTS
            if self._looking:
                result.seconds["drafts"], self._looking = self._looking, 0.0
            if self._unweighed >= _WEIGHED and not _has_prompts(out):
                self._allotment.observe_step(out.num_tokens, seconds)
                self._unweighed = 0
            self._idle = self._pause(len(out.scheduled), started)
            if self._features is not None:
                self._kept += time.perf_counter() - started

    def _pause(self, rows: int, started: float) -> int:
        """Steps to come in which there is nothing to do."""
        rests, features = self._rests, self._features
        if features is not None and features.KEPT and not rests.resting:
            if rests.quiet() <= features.KEPT or self._predicting:
                return 0
            self._give_up()
        if rests.resting or self._watching is None:
            return min(rests.quiet(), _WEIGHED)
        if not rests.may_look():
            return min(rests.quiet(seeing=True), _WEIGHED)
        self._watches.append(time.perf_counter() - started)
        step = self._allotment.costs.seconds(rows)
        return min(int(median(self._watches) / (_WATCHED * step)), _RARELY) if step else 0

    def _is_due(self, out: SchedulerOutput, result: StepOutput) -> bool:
        """Whether to look for drafts after a step without any."""
        rests, watching = self._rests, self._watching
        due = rests.step()
        if rests.resting:
            return False
        if self._features is not None and (due or self._features.KEPT):
            self._show(out, result)
        if watching is None:
            return due
        if not rests.may_look():
            return False
        self._tell(out, result)
        known = [row.seq_id for row in out.scheduled if row.seq_id in self._following]
        return bool(self._try(known, lambda: watching.sees(known)))

    def _look_around(self, out: SchedulerOutput, result: StepOutput, seconds: float) -> None:
        if self._drafting:
            self._show(out, result)  # for which passes over prompts may run: no part of the look
        started = time.perf_counter()
        if self._drafting or self._watching is None:  # else it has watched
            self._tell(out, result)
        places: dict[int, int] = {}  # rows of the sequences that the proposer follows
        rows, drafted, accepted = 0, 0, 0
        for i, row in enumerate(out.scheduled):
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
        if not _has_prompts(out):
            self._weigh(out, seconds)
        result.seconds["drafts"], self._making = self._looking + self._making, 0.0
        allowed = self.longest > 0
        asked = bool(places) and allowed and not self._rests.resting and self._ask(places, result, rows)
        self._looking = time.perf_counter() - started
        if places and not asked and (self._allotment.declined or not allowed):
            self._rests.looked(self._looking + self._kept, self._allotment.costs.seconds(rows))
        self._kept = 0.0

    def _tell(self, out: SchedulerOutput, result: StepOutput) -> None:
        """Let the proposer take in all tokens of the rows of a step."""
        for row, tokens in zip(out.scheduled, result.token_ids, strict=True):
            if tokens and row.seq_id in self._following:
                self._extend(row.seq_id, tokens)

    def _extend(self, seq_id: int, tokens: list[int]) -> None:
        """Let the proposer take in what it missed of a text, and the tokens after it."""
        told = self._told[seq_id]
        if added := self._following[seq_id][told:] + tokens:
            self._told[seq_id] = told + len(added)
            self._try([seq_id], lambda: self.proposer.extend(seq_id, added))

    def _ask(self, places: Mapping[int, int], result: StepOutput, rows: int) -> bool:
        """Ask for drafts of the sequences in these rows. Returns whether there are any."""
        shared = self._shared(places, rows)
        if self.longest < self._depth:
            most = self.longest
            cut = {each: Room(min(room.drafts, most), min(room.depth, most)) for each, room in shared.items()}
            shared = cut
        for seq_id, room in shared.items():
            result.drafts[places[seq_id]] = [DRAFT] * room.drafts
            if self._offers[seq_id].depth:
                result.depths[places[seq_id]] = room.depth
        return bool(shared)

    def _show(self, out: SchedulerOutput, result: StepOutput) -> None:
        """Let the proposer take what a step left."""
        features = self._features
        if features is not None and out.scheduled:
            self._try(self._following, lambda: features.ran(out.scheduled, result.token_ids))

    def _weigh(self, out: SchedulerOutput, seconds: float) -> None:
        """Take in what a step without prompts cost."""
        rows, allotment = len(out.scheduled), self._allotment
        if self.last.drafted and (plain := allotment.costs.seconds(rows)):
            won = plain / rows * (rows + self.last.accepted) - seconds - self._looking
            self.seconds_won += won
            if self._cold:
                self._cold -= 1
                return
            allotment.observe_extra(self._looking + self._making - self._in_passes)
            if self._rests.won(won / plain) and self._features is not None:
                self._give_up()
        allotment.observe_step(out.num_tokens, seconds - self._making)

    def _give_up(self) -> None:
        """Features that nobody takes cannot be had later: sequences that run meanwhile go on without drafts."""
        for seq_id in list(self._following):
            self._forget(seq_id)

    def _shared(self, places: Mapping[int, int], rows: int) -> dict[int, Room]:
        """How many drafts each sequence is to get."""
        started = self._computing()
        offers = self._try(places, lambda: self.proposer.look(places, self._depth))
        if offers is None or self._is_late(places, started):
            return {}
        self._offers.update(offers)
        if self._rests.passed > 1:
            self._allotment.skipped(self._rests.passed - 1)
        self._rests.passed = 0
        return self._allotment.share(rows, offers)

    def _propose(self, rooms: Mapping[int, Room]) -> Mapping[int, list[int] | DraftTree]:
        started = self._computing()
        made = self._try(rooms, lambda: self.proposer.propose(rooms))
        return {} if made is None or self._is_late(rooms, started) else made

    def _computing(self) -> tuple[float, float]:
        """The clock, and after a late answer what this thread has computed, which takes much longer to ask."""
        self._timed -= self._timed > 0
        return time.perf_counter(), time.thread_time() if self._timed else 0.0

    def _is_late(self, seq_ids: Iterable[int], started: tuple[float, float]) -> bool:
        """Whether the proposer took too long. If it computed for so long, others not having had the processor, in
        a second late answer, these sequences go on without drafts.
        """
        most, (clock, computed) = self.proposer.MOST_SECONDS, started
        if time.perf_counter() - clock <= most:
            return False
        if self._timed and time.thread_time() - computed > most:
            self._fault(seq_ids, f"it took longer than {most:g} s")
        self._timed = _TIMED
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

    def _start(self, new: NewSeq, text_of: Callable[[int], list[int]]) -> None:
        if new.prediction:
            self._rests.end()
        features, rests = self._features, self._rests
        if features is not None and (rests.resting or 0 < features.KEPT < rests.quiet()):
            return
        if new.prediction:
            self._predicting.add(new.seq_id)
        self._following[new.seq_id], self._told[new.seq_id] = text_of(new.seq_id), len(new.token_ids)
        self._allotment.start(new.seq_id)
        self._try([new.seq_id], lambda: self.proposer.start(new))

    def _forget(self, seq_id: int) -> None:
        for known in (self._following, self._told, self._offers):
            known.pop(seq_id, None)
        self._predicting.discard(seq_id)
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


def _has_prompts(out: SchedulerOutput) -> bool:
    return any(len(row.token_ids) - row.drafts > 1 for row in out.scheduled)


def _first_right(parents: tuple[int, ...], path: list[int]) -> list[bool]:
    """For each draft that had others behind it, from the last known token along the path that was right: whether the
    first of these was."""
    firsts: dict[int, int] = {}
    for draft, parent in enumerate(parents, 1):
        firsts.setdefault(parent, draft)
    return [firsts[at] == then for at, then in zip([0, *path], [*path, 0], strict=True) if at in firsts]
