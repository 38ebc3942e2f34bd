"""One step on one rank: slots, step arrays, the executor's call, sampling."""

from __future__ import annotations

import time
from typing import Protocol

import numpy as np

from quire.executor.base import U8, Executor, Limits, Outputs, StepArrays
from quire.logprobs import LogprobTable
from quire.program.memory import kv_block_bytes
from quire.types import FinishReason, Move, ScheduledSeq, SchedulerOutput, StepOutput
from quire.worker.sampler import SampledRows, Sampler
from quire.worker.slots import Slots, fill_rows


class BlockStore(Protocol):
    """Contents of blocks outside of the executor, by digest and cache group: the worker's side of a tier."""

    def put(self, digest: bytes, group: int, content: U8) -> None:
        """Store a content; the store owns it from now on."""

    def get(self, digest: bytes, group: int) -> U8 | None:
        """A stored content; None if it is no longer kept."""


class Worker:
    """Executes scheduler outputs. The executor is loaded but not yet bound; binding happens here.

    `store` holds the contents that moves copy out and in; without it there are no moves.
    """

    def __init__(
        self, executor: Executor, sampler: Sampler, limits: Limits, store: BlockStore | None = None
    ) -> None:
        self.arrays = StepArrays(limits, len(executor.program.cache_groups))
        executor.bind(limits, self.arrays)
        self._executor, self._sampler, self._limits = executor, sampler, limits
        self._slots = Slots(self.arrays, limits.max_rows)
        self._store = store

    def execute(self, out: SchedulerOutput) -> StepOutput:
        """Run one step. Row i of the result belongs to out.scheduled[i]."""
        started = time.perf_counter()
        self._apply(out)
        rows = len(out.scheduled)
        filled = self._move(out.moves) if out.moves else {}
        if not rows:
            return StepOutput([], [], [], filled=filled)
        tokens, sampling = fill_rows(self.arrays, self._slots, out.scheduled)
        prepared = time.perf_counter()
        outputs = self._executor.run(tokens, rows, len(sampling))
        ran = time.perf_counter()
        result = StepOutput(
            token_ids=[[] for _ in range(rows)],
            logprobs=[None] * rows,
            prompt_logprobs=[None] * rows,
            filled=filled,
        )
        if sampling:
            self._sample(outputs, sampling, out.scheduled, result)
        sampled = time.perf_counter()
        for row, item in enumerate(out.scheduled):
            if result.token_ids[row]:
                self._slots[item.seq_id].last = result.token_ids[row][-1]
            if item.prompt_logprobs and row not in result.failed:
                result.prompt_logprobs[row] = self._prompt_logprobs(row, item)
                if result.prompt_logprobs[row] is None:
                    result.failed[row] = FinishReason.ERROR
        ended = time.perf_counter()
        result.seconds = {
            "prepare": prepared - started,
            "forward": ran - prepared,
            "sample": sampled - ran,
            "prompt_logprobs": ended - sampled,
        }
        return result

    def _apply(self, out: SchedulerOutput) -> None:
        """Release and admit slots as the scheduler decided."""
        for seq_id in out.gone:
            slot = self._slots.release(seq_id)
            if slot is not None:
                self._sampler.drop(slot.line)
        for new in out.new:
            self._sampler.add(self._slots.admit(new).line, new)

    def _move(self, moves: list[Move]) -> dict[int, bool]:
        """Copy blocks out and in, in order; returns for each block to fill whether it was filled."""
        assert self._store is not None
        filled = {}
        size = kv_block_bytes(self._executor.program, self._limits.block_size)
        for move in moves:
            if move.fill:
                content = self._store.get(move.digest, move.group)
                filled[move.block] = content is not None
                if content is not None:
                    self._executor.write_blocks([move.block], content[None])
            else:
                content = np.empty(size, np.uint8)
                self._executor.read_blocks([move.block], content[None])
                self._store.put(move.digest, move.group, content)
        return filled

    def _sample(
        self, outputs: Outputs, sampling: list[int], scheduled: list[ScheduledSeq], result: StepOutput
    ) -> None:
        rows = len(sampling)
        lines = np.array([self._slots[scheduled[i].seq_id].line for i in sampling], np.int32)
        positions = self.arrays.positions[self.arrays.logit_rows[:rows]] + 1
        logits, maxima = outputs["logits"], outputs.get("maxima")
        if not any(item.drafts for item in scheduled):
            sampled = self._sampler.sample(logits, lines, positions, maxima=maxima)
            accept(sampling, [-1] * rows, sampled, result)
            return
        drafts = self._drafts(sampling)
        sampled = self._sampler.verify(logits, lines, positions, np.array(drafts, np.int32), maxima=maxima)
        kept = accept(sampling, drafts, sampled, result)
        self._sampler.commit(lines[kept], sampled.token_ids[kept])

    def _drafts(self, sampling: list[int]) -> list[int]:
        """The draft after each position whose logits are needed, -1 after the last of a row."""
        after = self.arrays.logit_rows[: len(sampling)] + 1
        tokens = self.arrays.token_ids.take(after, mode="clip").tolist()
        nexts = [*sampling[1:], -1]
        return [t if row == then else -1 for t, row, then in zip(tokens, sampling, nexts, strict=True)]

    def _prompt_logprobs(self, row: int, item: ScheduledSeq) -> LogprobTable | None:
        """Logprobs of the prompt tokens after the positions of this row; the head runs in bounded slices.

        None when logits contain NaN or infinity: the sequence has failed.
        """
        slot = self._slots[item.seq_id]
        stop = min(item.start + len(item.token_ids), len(slot.prompt) - 1)
        base = int(self.arrays.query_start[row]) - item.start
        found = LogprobTable()
        for first in range(item.start, stop, self._limits.max_logit_rows):
            last = min(stop, first + self._limits.max_logit_rows)
            self.arrays.logit_rows[: last - first] = range(base + first, base + last)
            outputs = self._executor.run_head(last - first)
            targets = np.array(slot.prompt[first + 1 : last + 1], np.int32)
            scored = self._sampler.prompt_logprobs(
                outputs["logits"], targets, self._sampler.top_n(slot.line), outputs.get("maxima")
            )
            if scored is None:
                return None
            found.extend(scored)
        return found


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
        if k in sampled.failed:
            if not result.token_ids[row]:
                result.failed[row] = sampled.failed[k]
            continue
        kept.append(k)
        result.token_ids[row].append(token)
        before, table = result.logprobs[row], sampled.logprobs[k]
        if before is None or table is None:
            result.logprobs[row] = table
        else:
            before.extend(table)
    return kept
