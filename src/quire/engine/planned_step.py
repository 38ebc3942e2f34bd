"""A step between its schedule and its result, and what may run beside it."""

from __future__ import annotations

from quire.core.cost_model import StepFeatures
from quire.core.sequence import Sequence
from quire.core.step_plan import Flight, StepCounts
from quire.records import dataclass
from quire.types import ScheduledSeq, SchedulerOutput


@dataclass(slots=True)
class PlannedStep:
    """A scheduled step, with what the scheduler knows of it. `flight` has its rows, None if it has none. `begun`: the
    worker has begun it."""

    out: SchedulerOutput
    flight: Flight | None
    counts: StepCounts
    features: StepFeatures
    drafts: int
    begun: bool = False

    @property
    def alone(self) -> bool:
        """Whether no other step runs beside this one: it moves or copies blocks, has drafts or soft tokens of a prompt,
        or its head runs for prompt logprobs, too."""
        if self.out.moves or self.out.copies or self.flight is None:
            return True
        return any(
            row.prompt_logprobs or row.drafts or has_soft_tokens(row, seq)
            for row, seq in zip(self.flight.rows, self.flight.seqs, strict=True)
        )

    def text_of(self, seq_id: int) -> list[int]:
        """The tokens of a sequence of the step: its own list, to which each step adds."""
        assert self.flight is not None
        return next(seq.tokens for seq in self.flight.seqs if seq.seq_id == seq_id)

    def may_run_beside(self, before: PlannedStep) -> bool:
        """Whether the worker may begin this step before the end of the one before it, of which no sequence may have
        gone: the worker would forget it."""
        return not self.alone and {row.seq_id for row in before.out.scheduled}.isdisjoint(self.out.gone)


def has_soft_tokens(row: ScheduledSeq, seq: Sequence) -> bool:
    """Whether a row runs some of the soft tokens of its prompt."""
    spans, end = seq.state.request.soft_tokens, row.start + len(row.token_ids)
    return bool(spans) and any(span.start < end and row.start < span.end for span in spans)
