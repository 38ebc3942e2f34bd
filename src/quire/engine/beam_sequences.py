"""Beam searches in the step loop: each running beam is a sequence of the scheduler.

When all beams of a search have got their logits in a step, the search chooses which continuations go on before the
scheduler sees the sampled tokens. The best continuation of a sequence takes the place of its sampled token, so that
sequence goes on as any other. Further continuations of it are new sequences: they find its full blocks in the prefix
cache, and compute the rest of its last block again. Sequences without a continuation end.

    blocks     [ prompt ][ prompt, a b ][ c d      beam 0  goes on with e
                                    └──[ c d f     beam 1  a new sequence: c d is computed again

A beam that is ahead of the others of its search (they wait for room, or were preempted) ends, and goes on as a new
sequence. So a search holds no blocks while it waits, and two of them cannot wait for each other's.
"""

from __future__ import annotations

from dataclasses import replace

from quire.core.beam_search import BeamSearch, check_beams, logprobs_of, stop_ids
from quire.core.scheduler import Scheduler
from quire.logprobs import LogprobTable
from quire.types import (
    FinishReason,
    Request,
    RequestError,
    SamplingParams,
    SchedulerOutput,
    SeqEvent,
    StepOutput,
    TokenIds,
)


class _Run:
    """A beam as a sequence: the request that runs it, its next tokens when these are known, and its row of the step."""

    __slots__ = ("request_id", "row", "search", "table")

    def __init__(self, search: _Search, request_id: str) -> None:
        self.search, self.request_id = search, request_id
        self.table: LogprobTable | None = None
        self.row: int | None = None


class _Search:
    """A request, its search, and the sequences of its running beams in the same order."""

    __slots__ = ("beams", "cached_tokens", "failed", "limit", "made", "request", "runs")

    def __init__(self, request: Request, limit: int) -> None:
        assert request.beams is not None
        self.request, self.limit = request, limit
        stops, most = stop_ids(request), limit - len(request.prompt_token_ids)
        self.beams = BeamSearch(request.beams, request.params, stops, most)
        self.runs: list[_Run] = []
        self.made = 0  # sequences
        self.cached_tokens: int | None = None
        self.failed: FinishReason | None = None

    def run(self) -> _Run:
        """A new sequence."""
        self.made += 1
        return _Run(self, f"{self.request.request_id}\0{self.made}")

    def ask(self, run: _Run) -> Request:
        """The request of a new sequence: its tokens so far are the prompt, and it goes on to the largest length."""
        tokens = [*self.request.prompt_token_ids, *self.beams.running[self.runs.index(run)].tokens]
        return replace(
            self.request,
            request_id=run.request_id,
            prompt_token_ids=TokenIds(tokens),
            params=SamplingParams(
                temperature=0, max_tokens=self.limit - len(tokens), logprobs=self.beams.candidates
            ),
            eos_token_ids=(),
            stepwise=True,
            speculate=False,
            beams=None,
        )


class BeamSequences:
    """The beam searches of one scheduler. `choose` comes between the result of a step and `Scheduler.update`, `settle`
    after it."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._searches: dict[str, _Search] = {}
        self._runs: dict[str, _Run] = {}  # by the request of the sequence
        self._rows: dict[int, _Run] = {}  # by sequence, while it runs
        self._starting: list[_Run] = []
        self._ending: list[_Run] = []
        self._done: list[_Search] = []

    def add(self, request: Request) -> None:
        """Begin a search. Raises RequestError if it could never complete."""
        config = self._scheduler.config
        check_beams(request)
        if request.request_id in self._searches:
            raise RequestError("request_id", f"{request.request_id!r} is already in use")
        search = _Search(request, config.length_limit(request))
        if not config.enable_chunked_prefill:  # a beam that starts again is a prompt
            whole = TokenIds([0] * (search.limit - 1))
            config.length_limit(replace(request, prompt_token_ids=whole, params=SamplingParams(max_tokens=1)))
        search.runs = [search.run()]
        self._start(search.runs[0])
        self._searches[request.request_id] = search

    @property
    def searching(self) -> bool:
        """Whether a search is under way."""
        return bool(self._searches)

    def abort(self, request_id: str) -> list[SeqEvent] | None:
        """End a search between two steps; returns its final events, None for an unknown one."""
        search = self._searches.pop(request_id, None)
        if search is None:
            return None
        for run in search.runs:
            if self._runs.pop(run.request_id, None):
                self._scheduler.abort(run.request_id)
        return _events(search, FinishReason.ABORT)

    def asked(self, request_id: str) -> str:
        """The request that a sequence belongs to."""
        run = self._runs.get(request_id)
        return request_id if run is None else run.search.request.request_id

    def choose(self, out: SchedulerOutput, result: StepOutput) -> None:
        """Continue the searches whose beams have all got their logits: their rows of `result` get the chosen tokens."""
        for seq_id in out.gone:
            self._rows.pop(seq_id, None)
        for new in out.new:
            if new.request_id in self._runs:
                self._rows[new.seq_id] = self._runs[new.request_id]
        touched: dict[str, _Search] = {}
        for i, row in enumerate(out.scheduled) if self._rows else ():
            run = self._rows.get(row.seq_id)
            if run is None or not (result.token_ids[i] or i in result.failed):
                continue
            search, run.row, run.table = run.search, i, result.logprobs[i]
            result.logprobs[i] = None
            search.failed = search.failed or result.failed.get(i)
            touched[search.request.request_id] = search
        for search in touched.values():
            self._choose(search, result)

    def _choose(self, search: _Search, result: StepOutput) -> None:
        tables = [run.table for run in search.runs if run.table is not None]
        if search.failed or len(tables) == len(search.runs):
            parents = [] if search.failed else search.beams.advance(tables)
            before, search.runs = search.runs, []
            for parent, beam in zip(parents, search.beams.running, strict=False):
                run = before[parent]
                if run.row is None:  # it has ended, or goes on with another token
                    run = search.run()
                    self._starting.append(run)
                else:
                    result.token_ids[run.row] = [beam.tokens[-1]]
                    run.row = run.table = None
                search.runs.append(run)
            if not parents:
                self._done.append(search)
                self._ending += before
                return
        else:
            before = search.runs
        self._ending += [run for run in before if run.row is not None]
        for run in self._ending:
            run.row = None

    def settle(self, events: list[SeqEvent]) -> list[SeqEvent]:
        """End and start sequences after a step. Returns its events with those of searches that ended in place of those
        of sequences."""
        if not self._searches:
            return events
        found = []
        for event in events:
            run = self._runs.get(event.request_id)
            if run is None:
                found.append(event)
            elif run.search.cached_tokens is None:
                run.search.cached_tokens = event.cached_tokens
        for search in self._done:
            del self._searches[search.request.request_id]
            found += _events(search, search.failed)
        for run in self._ending:
            self._scheduler.finish(run.request_id, 0, FinishReason.STOP)
            self._runs.pop(run.request_id, None)
        for run in self._starting:
            self._start(run)
        self._done, self._ending, self._starting = [], [], []
        return found

    def _start(self, run: _Run) -> None:
        self._scheduler.add(run.search.ask(run))
        self._runs[run.request_id] = run


def _events(search: _Search, failed: FinishReason | None) -> list[SeqEvent]:
    """The last events of a request: its answers, the best first, or why there are none."""
    request, cached = search.request, search.cached_tokens or 0
    events = []
    for index in range(request.params.n):
        if failed or index >= len(search.beams.finished):
            reason = failed or FinishReason.NO_TOKEN
            events.append(SeqEvent(request.request_id, index, [], None, None, reason, cached_tokens=cached))
            continue
        beam = search.beams.finished[index]
        stop = beam.tokens[-1] if beam.reason is FinishReason.STOP else None
        events.append(
            SeqEvent(
                request.request_id,
                index,
                list(beam.tokens),
                logprobs_of(beam),
                None,
                beam.reason,
                stop,
                cached,
            )
        )
    return events
