"""One step: being assembled, as sent to the worker, and its result checked and read."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from collections.abc import Sequence as Seq
from dataclasses import field
from operator import add
from typing import NamedTuple

from quire.core.cached_prefix import Hit
from quire.core.cost_model import StepFeatures
from quire.core.scheduler_config import SchedulerConfig
from quire.core.sequence import Sequence
from quire.core.sequence_blocks import SequenceBlocks
from quire.logprobs import LogprobTable
from quire.records import dataclass
from quire.types import FinishReason, NewSeq, ScheduledSeq, SchedulerOutput, SeqEvent, StepOutput


class StepCounts(NamedTuple):
    """The contents of a step, for its StepRecord. Decode tokens are drafts and those of rows with a single token past
    the prompt.
    """

    prefill_tokens: int = 0
    decode_tokens: int = 0
    context_tokens: int = 0  # keys visible to the last token of each row, summed, ignoring windows
    preempted: int = 0

    def with_drafts(self, added: int, seen: int) -> StepCounts:
        """The counts with so many drafts more, which see so many keys."""
        decoded, context = self.decode_tokens + added, self.context_tokens + seen
        return self._replace(decode_tokens=decoded, context_tokens=context) if added else self


@dataclass(slots=True)
class StepPlan:
    """A step being assembled. `seqs[i]` is the sequence of `rows[i]`; `ahead` are the rows of a running step.
    `passed`: ids of sequences that decode in a later one."""

    budget: int  # tokens not yet spent
    ahead: Mapping[Sequence, ScheduledSeq]
    streams: int  # rows that decode, at most
    passed: Collection[int] = ()
    rows: list[ScheduledSeq] = field(default_factory=list)
    seqs: list[Sequence] = field(default_factory=list)
    new: list[NewSeq] = field(default_factory=list)
    owed: int = 0  # blocks that its sequences still need for their known tokens
    context: int = 0
    decode: int = 0
    preempted: int = 0
    usual: int = 0  # rows of one token that sample, without new blocks and logprobs of a prompt

    def add_usual(self, count: int, context: int) -> None:
        """Count so many such rows, of sequences of `context` tokens in all."""
        self.budget -= count
        self.decode += count
        self.context += context
        self.usual += count

    def take_out(self, seq: Sequence) -> ScheduledSeq | None:
        """Remove the row of a sequence that is preempted, and return it."""
        if seq not in self.seqs:
            return None
        index = self.seqs.index(seq)
        row = self.rows.pop(index)
        self.usual = 0  # it may have been one of them
        del self.seqs[index]
        end = row.start + len(row.token_ids)
        self.budget += len(row.token_ids)
        self.context -= end
        self.decode -= row.start >= seq.prompt_len and end == row.start + 1
        return row

    def counts(self, max_num_batched_tokens: int) -> StepCounts:
        """The counts of the step before drafts are added."""
        tokens = max_num_batched_tokens - self.budget
        return StepCounts(tokens - self.decode, self.decode, self.context, self.preempted)


def first_end(config: SchedulerConfig, seq: Sequence, hit: Hit, budget: int) -> int:
    """Where the first row of a waiting sequence may end; `hit.length` when it must wait for more budget."""
    remaining = len(seq.tokens) - hit.length
    if remaining > budget and not config.enable_chunked_prefill:
        # A prompt runs whole. It is split only if it outgrew the budget of any step before a preemption.
        most = config.max_num_batched_tokens - (seq.partner is not None)  # the other one has a row, too
        outgrew = seq.preemptions > 0 and remaining > most
        return hit.length + budget if outgrew else hit.length
    return hit.length + min(remaining, budget)


def features_of(step: StepPlan, counts: StepCounts, drafts: int, special: int) -> StepFeatures:
    """What core.cost_model goes by. `special` is the number of live requests with an adapter or a grammar."""
    context, work = counts.context_tokens, 0.0
    if counts.prefill_tokens:
        for row, seq in zip(step.rows, step.seqs, strict=True):
            tokens = len(row.token_ids)
            if tokens > 1 or row.start < seq.prompt_len:
                tokens -= row.drafts
                if tokens > 1 or row.start < seq.prompt_len:
                    work += tokens * (row.start + tokens / 2)
                    context -= row.start + tokens
    adapters = grammars = 0
    if special:
        asked = [seq.state.request for seq in step.seqs]
        adapters = sum([request.adapter != "" for request in asked])
        grammars = sum([request.grammar is not None for request in asked])
    decoded = counts.decode_tokens - drafts
    return (1.0, decoded, counts.prefill_tokens, max(0, context), work, adapters, grammars, drafts)


class Flight(NamedTuple):
    """A scheduled step that has not been passed to `update`. Row i belongs to seqs[i]. `usual`: all rows sample, and
    none has logprobs of a prompt."""

    step: int
    rows: list[ScheduledSeq]
    seqs: list[Sequence]
    usual: bool


@dataclass(frozen=True, slots=True)
class Blocked:
    """The first sequence of the queue, and how many blocks it lacked at the last attempt."""

    seq: Sequence
    needs: int
    until: int  # step at which to try again in any case: more of its prefix may be cached by then


def new_seq(seq: Sequence) -> NewSeq:
    """The message to the worker about a sequence that starts or resumes. It shares no list with the sequence."""
    request = seq.state.request
    return NewSeq(
        seq_id=seq.seq_id,
        token_ids=list(seq.tokens),
        prompt_len=seq.prompt_len,
        params=request.params,
        sample_index=seq.sample_index,
        seed=seq.seed,
        blocks=tuple(list(blocks) for blocks in seq.table.blocks),
        stop_ids=tuple(sorted(seq.stop_ids)),
        request_id=request.request_id,
        soft_tokens=request.soft_tokens,
        grammar=request.grammar,
        regions=request.regions,
        prediction=request.prediction,
        speculate=request.speculate,
        origin=(request.tenant, request.namespace),
        texts=request.texts,
        surprise=seq.surprise,
        adapter=request.adapter,
        prompt_embeds=request.prompt_embeds,
        leader=seq.partner.seq_id if seq.follows and seq.partner else None,
    )


def after(row: ScheduledSeq, seq: Sequence, *, takes_turns: bool) -> tuple[int, int]:
    """Where a sequence continues, and up to where, while its `row` still runs. Equal when it sits the next step out."""
    start = row.start + len(row.token_ids)
    if not row.sample:
        return start, len(seq.tokens)
    # One more token is being sampled. If it is the last one, there is nothing to compute after it.
    if takes_turns or row.drafts or seq.state.request.stepwise or start + 1 >= seq.limit:
        return start, start
    return start, start + 1


def add_drafts(step: StepPlan, blocks: SequenceBlocks, most: int) -> tuple[int, int]:
    """Add up to `most` drafts to rows from the remaining budget and blocks; no sequence waits or is preempted for
    drafts. Returns how many were added, and the keys that they see."""
    added, seen, left = 0, 0, min(step.budget, most)
    for row, seq in zip(step.rows, step.seqs, strict=True):
        if not seq.drafts or not row.sample:
            continue
        drafts, seq.drafts = seq.drafts, []
        if seq.partner is not None:
            continue
        known = row.start + len(row.token_ids)
        count = min(len(drafts), left - added)
        # The last token of a sequence is never computed. Draft blocks are those that its next tokens will need.
        end = min(
            known + min(seq.depth or count, count),
            seq.limit - 1,
            blocks.reachable_end(seq, blocks.room(seq)),
        )
        if (depth := end - known) <= 0:
            continue
        if seq.depth:
            row.depth = depth
        else:
            count = depth
        if end > seq.table.capacity:
            row.new_blocks = tuple(map(add, row.new_blocks, blocks.grow(seq, end)))
        row.token_ids += drafts[:count]
        row.logits += count
        added += count
        seen += depth
    return added, seen


def final_event(seq: Sequence, reason: FinishReason, pooled: bytes = b"") -> SeqEvent:
    """The last event of a sequence that ends without new tokens."""
    request_id, cached = seq.state.request.request_id, seq.state.cached_tokens
    return SeqEvent(request_id, seq.sample_index, [], None, None, reason, cached_tokens=cached, pooled=pooled)


def check_result(out: SchedulerOutput, seqs: Seq[Sequence], result: StepOutput, *, usual: bool) -> None:
    """Raise ValueError when the result of a worker does not fit its step; `usual` as in Flight."""
    rows = out.scheduled
    if not len(rows) == len(result.token_ids) == len(result.logprobs) == len(result.prompt_logprobs):
        raise ValueError(f"the result of step {out.step} does not have its {len(rows)} rows")
    if usual and all(result.token_ids):
        return
    if [not tokens for tokens in result.token_ids] != [not row.logits for row in rows]:
        for i, row in enumerate(rows):
            if (
                bool(result.token_ids[i]) != row.sample
                and i not in result.failed
                and i not in result.pooled
                and i not in result.late
            ):
                raise ValueError(f"row {i} should {'' if row.sample else 'not '}have sampled a token")
    scored = [row.prompt_logprobs for row in rows]
    for i in [i for i, wants in enumerate(scored) if wants] if True in scored else ():
        made = result.prompt_logprobs[i]
        wanted = _prompt_end(seqs[i], rows[i]) - _prompt_begin(seqs[i], rows[i])
        if i not in result.failed and (made is None or len(made) != wanted):
            raise ValueError(f"row {i} should have the prompt logprobs of {wanted} positions")


def check_stepwise(seqs: Seq[Sequence], result: StepOutput) -> None:
    """Raise ValueError when a sequence that may be in two steps at once got drafts or several tokens."""
    for i, seq in enumerate(seqs):
        if (i in result.drafts or len(result.token_ids[i]) > 1) and not seq.state.request.stepwise:
            raise ValueError(f"row {i} has drafts or several tokens, but its request is not stepwise")


def take_drafts(out: SchedulerOutput, seqs: Seq[Sequence], result: StepOutput) -> None:
    """Keep the drafts that a step proposed.

    Raises ValueError when tokens were accepted after a rejected draft of a chain: the cache holds other tokens there.
    """
    for i, row in enumerate(out.scheduled):
        if row.logits > 1 and row.parents is None:
            drafts = row.token_ids[len(row.token_ids) - row.drafts :]
            before = result.token_ids[i][:-1][: row.drafts]
            if before != drafts[: len(before)]:
                raise ValueError(f"row {i} accepted {result.token_ids[i]}, its drafts were {drafts}")
    for i, proposed in result.drafts.items():
        seqs[i].drafts, seqs[i].depth = proposed, result.depths.get(i, 0)


def take_prompt_logprobs(seq: Sequence, row: ScheduledSeq, made: LogprobTable | None) -> LogprobTable:
    """The entries of a row that were not delivered before a preemption; marks them as delivered."""
    first, begin = seq.prompt_logprobs_from, _prompt_begin(seq, row)
    seq.prompt_logprobs_left = seq.prompt_len - 1 - _prompt_end(seq, row)
    table = LogprobTable() if made is None else made
    return table[first - begin :] if first > begin else table


def _prompt_begin(seq: Sequence, row: ScheduledSeq) -> int:
    """The first position of the row whose next token gets logprobs."""
    return max(row.start, seq.prompt_len - 1 - seq.state.request.params.scored_tokens(seq.prompt_len))


def _prompt_end(seq: Sequence, row: ScheduledSeq) -> int:
    """End of the positions of the row whose next token is a prompt token."""
    return min(row.start + len(row.token_ids), seq.prompt_len - 1)
