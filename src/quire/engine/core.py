"""EngineCore: the loop schedule → forward → sample → update, and a record of every step."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Protocol

from quire.config.live import LiveEngineConfig
from quire.core.cache_misses import MissWatch
from quire.core.coming_blocks import Arrivals
from quire.core.controller import StepController
from quire.core.cost_model import StepCostModel, StepFeatures
from quire.core.scheduler import Scheduler
from quire.core.step_plan import Flight
from quire.core.streams import StepLimits
from quire.core.tier import space_of
from quire.engine.api import StepRecord
from quire.engine.beam_sequences import BeamSequences
from quire.engine.planned_step import PlannedStep
from quire.engine.policies import named_policies
from quire.engine.whole_batches import BatchGate
from quire.objectives import parse_classes
from quire.speculate.speculation import NO_DRAFTS, Speculation
from quire.steplog.recorder import Recorder, StepFacts, StepTimes
from quire.text.token_bytes import TokenBytes
from quire.types import (
    FinishReason,
    Grammar,
    Request,
    RequestError,
    SchedulerOutput,
    SeqEvent,
    StepOutput,
)

if TYPE_CHECKING:  # a simulation needs no arrays
    from quire.executor.plans import Paging, PlanCounts
    from quire.executor.stage_times import StageTimes
    from quire.lora.adapter_service import AdapterService
    from quire.program.step_work import MachinePeaks, StepWork
    from quire.worker.block_tiers import BlockTiers
    from quire.worker.expert_balance import ExpertBalance
    from quire.worker.swap_space import SwapSpace
    from quire.worker.worker import Masks

RECORDS_KEPT = 4096
MOVES_SECONDS = 0.001  # between two looks at moves while no sequence can run before they end
PREPARE_SECONDS = 0.001  # between two looks at grammars while no sequence can run before they are compiled


class StepExecutor(Protocol):
    """Runs a scheduled step in two halves: a worker."""

    def begin(self, out: SchedulerOutput) -> None:
        """Take over the sequences and blocks of a step; `forward` must follow."""

    def forward(self, out: SchedulerOutput, beside: SchedulerOutput | None = None) -> None:
        """Run the program for the step that was begun; `sample` must follow. `beside`: see Worker.forward; given only
        where sequences take turns.
        """

    def sample(self, masks: Masks | None = None) -> StepOutput:
        """The result of the step that `forward` ran: row i belongs to out.scheduled[i]."""

    def count(self, added: Mapping[int, list[int]]) -> None:
        """Count tokens, by sequence, that were added to the result of the last step without being sampled."""

    @property
    def plans(self) -> PlanCounts:
        """The executor's plans of steps, and how often they were used."""


class Grammars(Protocol):
    """Decides which tokens sequences may sample next. `added_tokens` counts those that it added, `late_steps` how often
    a row sat a step out for its mask.
    """

    added_tokens: int
    late_steps: int

    def prepare(self, grammar: Grammar, tokens: TokenBytes) -> bool:
        """Whether sequences with this grammar may run. Until then it is being compiled, and must be asked for again.

        `tokens` is the vocabulary, always the same. Raises RequestError if the grammar cannot be compiled.
        """

    def begin(self, out: SchedulerOutput) -> None:
        """Begin to fill the masks of a step, which depend on `out` alone. Returns at once."""

    def masks(self) -> Masks:
        """The masks of the step that was begun last. Waits until they are filled."""

    def advance(self, out: SchedulerOutput, result: StepOutput) -> Mapping[int, list[int]]:
        """Step over the tokens that the rows of `out` accepted, not over drafts that they rejected.

        Tokens that must follow may be added to `result`; returns these by sequence. Notes there which rows failed, sat
        the step out or are complete.
        """


class EngineCore:
    """One scheduler and one worker. Not thread-safe: one thread calls it.

    With a gate, `ready_in` says how long a batch is still being collected; `step` runs what is there at any time.
    Without `grammars` requests that have one are refused; a function makes them for the first such request. One whose
    grammar is not compiled yet waits outside of the scheduler; if that fails, it is in `refused`, with the error. So
    does one whose adapter is not in a slot of `adapters`; from then on the slot is kept for it until it has ended.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        worker: StepExecutor,
        gate: BatchGate | None = None,
        grammars: Grammars | Callable[[], Grammars] | None = None,
        speculation: Speculation | None = None,
        adapters: AdapterService | None = None,
        costs: StepCostModel | None = None,
        controller: StepController | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.clock: Callable[[], int] = time.monotonic_ns  # of steps; a simulation has its own
        self.recorder: Recorder | None = None
        self.misses: MissWatch | None = None
        self.adapters = adapters
        self.costs = costs or StepCostModel()
        self._controller = controller
        self.swap: SwapSpace | None = None
        self.tiers: BlockTiers | None = None  # beyond the swap space
        self.arrivals: Arrivals | None = None  # of prompts that other engines compute
        self.work: StepWork | None = None
        # That each worked and waited, if there are several; see RankProcesses.worked.
        self.rank_seconds: Callable[[], Iterable[tuple[float, float]]] = tuple
        self.replica_waits: Callable[[], tuple[float, ...]] = tuple  # see EngineStats.replica_wait_seconds
        self.experts: ExpertBalance | None = None
        self.paging: Paging | None = None  # of weights that do not all stay in memory
        self.stages: StageTimes | None = None
        self.peaks: MachinePeaks | None = None  # those that were measured on this machine
        self._adapted: dict[
            str, tuple[str, int]
        ] = {}  # requests in slots: their version, and samples that run
        self.speculation = speculation
        self._worker = worker
        self._make_grammars: Callable[[], Grammars] | None = grammars if callable(grammars) else None
        self._grammars: Grammars | None = None if callable(grammars) else grammars
        self.records: deque[StepRecord] = deque(maxlen=RECORDS_KEPT)
        self.last_phases: dict[str, float] = {}
        self.rows = 0  # of the last step
        self.started: list[str] = []  # requests that the last step started or resumed
        self.vocabulary: TokenBytes | None = None  # before the first request that needs it
        self.refused: list[tuple[str, RequestError]] = []  # for the caller to take
        self._preparing: dict[str, Request] = {}
        self._beams: BeamSequences | None = None  # before the first request that needs them
        self._gate = gate
        self._drafting = 0  # nanoseconds for the drafts of the last step
        self._next: PlannedStep | None = None  # in flight between two calls of `step`
        self._ran_alone = False  # the last step: the next one may have to, too, and shares no sequences
        self._leaving: list[str] = []  # adapters, until what is in flight has ended
        self.features: StepFeatures = ()  # of the last step, for the cost model
        self._resume = 0.0  # no step before this time: only moves would be looked at

    @property
    def worker(self) -> StepExecutor:
        """The object that runs the steps."""
        return self._worker

    @property
    def grammars(self) -> Grammars | Callable[[], Grammars] | None:
        """What decides which tokens sequences with a grammar may sample, or makes it."""
        return self._grammars or self._make_grammars

    def record(self, recorder: Recorder) -> None:
        """Keep a log from now on: before the first request."""
        self.recorder = recorder
        if self.scheduler.config.enable_prefix_caching:
            self.misses = MissWatch(self.scheduler.caches, self.scheduler.config.block_size)

    def add(self, request: Request) -> None:
        """Queue a request. Raises RequestError if it could never complete."""
        if self.recorder is None:
            self._admit(request)
            return
        self.recorder.arrived(request)
        try:
            self._admit(request)
        except RequestError:
            self.recorder.aborted(request.request_id)
            raise

    def _admit(self, request: Request) -> None:
        if request.adapter and self.adapters is None:
            raise RequestError("adapter", "this engine has no adapters: use enable_lora")
        if request.request_id in self._preparing or request.request_id in self._adapted:
            raise RequestError("request_id", f"{request.request_id!r} is already in use")
        if request.adapter or (self.arrivals is not None and request.terms.coming):
            self.scheduler.config.length_limit(request)
        if self.arrivals is not None and request.terms.sent:
            self.arrivals.send(request)
        self._add(request)

    def _add(self, request: Request) -> None:
        grammar = request.grammar if request.beams is None else None
        coming = self.arrivals is not None and self.arrivals.awaits(request)
        try:
            waits = (
                (grammar is not None and not self._prepared(request, grammar))
                or coming
                or (request.adapter and not self._has_adapter(request))
            )
        except RequestError:
            if self.arrivals is not None and request.terms.coming:
                self.arrivals.forget(request.request_id)
            raise
        if waits:
            self._preparing[request.request_id] = request
            return
        if self.arrivals is not None:
            self.arrivals.forget(request.request_id)
        try:
            if request.beams is not None:
                self._beams = self._beams or BeamSequences(self.scheduler)
                self._beams.add(request)
            else:
                self.scheduler.add(request)
        except RequestError:
            self._leave_slot(request.request_id, request.params.n)
            raise
        if self.recorder is not None:
            self.recorder.queued(request.request_id)
        self._resume = 0.0

    def abort(self, request_id: str) -> list[SeqEvent]:
        """End a request now; returns its final events."""
        if self.recorder is not None:
            self.recorder.aborted(request_id)
        if self._beams is not None and (events := self._beams.abort(request_id)) is not None:
            return self._ended(events)
        request = self._preparing.pop(request_id, None)
        if self.arrivals is not None:
            self.arrivals.forget(request_id)
        if request is None:
            return self._ended(self.scheduler.abort(request_id))
        if self.adapters is not None:
            self.adapters.begin_round()
        return [
            SeqEvent(request_id, index, [], None, None, FinishReason.ABORT)
            for index in range(request.params.n)
        ]

    def finish(self, request_id: str, sample_index: int) -> SeqEvent | None:
        """End one sample because its text contains a stop string; returns its final event."""
        event = self.scheduler.finish(request_id, sample_index, FinishReason.STOP)
        if event is not None:
            self._ended([event])
            if self.recorder is not None:
                self.recorder.finished(request_id, sample_index)
        return event

    def time_stages(self, on: bool) -> None:
        """Measure the stages of later steps for their records and the log, or stop measuring."""
        if self.stages is not None:
            self.stages.switch(on)

    def limit_drafts(self, most: int) -> None:
        """Run at most so many drafts for a sequence from the next step on."""
        if self.speculation is not None:
            self.speculation.longest = most

    def has_work(self) -> bool:
        return self.scheduler.has_work() or bool(self._preparing) or self._next is not None

    def ready_in(self) -> float | None:
        """Seconds until there is a step to run or a grammar to look at; 0: a step now; None: not before something is
        added.
        """
        if self._preparing:
            self._add_prepared()
        if not self.scheduler.has_work() and self._next is None:
            if self.tiers is not None and self.tiers.saving:
                return max(0.0, self._resume - time.monotonic())
            return PREPARE_SECONDS if self._preparing else None
        if self._gate is None:
            return max(0.0, self._resume - time.monotonic()) if self._resume else 0.0
        opens = max(self._gate.opens(), self._resume)
        return None if opens == math.inf else max(0.0, opens - time.monotonic())

    def step(self) -> list[SeqEvent]:
        """Run one step; what it changed, in row order. A step without rows, while moves go on, leaves no record.

        Where sequences take turns, another one is begun beside it, and goes on in the next call.
        """
        self._wait()
        begun = self.clock()
        if self._controller is not None:
            self._controller.plan()
        self.started, leaving = [], self._leaving
        step, self._next, self._leaving = self._next or self._plan(), None, []
        beside = self._plan() if self._may_overlap(step) else None
        if step.flight is not None:
            self._book(step.flight)
        scheduled = self.clock()
        result = self._execute(step, beside, begun)
        executed = self.clock()
        if beside is not None and beside.flight is not None:
            self._next = beside
        events = self.scheduler.update(step.out, result)
        if self._beams is not None:
            events = self._beams.settle(events)
        self._ended(events)
        if leaving and self.adapters is not None:
            for version in leaving:
                self.adapters.release(version)
        if beside is not None and self._next is None:
            self.scheduler.update(beside.out, self._execute(beside, None, begun))
        updated = self.clock()
        self.rows, self._resume, self.features = len(step.out.scheduled), 0.0, step.features
        if self.rows:
            self._ran_alone = self.scheduler.config.takes_turns and beside is None and step.alone
            times = StepTimes(begun, scheduled, executed, updated, self._drafting)
            self._record(step, result, events, times)
        elif not result.filled:
            self._resume = time.monotonic() + MOVES_SECONDS
        return events

    def _wait(self) -> None:
        """Add what was prepared; after a step in which only moves went on, wait a little for these."""
        if self._preparing:
            self._add_prepared()
        if self._resume and (early := self._resume - time.monotonic()) > 0:
            time.sleep(early)

    def _plan(self) -> PlannedStep:
        """Schedule a step."""
        scheduler, beams = self.scheduler, self._beams
        scheduler.turns = not self._ran_alone and (beams is None or not beams.searching)
        out = scheduler.schedule()
        flight = scheduler.newest if out.scheduled else None
        started = [new.request_id for new in out.new if new.leader is None]
        self.started += started if beams is None else map(beams.asked, started)
        if self.recorder is not None and out.scheduled:
            self._look(out)
            self.recorder.planned(out)
        return PlannedStep(out, flight, scheduler.step_counts, scheduler.step_features, scheduler.step_drafts)

    def _may_overlap(self, step: PlannedStep) -> bool:
        """Whether another step is to be scheduled before the end of this one."""
        scheduler, flight = self.scheduler, step.flight
        if not scheduler.shares or flight is None or step.alone:
            return False
        sampling = sum([row.sample for row in flight.rows])
        return sampling < scheduler.num_running or scheduler.num_waiting > 0

    def _book(self, flight: Flight) -> None:
        """Note whose rows and blocks the step has."""
        scheduler = self.scheduler
        each = self.costs.weights if len(scheduler.usage.lines) > 1 else ()
        scheduler.usage.weigh(flight.rows, flight.seqs, each)
        scheduler.usage.hold(scheduler.caches, scheduler.running, time.monotonic())

    def _look(self, out: SchedulerOutput) -> None:
        """See why the prompts that start in a step were not in the cache."""
        recorder, misses, size = self.recorder, self.misses, self.scheduler.config.block_size
        assert recorder is not None
        for new in out.new:
            if misses is None or not recorder.starts(new.request_id, new.sample_index):
                continue
            hit = max(map(len, new.blocks)) * size
            scored = new.params.scored_tokens(new.prompt_len)
            usable = new.prompt_len - 1 - scored
            miss = misses.look(
                new.origin[0], space_of(new.adapter, new.origin[1]), new.token_ids, hit, usable
            )
            if miss is not None:
                recorder.missed(new.request_id, miss)

    def _record(
        self, step: PlannedStep, result: StepOutput, events: list[SeqEvent], times: StepTimes
    ) -> None:
        """Write down a step that has rows."""
        scheduler, counts, (begun, scheduled, executed, updated, _) = self.scheduler, step.counts, times
        predicted, seconds = self.costs.seconds(step.features), (updated - begun) / 1e9
        scheduler.usage.ran(seconds)
        self.last_phases = result.seconds
        self.costs.observe(step.features, seconds)
        if self._controller is not None:
            self._controller.ran(seconds)
        drafts = self.speculation.last if self.speculation else NO_DRAFTS
        stages = self.stages.take() if self.stages is not None and self.stages.on else ()
        self.records.append(
            StepRecord(
                step=step.out.step,
                start=begun / 1e9,
                schedule_seconds=(scheduled - begun) / 1e9,
                execute_seconds=(executed - scheduled) / 1e9,
                update_seconds=(updated - executed) / 1e9,
                rows=self.rows,
                prefill_tokens=counts.prefill_tokens,
                decode_tokens=counts.decode_tokens,
                context_tokens=counts.context_tokens,
                blocks_used=scheduler.blocks_used,
                running=scheduler.num_running,
                waiting=scheduler.num_waiting,
                preempted=counts.preempted,
                drafted=drafts.drafted,
                accepted=drafts.accepted,
                predicted_seconds=predicted,
                stage_seconds=(*stages, result.seconds.get("sample", 0.0)) if stages else (),
            )
        )
        if self.recorder is not None:
            self._log(step.out, result, events, times)

    def _log(
        self, out: SchedulerOutput, result: StepOutput, events: list[SeqEvent], times: StepTimes
    ) -> None:
        recorder, scheduler, record = self.recorder, self.scheduler, self.records[-1]
        assert recorder is not None
        if recorder.wants_costs:
            recorder.costs = self.costs.weights
        fetching = scheduler.fetches.sequences() if scheduler.fetches else []
        config, limits = scheduler.config, scheduler.limits
        facts = StepFacts(
            int(1e6 * record.predicted_seconds),
            record.blocks_used,
            record.waiting,
            (min(limits.tokens, config.max_num_batched_tokens), min(limits.sequences, config.max_num_seqs)),
            [recorder.key(seq.state.request.request_id, seq.sample_index) for seq in fetching],
            tuple(int(1e6 * seconds) for seconds in record.stage_seconds),
        )
        recorder.stepped(out, result, events, times, facts)

    def configure(self, live: LiveEngineConfig) -> None:
        """Another configuration from the next step on, as a whole. Raises ValueError naming the field, and changes
        nothing, if some of it is wrong.
        """
        scheduler = self.scheduler
        policies = named_policies(live.scheduling_policy, live.slo, live.overtake_ms)
        classes = parse_classes(live.slo)
        blocks = {name: int(share * scheduler.config.num_blocks) for name, share in live.cache_shares.items()}
        if sum(blocks.values()) > scheduler.config.num_blocks:
            raise ValueError(f"cache_shares: they add up to {sum(live.cache_shares.values()):g}, above 1")
        caps = StepLimits(live.max_num_batched_tokens, live.max_num_seqs, live.max_draft_tokens)
        scheduler.set_caps(caps)  # raises, or changes; the rest cannot fail
        if policies != scheduler.policies:
            scheduler.set_policies(policies)
        if blocks != scheduler.asked_floors:
            scheduler.set_floors(blocks)
        self._controller = StepController(scheduler, classes, self.costs) if classes else None
        if self.recorder is not None:
            self.recorder.configured(live)

    def _prepared(self, request: Request, grammar: Grammar) -> bool:
        """Whether a request can be added to the scheduler. Raises RequestError if it never can."""
        if self._grammars is None and self._make_grammars is not None:
            self._grammars = self._make_grammars()
        if self._grammars is None or self.vocabulary is None:
            raise RequestError("grammar", "this engine has no vocabulary for grammars")
        self.scheduler.config.length_limit(request)
        return self._grammars.prepare(grammar, self.vocabulary)

    def _has_adapter(self, request: Request) -> bool:
        """Whether a request's adapter is in a slot, which is then kept for it. Raises RequestError if it never can."""
        if self.adapters is None or not self.adapters.acquire(request.adapter):
            return False
        self._adapted[request.request_id] = request.adapter, request.params.n
        return True

    def _ended(self, events: list[SeqEvent]) -> list[SeqEvent]:
        """Give up the slots of requests whose last sample has ended; returns the events."""
        if self._adapted:
            for event in events:
                if event.finish_reason is not None:
                    self._leave_slot(event.request_id, 1)
        return events

    def _leave_slot(self, request_id: str, samples: int) -> None:
        if self.adapters is None or request_id not in self._adapted:
            return
        version, running = self._adapted.pop(request_id)
        if running > samples:
            self._adapted[request_id] = version, running - samples
        else:
            self._release(version)

    def _release(self, version: str) -> None:
        """Give up a slot, as soon as no row in flight may be of it."""
        assert self.adapters is not None
        if self._next is None:
            self.adapters.release(version)
        else:
            self._leaving.append(version)

    def _add_prepared(self) -> None:
        """Pass on the requests whose grammars have been compiled since, and whose adapters have been loaded."""
        waiting, self._preparing = self._preparing, {}
        if self.adapters is not None:
            self.adapters.begin_round()
        for request_id, request in waiting.items():
            try:
                self._add(request)
            except RequestError as error:
                if self.recorder is not None:
                    self.recorder.aborted(request_id)
                self.refused.append((request_id, error))

    def _execute(self, step: PlannedStep, beside: PlannedStep | None, begun: int) -> StepOutput:
        """Both halves of a step; its drafts are made before, its masks filled during the first. The one beside it is
        begun, unless it cannot run before the end of this one.
        """
        worker, grammars, speculation, out = self._worker, self._grammars, self.speculation, step.out
        if not step.begun:
            worker.begin(out)
        others = (beside.out,) if beside is not None and beside.may_run_beside(step) else ()
        for other in others:
            worker.begin(other)
        if beside is not None:
            beside.begun = bool(others)
        self._drafting = 0
        idles = speculation is None or speculation.idles(out, step.drafts)
        if speculation is not None and not idles:
            before = self.clock()
            speculation.fill(out, step.text_of)
            self._drafting = self.clock() - before
        if grammars is None:
            worker.forward(out, *others)
            result = worker.sample()
        else:
            grammars.begin(out)
            worker.forward(out, *others)
            result = worker.sample(grammars.masks())
            if added := grammars.advance(out, result):
                worker.count(added)
        if self._beams is not None:
            self._beams.choose(out, result)
        if speculation is not None and not idles:
            speculation.advance(out, result, (self.clock() - begun) / 1e9)
        return result
