"""One step on one rank: slots, step arrays, the executor's call, sampling."""

from __future__ import annotations

import time

import numpy as np

from quire.executor.base import Executor, Limits, Outputs, StepArrays
from quire.types import FinishReason, LogprobTable, ScheduledSeq, SchedulerOutput, StepOutput
from quire.worker.sampler import Sampler
from quire.worker.slots import Slots, fill_rows


class Worker:
    """Executes scheduler outputs. The executor is loaded but not yet bound; binding happens here."""

    def __init__(self, executor: Executor, sampler: Sampler, limits: Limits) -> None:
        self.arrays = StepArrays(limits, len(executor.program.cache_groups))
        executor.bind(limits, self.arrays)
        self._executor, self._sampler, self._limits = executor, sampler, limits
        self._slots = Slots(self.arrays, limits.max_rows)

    def execute(self, out: SchedulerOutput) -> StepOutput:
        """Run one step. Row i of the result belongs to out.scheduled[i]."""
        started = time.perf_counter()
        self._apply(out)
        rows = len(out.scheduled)
        tokens, sampling = fill_rows(self.arrays, self._slots, out.scheduled)
        prepared = time.perf_counter()
        outputs = self._executor.run(tokens, rows, len(sampling))
        ran = time.perf_counter()
        result = StepOutput(
            token_ids=[[] for _ in range(rows)], logprobs=[None] * rows, prompt_logprobs=[None] * rows
        )
        if sampling:
            self._sample(outputs, sampling, out.scheduled, result)
        sampled = time.perf_counter()
        for row, item in enumerate(out.scheduled):
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
        """Release and admit slots as the scheduler says."""
        for seq_id in out.gone:
            slot = self._slots.release(seq_id)
            if slot is not None:
                self._sampler.drop(slot.line)
        for new in out.new:
            self._sampler.add(self._slots.admit(new).line, new)

    def _sample(
        self, outputs: Outputs, sampling: list[int], scheduled: list[ScheduledSeq], result: StepOutput
    ) -> None:
        rows = [scheduled[i] for i in sampling]
        lines = np.array([self._slots[item.seq_id].line for item in rows], np.int32)
        positions = np.array([item.start + len(item.token_ids) for item in rows], np.int32)
        sampled = self._sampler.sample(outputs["logits"], lines, positions, maxima=outputs.get("maxima"))
        for k, (row, token) in enumerate(zip(sampling, sampled.token_ids.tolist(), strict=True)):
            if k in sampled.failed:
                result.failed[row] = sampled.failed[k]
                continue
            result.token_ids[row] = [token]
            result.logprobs[row] = sampled.logprobs[k]

    def _prompt_logprobs(self, row: int, item: ScheduledSeq) -> LogprobTable | None:
        """Logprobs of the prompt tokens that follow this row's positions, the head run in bounded slices.

        None when logits held NaN or infinity: the sequence has failed.
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
