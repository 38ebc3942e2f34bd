"""What proposes drafts: guesses at the next tokens of running sequences. No guess changes a text, only its speed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from quire.draft_paths import draft_depths
from quire.records import dataclass
from quire.speculate.step_costs import PassCosts
from quire.types import NewSeq, ScheduledSeq


@dataclass(frozen=True, slots=True)
class DraftTree:
    """Drafts that are a tree; `parents` as in ScheduledSeq."""

    token_ids: list[int]
    parents: tuple[int, ...]

    def is_tree(self) -> bool:
        """Whether each draft follows one before it."""
        return len(self.parents) == len(self.token_ids) and all(
            0 <= parent <= i for i, parent in enumerate(self.parents)
        )

    def depths(self) -> list[int]:
        """Of each draft: 1 behind the last known token."""
        return draft_depths(self.parents)[1:]

    def within(self, count: int, depth: int) -> DraftTree:
        """The first drafts that are at most so deep, at most so many."""
        kept = [i for i, deep in enumerate(self.depths()) if deep <= depth][:count]
        number = {draft + 1: new for new, draft in enumerate(kept, 1)}
        parents = tuple(number.get(self.parents[i], 0) for i in kept)
        return DraftTree([self.token_ids[i] for i in kept], parents)


class Offer(NamedTuple):
    """What a proposer has for a sequence: up to `length` drafts. Acceptance is counted by `grade`, from 0 up, so that
    good guesses and poor ones of a sequence are told apart. `behind` are the tokens that a pass computes before the
    first draft; those missed earlier count by their share of the steps to come; 0: no pass is needed. `backlog` are all
    of these tokens, where they are more.

    With a `depth` the drafts will be a tree, with at most so many in a row: all of it or nothing, unless there are
    `siblings`. Then it has as many drafts as are worth it. `siblings` are the chances of a second draft in a place, a
    third and so on, if those before it are wrong. Up to `spread` drafts of each depth, the likeliest, may have others
    behind them.
    """

    length: int
    grade: int
    behind: float = 1.0
    depth: int = 0
    siblings: tuple[float, ...] = ()
    spread: int = 1
    backlog: int = 0

    @property
    def grows(self) -> bool:
        """Whether it is for a tree that has as many drafts as are worth it."""
        return bool(self.siblings)


class Room(NamedTuple):
    """How many drafts a sequence gets, and how many of them in a row."""

    drafts: int
    depth: int


class Proposer(Protocol):
    """Knows the tokens of running sequences, by id, and guesses at those after them."""

    GRADES: int
    MOST_SECONDS: float  # that it may take for a step
    passes: PassCosts | None  # what drafts cost to make; None where nothing is computed for them

    def start(self, new: NewSeq) -> None:
        """Take in a sequence that starts or resumes."""

    def stop(self, seq_id: int) -> None:
        """Forget a sequence."""

    def extend(self, seq_id: int, tokens: list[int]) -> None:
        """Take in the tokens that a step added to a sequence."""

    def look(self, seq_ids: Iterable[int], most: int) -> dict[int, Offer]:
        """What there is for each of these sequences; one without an offer is left out. Cheap."""

    def propose(self, rooms: Mapping[int, Room]) -> Mapping[int, list[int] | DraftTree]:
        """Drafts for sequences that had an offer, as far as there is room; trees where it has a depth. Called when
        their next step is about to run, with blocks for the drafts."""


@runtime_checkable
class FeatureProposer(Proposer, Protocol):
    """A proposer that needs what steps of the target leave: of every step, and what up to KEPT of them left waits for a
    look. With a KEPT of 0 the step before a look is enough.
    """

    KEPT: int

    def ran(self, rows: Sequence[ScheduledSeq], added: Sequence[Sequence[int]]) -> None:
        """A step with these rows has run, and added tokens to each; what it left is there until the next one. Called
        before `extend`."""


@runtime_checkable
class WatchingProposer(Proposer, Protocol):
    """A proposer that sees at once whether it has something for a sequence, so that it is asked only then."""

    def sees(self, seq_ids: Iterable[int]) -> bool:
        """Whether there is an offer for one of these sequences."""
