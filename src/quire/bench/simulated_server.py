"""The engine's scheduler, cost model, controller and admission on a virtual clock, before a machine of known costs.

What decides is the code that serves: Scheduler, StepController, core.forecast and core.admission_rules. What is
simulated is time: a step takes what a formula says, with noise, and the cost model has to learn it.
"""

from __future__ import annotations

import math
import random
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import field, replace
from functools import lru_cache, partial

from quire.bench.recorded_drafts import DraftWalk, RecordedDrafts
from quire.bench.timeline import RequestRecord
from quire.core.admission_rules import LATE_DEADLINES, Broken, Burden, Caution, Promises, check_wishes
from quire.core.controller import StepController
from quire.core.cost_model import StepCostModel, worst_margin
from quire.core.degrading import Degrading
from quire.core.forecast import PACE_MEMORY, Demand, Forecast, Live, outlook
from quire.core.guarantees import StepRoom, worst_demand
from quire.core.scheduler import Scheduler
from quire.core.scheduler_config import SchedulerConfig
from quire.engine.whole_batches import BatchGate, WholeBatchScheduler
from quire.logprobs import LogprobTable
from quire.objectives import ServiceClass, ServiceTerms
from quire.records import dataclass
from quire.types import Request, SamplingParams, ScheduledSeq, SchedulerOutput, StepOutput, TokenIds

_TOKEN, _EOS = 1, 2
_NEXT, _NONE = [_TOKEN], list[int]()  # what a row samples; nobody changes it
StepFactor = Callable[[Sequence[float], float], float]  # by what is in a step, and when it begins
StepNoise = Callable[[int], StepFactor]  # by a seed
StepTime = Callable[[Sequence[float]], float]


def _summed(costs: Sequence[float], features: Sequence[float]) -> float:
    return sum([x * cost for x, cost in zip(features, costs, strict=True)])


def _scattered(share: float, seed: int) -> StepFactor:
    """Factors with a standard deviation."""
    rng = random.Random(f"noise {seed}")
    return lambda *_: max(0.5, rng.gauss(1, share))


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request that comes after `at` seconds. `known`: the server knows the length of its output; otherwise it knows
    that there are at most `most` tokens, and the answer ends by itself. `deadline`: seconds from then within which it
    has to end."""

    at: float
    prompt: Sequence[int]
    output: int
    service_class: int = 0
    account: str = ""
    known: bool = True
    deadline: float | None = None
    tenant: str = ""
    most: int = 1024


@dataclass(frozen=True, slots=True)
class Handover:
    """Seconds until an engine has a request that came: at one with nothing to do, behind another one on its way to
    that, and at one with work."""

    idle: float = 0.0
    joining: float = 0.0
    busy: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedRun:
    """What came of a run. `predicted` has the TTFT of admitted requests as they were predicted, by their number."""

    records: list[RequestRecord]
    predicted: dict[int, float] = field(default_factory=dict)
    refused: dict[int, Broken] = field(default_factory=dict)
    cached: dict[int, int] = field(default_factory=dict)  # prompt tokens found in the cache
    steps: int = 0
    preemptions: int = 0
    hit_share: float = 0.0
    cost_error: float = 0.0
    length_error: float = 0.0


_Planned = tuple[SchedulerOutput, Sequence[float]]  # a step, and what is in it


class SimulatedServer:
    """One run. `costs` are the true seconds by cost_model.FEATURES, or a function of these; `noise` is the standard
    deviation of a step's time, relative, or makes what draws a factor for each step; `between` are seconds from a
    step's tokens to its end. Without `admits` everything is queued, without `controls` all steps have the limits of the
    config. With `received`, prompts were computed elsewhere and their cache comes with them: only decoding takes time.
    `drafts` are made as in a log; the config says how many a step may have. What steps cost need not be learned where
    nothing asks for it. With `batch_wait` it collects whole batches: full ones, or after so many seconds. Where
    sequences take turns, a step is scheduled before the end of the one before it, as in EngineCore.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        costs: Sequence[float] | StepTime,
        classes: Sequence[ServiceClass] = (),
        *,
        admits: bool = False,
        controls: bool = False,
        degrading: Degrading | None = None,
        noise: float | StepNoise = 0.03,
        seed: int = 0,
        batch_wait: float | None = None,
        received: bool = False,
        learns: bool = True,
        handover: Handover = Handover(),  # noqa: B008  a constant
        between: float = 0.0,
        drafts: RecordedDrafts | None = None,
    ) -> None:
        self.costs, self.classes = StepCostModel(), tuple(classes)
        kind = Scheduler if batch_wait is None else WholeBatchScheduler
        self.scheduler = kind(config, random.Random(seed), costs=self.costs)
        self._wait, self._received, self._learns = batch_wait, received, learns
        self._true = costs if callable(costs) else partial(_summed, costs)
        self._factor = noise(seed) if callable(noise) else _scattered(noise, seed)
        self._handover, self._between = handover, between
        self._drafts = None if drafts is None else DraftWalk(drafts, seed)
        self._admits = admits
        self._controller = StepController(self.scheduler, classes, self.costs) if controls else None
        self._caution, self._end_caution = Caution(), Caution(LATE_DEADLINES)
        self._deadlines: dict[str, float] = {}
        self._promises = Promises()
        self._degrading = degrading
        self._pace = 0.0
        self._started: set[str] = set()
        self._cached: dict[int, int] = {}
        self._live: dict[str, Request] = {}
        self._since: float | None = None  # when the running step began
        self._flying: set[str] = set()  # what it starts
        self._next: _Planned | None = None  # the step that runs beside it
        self._late: deque[tuple[float, Request]] = deque()  # that come in, and when
        self._ends: dict[str, int] = {}  # position of the token that ends an answer whose length is unknown
        self._last: dict[int, int] = {}  # the same by sequence
        self._records: dict[str, RequestRecord] = {}  # of live requests
        self._streams: dict[int, Callable[[float], None]] = {}  # by sequence, takes the time of a token
        self.now, self.steps, self.busy = 0.0, 0, 0.0
        self.seen: Callable[[Sequence[float]], None] | None = None  # gets what is in each step
        self._tokens = config.num_blocks * config.block_size // len(config.groups)

    def run(
        self, arrivals: Sequence[Arrival], look: Callable[[SimulatedServer], None] = lambda _: None
    ) -> SimulatedRun:
        """Serve all; `look` is called after each step."""
        found = SimulatedRun(
            records=[RequestRecord(index=i, scheduled=one.at) for i, one in enumerate(arrivals)]
        )
        order = deque(sorted(range(len(arrivals)), key=lambda i: arrivals[i].at))

        def arrive(until: float) -> None:
            while order and arrivals[order[0]].at <= until:
                index = order.popleft()
                self.now = max(self.now, arrivals[index].at)
                self.add(index, arrivals[index], found)

        while order or self._late or self._has_work():
            arrive(self.now)
            due = self.due(last=not order)
            if order and arrivals[order[0]].at <= due:
                self.now = arrivals[order[0]].at
            else:
                self.now = due
                self.step(arrive)
                look(self)
        return self.outcome(found)

    def due(self, *, last: bool = True) -> float:
        """When the next step begins if nothing comes before, infinite if there is nothing to run. `last`: no more
        requests will come, so no batch waits for them."""
        self._take_in()
        if not self._has_work():
            return self._late[0][0] if self._late else math.inf
        return self.now if last else max(self.now, self._opens())

    def outcome(self, found: SimulatedRun) -> SimulatedRun:
        """What came of a run whose requests have ended."""
        scheduler = self.scheduler
        stats = scheduler.prefix_stats
        return replace(
            found,
            cached=self._cached,
            steps=self.steps,
            preemptions=scheduler.num_preemptions,
            hit_share=stats.hit_tokens / max(1, stats.queried_tokens),
            cost_error=self.costs.error,
            length_error=scheduler.estimates.error,
        )

    def _has_work(self) -> bool:
        return self.scheduler.has_work() or self._next is not None

    def _opens(self) -> float:
        """When the next step may run."""
        queue = self.scheduler
        if self._wait is None or not isinstance(queue, WholeBatchScheduler):
            return 0.0
        return BatchGate(queue, queue.config.max_num_seqs, self._wait).opens()

    def predict(self, request: Request, most: float = 600.0, *, to_end: bool = False) -> Forecast:
        """The times of a request that would be added now."""
        scheduler = self.scheduler
        config, limits = scheduler.config, scheduler.limits
        # A step in flight has told nothing yet: what it starts still waits.
        computed = {
            name: seq
            for seq in scheduler.running
            if (name := seq.state.request.request_id) not in self._flying
        }
        lives = []
        for name, one in self._live.items():
            seq = computed.get(name)
            lives.append(
                self._as_live(one, seq.computed if seq else 0, len(seq.tokens) - seq.prompt_len if seq else 0)
            )
        return outlook(
            self.costs.weights,
            lives,
            self._as_live(request, 0, 0),
            budget=min(config.max_num_batched_tokens, limits.tokens),
            slots=min(config.max_num_seqs, limits.sequences),
            tokens=self._tokens,
            most=most,
            pace=self._pace,
            elapsed=None if self._since is None else self.now - self._since,
            to_end=to_end,
            bends=self.costs.bends,
            turns=scheduler.config.takes_turns,
        )

    def _burden(self, request: Request, *, to_end: bool) -> tuple[Burden, float]:
        """See Promises.weigh."""
        config, limits = self.scheduler.config, self.scheduler.limits
        budget = min(config.max_num_batched_tokens, limits.tokens)
        new = Demand(len(request.prompt_token_ids), 0, float(request.params.max_tokens or 0))
        return self._promises.weigh(
            Live(self._place(request), False, new),
            self.scheduler.estimates.output_tokens(request),
            self._worst(),
            self.costs.weights,
            StepRoom(budget, min(config.max_num_seqs, limits.sequences), self._tokens, config.takes_turns),
            margin=worst_margin(self.costs.spread, self.costs.bends),
            to_end=to_end,
        )

    def _worst(self) -> Iterator[Live]:
        """Live requests, each with all the tokens that it may get."""
        running = {seq.state.request.request_id: seq for seq in self.scheduler.running}
        for name, one in self._live.items():
            seq = running.get(name)
            done, made = (seq.computed, len(seq.tokens) - seq.prompt_len) if seq is not None else (0, 0)
            work = worst_demand(len(one.prompt_token_ids), done, made, float(one.params.max_tokens or 0))
            yield Live(self._place(one), seq is not None, work)

    def _place(self, request: Request) -> tuple[float, ...]:
        return self.scheduler.policies.place(request, self.scheduler.estimates)

    def _as_live(self, request: Request, computed: int, made: int) -> Live:
        """A request as the API process knows it: not the hits of those that wait, but how many there are on average."""
        lengths, prompt = self.scheduler.estimates, len(request.prompt_token_ids)
        left = prompt - computed
        if not computed:
            stats = self.scheduler.prefix_stats
            left = max(1, int(prompt * (1 - stats.hit_tokens / max(1, stats.queried_tokens))))
        work = Demand(
            max(0, left), computed or prompt - left, max(1.0, lengths.output_tokens(request) - made)
        )
        late = self._since is not None and request.arrival > self._since
        return Live(self._place(request), computed > 0, work, late)

    def add(self, index: int, arrival: Arrival, found: SimulatedRun) -> None:
        """A request comes, now."""
        record = found.records[index]
        record.sent, record.input_tokens, record.input_source = self.now, len(arrival.prompt), "server"
        service = self.classes[arrival.service_class] if self.classes else None
        due = arrival.at + service.slo.ttft / 1e3 if service is not None and service.slo.ttft else None
        if due is None and arrival.deadline is not None:
            due = arrival.at + arrival.deadline
        request = _request(index, arrival, due)
        if self._degrading is not None:
            if self._degrading.sheds(request):
                record.error, record.closed = "shed", self.now
                return
            request = self._degrading.degraded(request)
        if self._admits:
            to_end = arrival.deadline is not None or bool(service and service.slo.e2el)
            prediction = self.predict(request, to_end=to_end)
            output = self.scheduler.estimates.output_tokens(request)
            sure = to_end and service is not None and service.guaranteed
            burden, worst = self._burden(request, to_end=sure)
            broken = check_wishes(
                prediction,
                output,
                service,
                elapsed=self.now - arrival.at,
                caution=self._caution.factor,
                end_caution=self._end_caution.factor,
                finish=None if arrival.deadline is None else arrival.at + arrival.deadline - self.now,
                worst=worst,
            )
            if broken is None and (over := self._promises.delay(burden)):
                broken = Broken("deadlines of others", 0.0, over, over)
            if broken is not None and (self.scheduler.has_work() or sure):
                found.refused[index] = broken
                record.error, record.closed = str(broken), self.now
                if self._degrading is not None:
                    self._degrading.refused(self.now)
                return
            found.predicted[index] = self.now - arrival.at + prediction.ttft
            self._promises.admitted(burden)
            if arrival.deadline is not None:
                end, place = prediction.finish(output), None
                if sure:
                    end, output, place = worst, burden.worst.output, burden.place
                left = arrival.at + arrival.deadline - self.now
                self._promises.make(request.request_id, left - end, output, place)
        if self._since is not None or self._has_work():
            late = self._handover.busy
        else:
            late = self._handover.joining if self._late else self._handover.idle
        self._late.append((arrival.at + late, request))
        if self._since is None:
            self._take_in()
        self._note(request, arrival, record)

    def _note(self, request: Request, arrival: Arrival, record: RequestRecord) -> None:
        """What is to be known of a request until it ends."""
        name = request.request_id
        self._live[name], self._records[name] = request, record
        if not arrival.known:
            self._ends[name] = len(arrival.prompt) + arrival.output - 1
        if arrival.deadline is not None:
            self._deadlines[name] = arrival.at + arrival.deadline

    def _take_in(self) -> None:
        """The engine hears of those that have come."""
        late = self._late
        while late and late[0][0] <= self.now:
            self.scheduler.add(late.popleft()[1])

    def _bound(self, request_id: str) -> float | None:
        """The TTFT that a request was admitted with, in seconds."""
        service = self._live[request_id].terms.service_class
        bound = self.classes[service].slo.ttft if self._admits and self.classes else None
        return None if bound is None else bound / 1e3

    def cached(self, arrival: Arrival) -> int:
        """Tokens of a prompt that it need not compute."""
        cache = self.scheduler.caches.find(arrival.tenant)
        if cache is None or not self.scheduler.config.enable_prefix_caching:
            return 0
        key = array("i", arrival.prompt).tobytes()
        return cache.match(key, len(arrival.prompt) - 1, "shared:").length

    def step(self, arrive: Callable[[float], None] = lambda _: None, *, slower: float = 1.0) -> list[int]:
        """Run a step, up to the end of which others may `arrive`; returns the requests that it has ended, by their
        number. It takes longer by what else the machine does, `slower` times."""
        scheduler = self.scheduler
        self._take_in()
        self.steps += 1
        if self._controller is not None:
            self._controller.plan()
        out, features = self._next or self._plan()
        self._next = None
        if scheduler.shares and out.scheduled:
            sampling = sum([row.sample for row in out.scheduled])
            if sampling < scheduler.num_running or scheduler.num_waiting > 0:
                beside = self._plan()
                self._next = beside if beside[0].scheduled else None
        if self._received:
            ends = [row.start + len(row.token_ids) for row in out.scheduled if row.sample]
            features = (float(bool(ends)), len(ends), 0, sum(ends), 0.0, *features[5:])
        if self.seen is not None:
            self.seen(features)
        seconds = slower * self._true(features) * self._factor(features, self.now)
        self.busy += seconds
        self._since, end = self.now, self.now + seconds
        arrive(end)
        self.now, self._since = end, None
        told = max(0.0, seconds - self._between)
        self._ran(features, told)
        return self._answered(out, end - seconds + told)

    def _plan(self) -> _Planned:
        """Schedule a step, and note what it starts."""
        out = self.scheduler.schedule()
        for seq_id in out.gone:
            self._last.pop(seq_id, None)
            self._streams.pop(seq_id, None)
            if self._drafts is not None:
                self._drafts.forget(seq_id)
        if out.new:
            self._flying |= {new.request_id for new in out.new}
            self._streams |= {new.seq_id: self._records[new.request_id].times.append for new in out.new}
            if ends := self._ends:
                self._last |= {new.seq_id: ends[new.request_id] for new in out.new if new.request_id in ends}
        return out, self.scheduler.step_features

    def _ran(self, features: Sequence[float], seconds: float) -> None:
        """What the server learns from a step that has ended."""
        if features[1]:
            self._pace += (seconds - self._pace) * (PACE_MEMORY if self._pace else 1.0)
        if self._learns:
            self.costs.observe(features, seconds)
        if self._controller is not None:
            self._controller.ran(seconds)
        if self._degrading is not None:
            self._started |= self._flying
            if self._degrading.is_due(self.now):
                waiting = [one for name, one in self._live.items() if name not in self._started]
                self._degrading.look(self.now, waiting)
        self._flying = {new.request_id for new in self._next[0].new} if self._next else set()

    def _answered(self, out: SchedulerOutput, now: float) -> list[int]:
        """Give the step its tokens, at some time; returns the requests that have ended."""
        records, scheduled = self._records, out.scheduled
        none: list[LogprobTable | None] = [None] * len(scheduled)
        tokens = [_NEXT if row.logits else _NONE for row in scheduled]
        proposed: dict[int, list[int]] = {}
        if self._drafts is not None:
            tokens, proposed = self._guessed(scheduled, self._drafts)
        if ends := self._last:  # the others end by the limit of their request
            for i, row in enumerate(scheduled):
                left = ends.get(row.seq_id, math.inf) - (row.start + len(row.token_ids) - row.drafts)
                if tokens[i] and len(tokens[i]) > left:
                    tokens[i] = [*tokens[i][: max(0, int(left))], _EOS]
        ended, streams = [], self._streams
        usual: list[int] | None = None if self._drafts is not None or self._admits else []
        events = self.scheduler.update(out, StepOutput(tokens, none, none, drafts=proposed), usual)
        for seq_id in usual or ():
            streams[seq_id](now)
        for event in events:
            record = records[event.request_id]
            times = record.times
            if event.new_token_ids:
                if not times and (bound := self._bound(event.request_id)) is not None:
                    self._caution.answered(late=now - record.scheduled > bound)
                times.append(now)
                if self._drafts is not None:
                    record.counts.append(len(event.new_token_ids))
            if event.finish_reason is not None:
                self._cached[record.index] = event.cached_tokens
                self._left(event.request_id)
                record.finished = record.closed = now
                record.output_tokens, record.output_source = sum(record.counts) or len(times), "server"
                record.finish_reason = str(event.finish_reason)
                ended.append(record.index)
        return ended

    @staticmethod
    def _guessed(
        scheduled: Sequence[ScheduledSeq], walk: DraftWalk
    ) -> tuple[list[list[int]], dict[int, list[int]]]:
        """The tokens of rows that have drafts, and the drafts for their next rows."""
        tokens, proposed = [], {}
        for i, row in enumerate(scheduled):
            right = walk.ran(row.seq_id, row.drafts) if row.logits and len(row.token_ids) == row.logits else 0
            tokens.append([_TOKEN] * (1 + right) if row.logits else _NONE)
            if row.logits and (count := walk.proposed(row.seq_id)):
                proposed[i] = [_TOKEN] * count
        return tokens, proposed

    def _left(self, request_id: str) -> None:
        """A request has ended."""
        del self._live[request_id], self._records[request_id]
        self._ends.pop(request_id, None)
        self._promises.ended(request_id)
        if (due := self._deadlines.pop(request_id, None)) is not None:
            self._end_caution.answered(late=self.now > due)


@lru_cache(maxsize=4096)
def _greedy(most: int) -> SamplingParams:
    """Parameters of up to `most` tokens; checking them takes as long as a step."""
    return SamplingParams(temperature=0.0, max_tokens=most)


def _request(index: int, arrival: Arrival, due: float | None) -> Request:
    return Request(
        request_id=str(index),
        prompt_token_ids=TokenIds(arrival.prompt),
        params=_greedy(arrival.output if arrival.known else max(arrival.most, arrival.output)),
        eos_token_ids=(_EOS,),
        arrival=arrival.at,
        tenant=arrival.tenant,
        terms=ServiceTerms(
            account=arrival.account,
            service_class=arrival.service_class,
            due=due,
            expected_tokens=arrival.output if arrival.known else None,
        ),
    )
