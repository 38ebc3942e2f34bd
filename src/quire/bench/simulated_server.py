"""The engine's scheduler, cost model, controller and admission on a virtual clock, before a machine of known costs.

What decides is the code that serves: Scheduler, StepController, core.forecast and core.admission_rules. What is
simulated is time: a step takes what a formula says, with noise, and the cost model has to learn it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import field, replace
from functools import partial

from quire.bench.timeline import RequestRecord
from quire.core.admission_rules import Broken, Caution, check_wishes
from quire.core.controller import StepController
from quire.core.cost_model import StepCostModel
from quire.core.forecast import Demand, Forecast, Live, outlook
from quire.core.scheduler import Scheduler
from quire.core.scheduler_config import SchedulerConfig
from quire.objectives import ServiceClass, ServiceTerms
from quire.records import dataclass
from quire.types import Request, SamplingParams, StepOutput, TokenIds

StepTime = Callable[[Sequence[float]], float]


def _summed(costs: Sequence[float], features: Sequence[float]) -> float:
    return sum(x * cost for x, cost in zip(features, costs, strict=True))


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request that comes after `at` seconds. `known`: the server knows the length of its output."""

    at: float
    prompt: Sequence[int]
    output: int
    service_class: int = 0
    account: str = ""
    known: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedRun:
    """What came of a run. `predicted` has the TTFT of admitted requests as they were predicted, by their number."""

    records: list[RequestRecord]
    predicted: dict[int, float] = field(default_factory=dict)
    refused: dict[int, Broken] = field(default_factory=dict)
    steps: int = 0
    preemptions: int = 0
    hit_share: float = 0.0
    cost_error: float = 0.0
    length_error: float = 0.0


class SimulatedServer:
    """One run. `costs` are the true seconds by cost_model.FEATURES, or a function of these; `noise` is the standard
    deviation of a step's time, relative. Without `admits` everything is queued, without `controls` all steps have the
    limits of the config.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        costs: Sequence[float] | StepTime,
        classes: Sequence[ServiceClass] = (),
        *,
        admits: bool = False,
        controls: bool = False,
        noise: float = 0.03,
        seed: int = 0,
    ) -> None:
        self.costs, self.classes = StepCostModel(), tuple(classes)
        self.scheduler = Scheduler(config, random.Random(seed), costs=self.costs)
        self._true = costs if callable(costs) else partial(_summed, costs)
        self._noise, self._rng = noise, random.Random(f"noise {seed}")
        self._admits = admits
        self._controller = StepController(self.scheduler, classes, self.costs) if controls else None
        self._caution = Caution()
        self._live: dict[str, Request] = {}
        self.now = 0.0
        self._tokens = config.num_blocks * config.block_size // len(config.groups)

    def run(
        self, arrivals: Sequence[Arrival], look: Callable[[SimulatedServer], None] = lambda _: None
    ) -> SimulatedRun:
        """Serve all; `look` is called after each step."""
        scheduler = self.scheduler
        order = sorted(range(len(arrivals)), key=lambda i: arrivals[i].at)
        found = SimulatedRun(
            records=[RequestRecord(index=i, scheduled=one.at) for i, one in enumerate(arrivals)]
        )
        added = steps = 0
        while added < len(order) or scheduler.has_work():
            while added < len(order) and arrivals[order[added]].at <= self.now:
                self._add(order[added], arrivals[order[added]], found)
                added += 1
            if scheduler.has_work():
                self._step(found.records)
                steps += 1
                look(self)
            elif added < len(order):
                self.now = arrivals[order[added]].at
        stats = scheduler.prefix_stats
        return replace(
            found,
            steps=steps,
            preemptions=scheduler.num_preemptions,
            hit_share=stats.hit_tokens / max(1, stats.queried_tokens),
            cost_error=self.costs.error,
            length_error=scheduler.estimates.error,
        )

    def predict(self, request: Request, most: float = 600.0) -> Forecast:
        """The times of a request that would be added now."""
        scheduler = self.scheduler
        config, limits = scheduler.config, scheduler.limits
        computed = {seq.state.request.request_id: seq for seq in scheduler.running}
        lives = []
        for one in self._live.values():
            seq = computed.get(one.request_id)
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
        )

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
        return Live(self.scheduler.policy.place(request, lengths), computed > 0, work)

    def _add(self, index: int, arrival: Arrival, found: SimulatedRun) -> None:
        record = found.records[index]
        record.sent, record.input_tokens, record.input_source = self.now, len(arrival.prompt), "server"
        service = self.classes[arrival.service_class] if self.classes else None
        due = arrival.at + service.slo.ttft / 1e3 if service is not None and service.slo.ttft else None
        request = Request(
            request_id=str(index),
            prompt_token_ids=TokenIds(arrival.prompt),
            params=SamplingParams(temperature=0.0, max_tokens=arrival.output, ignore_eos=True),
            arrival=arrival.at,
            terms=ServiceTerms(
                account=arrival.account,
                service_class=arrival.service_class,
                due=due,
                expected_tokens=arrival.output if arrival.known else None,
            ),
        )
        if self._admits:
            prediction = self.predict(request)
            output = self.scheduler.estimates.output_tokens(request)
            broken = check_wishes(
                prediction, output, service, elapsed=self.now - arrival.at, caution=self._caution.factor
            )
            if broken is not None and self.scheduler.has_work():
                found.refused[index] = broken
                record.error, record.closed = str(broken), self.now
                return
            found.predicted[index] = self.now - arrival.at + prediction.ttft
        self.scheduler.add(request)
        self._live[request.request_id] = request

    def _bound(self, request_id: str) -> float | None:
        """The TTFT that a request was admitted with, in seconds."""
        service = self._live[request_id].terms.service_class
        bound = self.classes[service].slo.ttft if self._admits and self.classes else None
        return None if bound is None else bound / 1e3

    def _step(self, records: list[RequestRecord]) -> None:
        scheduler = self.scheduler
        if self._controller is not None:
            self._controller.plan()
        out = scheduler.schedule()
        features = scheduler.step_features
        seconds = self._true(features) * max(0.5, self._rng.gauss(1, self._noise))
        self.now += seconds
        self.costs.observe(features, seconds)
        if self._controller is not None:
            self._controller.ran(seconds)
        rows = len(out.scheduled)
        tokens = [[1] if row.sample else [] for row in out.scheduled]
        for event in scheduler.update(out, StepOutput(tokens, [None] * rows, [None] * rows)):
            record = records[int(event.request_id)]
            if event.new_token_ids:
                bound = self._bound(event.request_id)
                if bound is not None and not record.times:
                    self._caution.answered(late=self.now - record.scheduled > bound)
                record.times.append(self.now)
                record.counts.append(len(event.new_token_ids))
            if event.finish_reason is not None:
                del self._live[event.request_id]
                record.finished = record.closed = self.now
                record.output_tokens, record.output_source = sum(record.counts), "server"
                record.finish_reason = str(event.finish_reason)
