"""One step on one rank, in two halves: `forward` runs the program, `sample` makes tokens of what it left.

Other Python threads run during the forward pass. They can fill the masks of grammars, which depend only on tokens that
were known before the step and are needed when sampling starts.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from itertools import count
from typing import cast

import numpy as np

from quire.executor.base import (
    F32,
    I32,
    U8,
    Bitmask,
    Embeddings,
    Guesses,
    HalfStep,
    Judging,
    Limits,
    Outputs,
    Overlapping,
    Runnable,
    SampledRows,
    Sampler,
    StepArrays,
)
from quire.executor.plans import PlanCounts, StepSize, decode_sizes
from quire.logprobs import LogprobTable
from quire.records import dataclass
from quire.types import FinishReason, ScheduledSeq, SchedulerOutput, StepOutput
from quire.worker.block_moves import BlockMoves, BlockStore
from quire.worker.expert_balance import ExpertBalance
from quire.worker.proposals import Proposals
from quire.worker.slots import EmbeddingStore, Filled, Slots, fill_rows, soft_rows
from quire.worker.trees import PlantedTree, StepBranches

# Tokens that sequences may sample, by sequence id: a line of bits (see Bitmask) for each position whose logits the row
# wants. A sequence that is not named may sample every token.
Masks = Mapping[int, I32]


@dataclass(frozen=True, slots=True)
class Ahead:
    """A step whose first half runs, or has run, and the arrays that it is in."""

    out: SchedulerOutput
    arrays: StepArrays
    filled: Filled
    twin: bool

    @property
    def half(self) -> HalfStep:
        """As the executor takes it."""
        size = StepSize(self.filled.tokens, self.filled.rows, len(self.filled.sampling))
        return HalfStep(size, self.twin)


@dataclass(slots=True)
class Forwarded:
    """A step between its halves."""

    out: SchedulerOutput
    arrays: Filled
    outputs: Outputs
    filled: dict[int, bool]
    prepare_seconds: float
    forward_seconds: float


class Worker:
    """Executes scheduler outputs. The executor is loaded but not yet bound; binding happens here.

    `store` holds the contents that moves copy out and in; without one there are no moves. `embeddings` holds those of
    soft tokens; without it, sequences that have any are refused with ValueError. `judging`: how drafts are judged other
    than by the sample; drafts in trees never are. `adapters`: slots of those that sequences may have, by digest.
    """

    def __init__(
        self,
        executor: Runnable,
        limits: Limits,
        store: BlockStore | None = None,
        embeddings: EmbeddingStore | None = None,
        judging: Judging | None = None,
        adapters: Mapping[str, int] | None = None,
    ) -> None:
        # Of the step whose second half runs, or of the one step that does.
        self.arrays = StepArrays(limits, len(executor.program.cache_groups), overlaps=executor.overlaps)
        self._sets = self.arrays, self.arrays.twin
        self._ahead: Ahead | None = None
        executor.bind(limits, self.arrays)
        executor.prepare(decode_sizes(limits.max_rows))
        self._executor, self._limits = executor, limits
        self.experts = ExpertBalance(executor)
        self._sampler = self._make_sampler(executor)
        self._slots = Slots(self.arrays, limits.max_rows)
        self._branches = StepBranches(self.arrays, limits)
        self._moves = None if store is None else BlockMoves(executor, store)
        self._embeddings = embeddings
        self._adapters: Mapping[str, int] = {} if adapters is None else adapters
        self._forwarded: Forwarded | None = None
        self._judging, self._proposals = judging, None
        if judging is not None and judging.acceptance == "rejection":
            self._proposals = Proposals(limits.max_logit_rows - limits.max_rows, executor.program.vocab)
        self.outputs: Outputs = {}  # of the last step, until the next run
        self._trees: dict[int, PlantedTree] = {}  # of the last step, by row
        self._begun = 0.0  # seconds that the beginning of the step took
        self._ran = self._ran_before = 0.0  # seconds of the last two runs of the program
        self._likeliest: dict[int, list[int]] | None = None
        self._wide: F32 | None = None  # until a draft with other columns draws

    def _make_sampler(self, executor: Runnable) -> Sampler:
        return executor.sampler()

    @property
    def plans(self) -> PlanCounts:
        """The executor's plans of steps, and how often they were used."""
        return self._executor.plans

    def begin(self, out: SchedulerOutput) -> None:
        """Take over the sequences and blocks of a step; `forward` must follow."""
        started = time.perf_counter()
        self._apply(out)
        if self._proposals is not None:
            self._proposals.clear()
        self._begun = time.perf_counter() - started

    def line(self, seq_id: int) -> int:
        """The line of a sequence in the block tables."""
        return self._slots[seq_id].line

    def right_tokens(self, row: int, item: ScheduledSeq, added: Sequence[int]) -> list[int]:
        """Where the known tokens of a row, and its drafts along the tokens added, are in the last step's outputs."""
        tree, known = self._trees.get(row), len(item.token_ids) - item.drafts
        if tree is None:
            first = int(self.arrays.query_start[row])
            return list(range(first, first + known + item.right(added)))
        first = tree.tokens[0] - known + 1
        return [*range(first, first + known), *(tree.tokens[draft] for draft in item.path(added))]

    def watch_trees(self) -> Mapping[int, list[int]]:
        """From now on, by sequence: the likeliest token after each position of the tree that it had in the last step,
        before anything that sampling changes."""
        self._likeliest = {}
        return self._likeliest

    def forward(self, out: SchedulerOutput, beside: SchedulerOutput | None = None) -> None:
        """Run the program for the step that was begun; `sample` must follow.

        `beside`: the step after it, which was begun, too, has none of its sequences that sample, and neither moves nor
        copies. Its first half runs meanwhile; it is the next one that is given to `forward`.
        """
        started = time.perf_counter() - self._begun
        self.experts.step()
        if beside is not None or self._ahead is not None:
            self._forward_half(out, beside, started)
            return
        filled = self._move(out)
        # One by one: a block may be the target of one and the source of the next.
        for source, target in out.copies:
            self._executor.copy_blocks([source], [target])
        self.arrays = self._sets[0]
        step = fill_rows(self.arrays, self._slots, out.scheduled, self._branches)
        self.arrays.embeddings = self._soft_rows(out.scheduled) if self._slots.soft else []
        if step.trees:
            self._executor.copy_blocks(*self._branches.copies)
        prepared = time.perf_counter()
        outputs = self._executor.run(step.tokens, step.rows, len(step.sampling)) if step.rows else {}
        self.outputs = outputs
        self._trees = {tree.row: tree for tree in step.trees}
        self._ran_before, self._ran = self._ran, time.perf_counter() - prepared
        self._branches.clear()
        self._forwarded = Forwarded(out, step, outputs, filled, prepared - started, self._ran)

    def _move(self, out: SchedulerOutput) -> dict[int, bool]:
        """Copy blocks out and in; the blocks that were to be filled, and whether they were."""
        if not (out.moves or self._moves):
            return {}
        assert self._moves is not None
        # A long step before a short one, with a chunk of a prompt, says nothing of it.
        return self._moves.run(out.moves, min(self._ran, self._ran_before) if out.scheduled else math.inf)

    def _forward_half(self, out: SchedulerOutput, beside: SchedulerOutput | None, started: float) -> None:
        """Run the second half of a step, and the first half of the one beside it."""
        executor, ahead = cast("Overlapping", self._executor), self._ahead
        filled = self._move(out)
        if ahead is None:
            ahead = self._fill_ahead(out, 0)
            executor.run_halves(ahead.half, None)
        assert ahead.out is out, "steps run in the order in which they were begun"
        behind = None if beside is None else self._fill_ahead(beside, ahead.arrays is self._sets[0])
        prepared = time.perf_counter()
        self.outputs = executor.run_halves(None if behind is None else behind.half, ahead.half)
        self.arrays, self._ahead, self._trees = ahead.arrays, behind, {}
        self._ran_before, self._ran = self._ran, time.perf_counter() - prepared
        self._forwarded = Forwarded(out, ahead.filled, self.outputs, filled, prepared - started, self._ran)

    def _fill_ahead(self, out: SchedulerOutput, number: int) -> Ahead:
        """A step in one of the two arrays."""
        arrays = self._sets[number]
        assert arrays is not None
        return Ahead(out, arrays, fill_rows(arrays, self._slots, out.scheduled, self._branches), number > 0)

    def sample(self, masks: Masks | None = None) -> StepOutput:
        """The result of the step that `forward` ran: row i belongs to out.scheduled[i].

        Raises ValueError if a mask has not a line for each position that its row samples.
        """
        step, self._forwarded = self._forwarded, None
        if step is None:
            raise RuntimeError("sample needs a step that was run before")
        scheduled = step.out.scheduled
        rows = len(scheduled)
        result = StepOutput(
            token_ids=[[] for _ in range(rows)],
            logprobs=[None] * rows,
            prompt_logprobs=[None] * rows,
            filled=step.filled,
        )
        if not rows:
            return result
        started = time.perf_counter()
        if step.arrays.sampling:
            self._sample(step, masks, result)
            self._follow(scheduled, result)
        sampled = time.perf_counter()
        for row, item in enumerate(scheduled):
            if result.token_ids[row]:
                slot = self._slots[item.seq_id]
                slot.last = result.token_ids[row][-1]
                if slot.surprised:
                    result.surprises[row] = self._sampler.surprise(slot.line)
            if item.prompt_logprobs and row not in result.failed:
                result.prompt_logprobs[row] = self._prompt_logprobs(row, item)
                if result.prompt_logprobs[row] is None:
                    result.failed[row] = FinishReason.ERROR
        ended = time.perf_counter()
        result.seconds = {
            "prepare": step.prepare_seconds,
            "forward": step.forward_seconds,
            "sample": sampled - started,
            "prompt_logprobs": ended - sampled,
        }
        return result

    def count(self, added: Mapping[int, list[int]]) -> None:
        """Count tokens, by sequence, that were added to the result of the last step without being sampled."""
        for seq_id, tokens in added.items():
            line = self._slots[seq_id].line
            self._sampler.commit(np.full(len(tokens), line, np.int32), np.array(tokens, np.int32))

    def guess(
        self, outputs: Outputs, lines: I32, positions: I32, ids: I32 | None = None, count: int = 1
    ) -> Guesses:
        """The `count` tokens that each line would soonest sample at a position if it had these logits; counts none.

        Logits may have fewer or more columns than the vocabulary; `ids`: the tokens of the columns.
        """
        logits = outputs["logits"]
        if logits.shape[1] != self._executor.program.vocab or ids is not None:
            outputs = {"logits": self._widened(logits, ids)}
        kept = None if self._proposals is None else self._proposals.rows(lines, positions)
        return self._sampler.guess(outputs, lines, positions, count, kept)

    def _widened(self, logits: F32, ids: I32 | None) -> F32:
        """Logits of a draft with a column for each token of the vocabulary, valid until the next call. What they take
        is in the plan, where a draft has other columns: see Draft.kept_bytes."""
        vocab = self._executor.program.vocab
        if self._wide is None or len(self._wide) < len(logits):
            self._wide = None  # never both
            self._wide = np.empty((len(logits), vocab), np.float32)
        wide = self._wide[: len(logits)]
        wide.fill(-np.inf)
        if ids is None:
            shared = min(vocab, logits.shape[1])
            wide[:, :shared] = logits[:, :shared]
        else:
            wide[:, ids] = logits
        return wide

    def _apply(self, out: SchedulerOutput) -> None:
        """Release and admit slots as the scheduler decided, and append the blocks that rows were given."""
        for seq_id in out.gone:
            slot = self._slots.release(seq_id)
            if slot is not None:
                self._sampler.drop(slot.line)
        for new in out.new:
            if new.soft_tokens and self._embeddings is None and not new.prompt_embeds:
                raise ValueError("soft_tokens: this model takes no embeddings")
            adapter = self._adapters[new.adapter] if new.adapter else -1
            self._sampler.add(self._slots.admit(new, adapter).line, new)
        for item in out.scheduled:
            if any(item.new_blocks):
                self._slots.append(self._slots[item.seq_id], item.new_blocks)

    def _soft_rows(self, scheduled: list[ScheduledSeq]) -> list[Embeddings]:
        starts = self.arrays.query_start[: len(scheduled)]
        return soft_rows(self._slots, self._embeddings, scheduled, starts)

    def content(self, block: int) -> U8:
        """A copy of what is in a KV block."""
        assert self._moves is not None
        return self._moves.content(block)

    def _sample(self, step: Forwarded, masks: Masks | None, result: StepOutput) -> None:
        sampling, scheduled, slots = step.arrays.sampling, step.out.scheduled, self.arrays.slots
        rows = len(sampling)
        drafting = any(item.drafts for item in scheduled)
        every = rows == len(scheduled) and not drafting  # every row samples once
        lines = slots[:rows] if every else slots[sampling]
        positions = self.arrays.positions[self.arrays.logit_rows[:rows]] + 1
        bitmask = bitmask_of(masks, scheduled) if masks else None
        if self._likeliest is not None:
            self._likeliest.clear()
            for tree in step.arrays.trees:
                places = slice(tree.place, tree.place + tree.item.logits)
                self._likeliest[tree.item.seq_id] = self._sampler.likeliest(step.outputs, places)
        guides = self._guides(scheduled, sampling) if self._slots.leaders else None
        if step.arrays.trees:
            self._walk(step, lines, positions, bitmask, guides, result)
            return
        if not drafting:
            sampled = self._sampler.sample(step.outputs, lines, positions, bitmask, guides=guides)
            accept(sampling, [-1] * rows, sampled, result)
            return
        drafts = self._drafts(sampling)
        judging = self._judging
        if judging is not None and judging.acceptance == "rejection" and self._proposals is not None:
            judging = self._proposals.judging(judging.acceptance, lines, positions)
        sampled = self._sampler.verify(
            step.outputs,
            lines,
            positions,
            np.array(drafts, np.int32),
            bitmask,
            judging=judging,
            guides=guides,
        )
        kept = accept(sampling, drafts, sampled, result)
        self._sampler.commit(lines[kept], sampled.token_ids[kept])

    def _guides(self, scheduled: list[ScheduledSeq], sampling: list[int]) -> I32:
        """The place in `sampling` of each leader's follower, -1 for others."""
        guides, place = np.full(len(sampling), -1, np.int32), dict(zip(sampling, count(), strict=False))
        rows = {item.seq_id: row for row, item in enumerate(scheduled) if item.sample}
        for follower, leader in self._slots.leaders.items():
            if follower in rows:
                guides[place[rows[leader]]] = place[rows[follower]]
        return guides

    def _follow(self, scheduled: list[ScheduledSeq], result: StepOutput) -> None:
        """Followers get the tokens of their leaders in place of those of their own logits."""
        leaders = self._slots.leaders
        rows = {item.seq_id: row for row, item in enumerate(scheduled) if item.sample} if leaders else {}
        for follower, leader in leaders.items():
            if follower in rows:
                row, other = rows[follower], rows[leader]
                result.token_ids[row] = result.token_ids[other][:1]
                if other in result.failed:
                    result.failed[row] = result.failed[other]

    def _walk(
        self,
        step: Forwarded,
        lines: I32,
        positions: I32,
        bitmask: Bitmask | None,
        guides: I32 | None,
        result: StepOutput,
    ) -> None:
        """Sample the first position of each row, and then, in all rows at once, the one behind a draft that was right.

        Sequences that went along a branch get its blocks.
        """
        sampling, trees = step.arrays.sampling, step.arrays.trees
        planted = {tree.row for tree in trees}
        children = {
            (place, draft): place + 1
            for place, (row, draft) in enumerate(zip(sampling, self._drafts(sampling), strict=True))
            if draft >= 0 and row not in planted
        }
        for tree in trees:
            children |= tree.children()
        places = [place for place, row in enumerate(sampling) if not place or sampling[place - 1] != row]
        last = {sampling[place]: place for place in places}
        while places:
            at = np.array(places, np.int32)
            some = None if bitmask is None else Bitmask(bitmask.words, bitmask.lines[at])
            guided = None if guides is None else guides[at]
            sampled = self._sampler.sample(step.outputs, lines[at], positions[at], some, at, guided)
            behind = []
            for k, (place, token) in enumerate(zip(places, sampled.token_ids.tolist(), strict=True)):
                row = sampling[place]
                if take(row, k, token, sampled, result) and (place, token) in children:
                    last[row] = children[place, token]
                    behind.append(last[row])
            places = behind
        blocks, targets = self._branches.accepted((tree, last[tree.row] - tree.place) for tree in trees)
        if blocks:
            self._executor.copy_blocks(blocks, targets)

    def _drafts(self, sampling: list[int]) -> list[int]:
        """The draft after each position whose logits are needed, -1 after the last of a row."""
        after = self.arrays.logit_rows[: len(sampling)] + 1
        tokens = self.arrays.token_ids.take(after, mode="clip").tolist()
        nexts = [*sampling[1:], -1]
        return [t if row == then else -1 for t, row, then in zip(tokens, sampling, nexts, strict=True)]

    def _prompt_logprobs(self, row: int, item: ScheduledSeq) -> LogprobTable | None:
        """Logprobs of those prompt tokens after the positions of this row that are to have some; the head runs in
        bounded slices.

        None if logits held NaN or infinity: the sequence has failed.
        """
        slot = self._slots[item.seq_id]
        end = len(slot.prompt) - 1
        start, stop = max(item.start, end - slot.scored), min(item.start + len(item.token_ids), end)
        base = int(self.arrays.query_start[row]) - item.start
        found = LogprobTable()
        for first in range(start, stop, self._limits.max_logit_rows):
            last = min(stop, first + self._limits.max_logit_rows)
            self.arrays.logit_rows[: last - first] = range(base + first, base + last)
            outputs = self._executor.run_head(last - first)
            targets = np.array(slot.prompt[first + 1 : last + 1], np.int32)
            scored = self._sampler.prompt_logprobs(outputs, targets, self._sampler.top_n(slot.line))
            if scored is None:
                return None
            found.extend(scored)
        return found


def bitmask_of(masks: Masks, scheduled: list[ScheduledSeq]) -> Bitmask | None:
    """The masks of a step's rows as the sampler takes them; None if no row has one."""
    words: list[I32] = []
    lines: list[int] = []
    taken = 0
    for item in scheduled:
        mask = masks.get(item.seq_id) if item.logits else None
        if mask is None:
            lines += [-1] * item.logits
            continue
        if len(mask) != item.logits:
            raise ValueError(f"masks: {len(mask)} lines for a row that samples {int(item.logits)} positions")
        lines += range(taken, taken + len(mask))
        taken += len(mask)
        words.append(mask)
    return Bitmask(np.concatenate(words), np.array(lines, np.int32)) if words else None


def take(row: int, k: int, token: int, sampled: SampledRows, result: StepOutput) -> bool:
    """Assign the token of sample k to a row, or note that the row has failed; whether there is a token."""
    if k in sampled.failed:
        if not result.token_ids[row]:
            result.failed[row] = sampled.failed[k]
        return False
    result.token_ids[row].append(token)
    before, table = result.logprobs[row], sampled.logprobs[k]
    if before is None or table is None:
        result.logprobs[row] = table
    else:
        before.extend(table)
    return True


def accept(sampling: list[int], drafts: list[int], sampled: SampledRows, result: StepOutput) -> list[int]:
    """Assign sampled tokens to rows, up to the first that differs from its draft: those after it are invalid.

    Row sampling[k] sampled the k-th token, drafts[k] is the guess at that token, -1 for none. A row that fails after
    accepted drafts keeps them and fails in the next step. Returns the k of accepted tokens.
    """
    kept = []
    ended = -1
    for k, (row, draft, token) in enumerate(zip(sampling, drafts, sampled.token_ids.tolist(), strict=True)):
        if row == ended:
            continue
        if token != draft:
            ended = row
        if take(row, k, token, sampled, result):
            kept.append(k)
    return kept
