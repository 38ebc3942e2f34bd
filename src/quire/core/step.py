"""One step: in the making, as it is sent to the worker, and its result checked and read."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import NamedTuple

from quire.core.sequence import Sequence
from quire.logprobs import LogprobTable
from quire.types import FinishReason, NewSeq, ScheduledSeq, SchedulerOutput, SeqEvent, StepOutput


@dataclass(frozen=True, slots=True)
class StepCounts:
    """What a step holds, for its StepRecord. Decode tokens are those of rows of a single token past the prompt, and
    drafts."""

    prefill_tokens: int = 0
    decode_tokens: int = 0
    context_tokens: int = 0  # keys that each row's last token can see, summed, windows left aside
    preempted: int = 0


@dataclass(slots=True)
class StepPlan:
    """A step in the making. `seqs[i]` is the sequence of `rows[i]`; `ahead` are the rows of a step that still runs."""

    budget: int  # tokens not yet handed out
    ahead: Mapping[Sequence, ScheduledSeq]
    rows: list[ScheduledSeq] = field(default_factory=list)
    seqs: list[Sequence] = field(default_factory=list)
    new: list[NewSeq] = field(default_factory=list)
    owed: int = 0  # blocks that its sequences still lack for the tokens they know
    context: int = 0
    decode: int = 0
    preempted: int = 0

    def counts(self, max_num_batched_tokens: int) -> StepCounts:
        """Of the step before drafts are added."""
        tokens = max_num_batched_tokens - self.budget
        return StepCounts(tokens - self.decode, self.decode, self.context, self.preempted)


class Flight(NamedTuple):
    """A step that was scheduled and has not been given to `update`. Row i is of seqs[i]."""

    step: int
    rows: list[ScheduledSeq]
    seqs: list[Sequence]


@dataclass(frozen=True, slots=True)
class Blocked:
    """The first in the queue, and how many blocks it lacked room for when last looked at."""

    seq: Sequence
    needs: int
    until: int  # step at which to look again in any case: it may find more of its prefix by then


def new_seq(seq: Sequence) -> NewSeq:
    """What the worker is told of a sequence that starts, or starts again. Shares no list with it."""
    return NewSeq(
        seq_id=seq.seq_id,
        token_ids=list(seq.tokens),
        prompt_len=seq.prompt_len,
        params=seq.state.request.params,
        sample_index=seq.sample_index,
        seed=seq.seed,
        blocks=tuple(list(blocks) for blocks in seq.table.blocks),
        stop_ids=tuple(sorted(seq.stop_ids)),
        request_id=seq.state.request.request_id,
        soft_tokens=seq.state.request.soft_tokens,
    )


def final_event(seq: Sequence, reason: FinishReason) -> SeqEvent:
    """The last event of a sequence that ends without new tokens."""
    request_id, cached = seq.state.request.request_id, seq.state.cached_tokens
    return SeqEvent(request_id, seq.sample_index, [], None, None, reason, cached_tokens=cached)


def check_result(out: SchedulerOutput, seqs: Seq[Sequence], result: StepOutput) -> None:
    """Raise ValueError when a worker's result does not fit the step it was given."""
    rows = out.scheduled
    if not len(rows) == len(result.token_ids) == len(result.logprobs) == len(result.prompt_logprobs):
        raise ValueError(f"step {out.step} has {len(rows)} rows, its result does not")
    if [not tokens for tokens in result.token_ids] != [not row.logits for row in rows]:
        for i, row in enumerate(rows):
            if bool(result.token_ids[i]) != row.sample and i not in result.failed:
                raise ValueError(f"row {i} should {'' if row.sample else 'not '}have sampled a token")
    for i in [i for i, row in enumerate(rows) if row.prompt_logprobs]:
        made, wanted = result.prompt_logprobs[i], _prompt_end(seqs[i], rows[i]) - rows[i].start
        if i not in result.failed and (made is None or len(made) != wanted):
            raise ValueError(f"row {i} should have the prompt logprobs of {wanted} positions")


def check_stepwise(seqs: Seq[Sequence], result: StepOutput) -> None:
    """Raise ValueError when a sequence that may be in two steps at once was given drafts or several tokens."""
    for i, seq in enumerate(seqs):
        if (i in result.drafts or len(result.token_ids[i]) > 1) and not seq.state.request.stepwise:
            raise ValueError(f"row {i} has drafts or several tokens, and its request is not stepwise")


def take_drafts(out: SchedulerOutput, seqs: Seq[Sequence], result: StepOutput) -> None:
    """Keep the drafts that a step proposed.

    Raises ValueError when tokens were accepted after a draft that was not: the cache holds others there.
    """
    for i, row in enumerate(out.scheduled):
        drafts = row.token_ids[len(row.token_ids) - row.drafts :]
        before = result.token_ids[i][:-1][: row.drafts]
        if before != drafts[: len(before)]:
            raise ValueError(f"row {i} accepted {result.token_ids[i]}, its drafts were {drafts}")
    for i, proposed in result.drafts.items():
        seqs[i].drafts = proposed


def take_prompt_logprobs(seq: Sequence, row: ScheduledSeq, made: LogprobTable | None) -> LogprobTable:
    """The entries of a row that were not delivered before a preemption; they count as delivered now."""
    first = seq.prompt_logprobs_from
    seq.prompt_logprobs_left = seq.prompt_len - 1 - _prompt_end(seq, row)
    table = LogprobTable() if made is None else made
    return table[first - row.start :] if first > row.start else table


def _prompt_end(seq: Sequence, row: ScheduledSeq) -> int:
    """Past the last position of the row whose next token is a prompt token."""
    return min(row.start + len(row.token_ids), seq.prompt_len - 1)
