"""What requests may expect: predictions of their times, and refusals of those whose wishes cannot be kept.

Uses the cost model that the engine process reports, and what this process knows of live requests: how much of their
prompts is computed, and how many tokens they have. See core.forecast and core.admission_rules.
"""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from quire.config.live import LiveConfig
from quire.config.schema import SchedulerOptions
from quire.core.admission_rules import LATE_DEADLINES, Broken, Burden, Caution, Promises, check_wishes
from quire.core.cost_model import FEATURES, StepCostModel, bend_of, worst_margin
from quire.core.forecast import PACE_MEMORY, Demand, Forecast, Live, outlook
from quire.core.given_output import first_tokens, mean_given, new_tokens
from quire.core.guarantees import Price, StepRoom, worst_demand
from quire.core.scheduler_config import SchedulerConfig
from quire.core.service_estimates import ServiceEstimates
from quire.core.step_sharing import CHUNK
from quire.engine.api import EngineStats, GenerateAsk, WouldBeLateError
from quire.engine.front.stream import LiveRequest
from quire.engine.front.token_gaps import TokenGaps
from quire.engine.host.messages import SAMPLE_BITS, SAMPLE_MASK, StepReport
from quire.engine.policies import named_policies
from quire.objectives import ServiceClass, parse_classes
from quire.outputs import RequestOutput
from quire.types import Request, SamplingParams, TokenIds

_LEAST_STEPS = 64  # before the cost model may refuse anything
_MOST_SECONDS = 600.0
_FOLLOW, _RARELY = 1.05, 1.25  # by which running medians move: of times at every step, and at rare ones
_WINDOW_SECONDS = 60.0  # of the goodput
_NOTHING = Burden((), Price(0.0, 0.0, 0.0), Price(0.0, 0.0, 0.0))


class Outlook:
    """Belongs to one engine; only the event loop uses it."""

    def __init__(self, facts: SchedulerConfig, options: SchedulerOptions) -> None:
        self.classes = parse_classes(options.slo)
        self._refuses = options.admission == "predict"
        self._facts = facts
        self._policies = facts.policies()
        self._lengths = ServiceEstimates()
        self._stats = EngineStats()
        self._costs: tuple[float, ...] = ()
        self._pace = 0.0  # seconds of recent steps
        self._since: float | None = None  # when the running step began, if one runs
        # Seconds, as running medians: between two steps, and where the second one starts a request; from the end of a
        # step until it is heard of; until an idle engine begins, and what its first step takes more than others.
        self._gap = self._joining = self._delay = 2e-4
        self._waking, self._cold = 5e-4, 1e-3
        self._woken: float | None = None  # when an idle engine got the request that it has not begun with
        self._cautions = [Caution() for _ in range(max(1, len(self.classes)))]
        self._end_caution, self._promises = Caution(LATE_DEADLINES), Promises()
        self._weighed = "", _NOTHING, 0.0  # the request checked last: what it takes, and its latest end
        self._tokens = facts.num_blocks * facts.block_size // len(facts.groups)
        self.kept = Counter({one.name: 0 for one in self.classes})  # class -> requests that met its level
        self.missed = Counter(
            {one.name: 0 for one in self.classes}
        )  # class -> requests that did not, with those refused
        self._recent: deque[tuple[float, str]] = deque()  # end and class of those that met it
        self._gaps: dict[str, TokenGaps] = {}  # of live requests whose class has an ITL, by their id

    def configure(self, facts: SchedulerConfig, live: LiveConfig) -> None:
        """Go by another configuration from now on. Counts of classes that there are no more stay."""
        self.classes = parse_classes(live.slo)
        self._refuses = live.admission == "predict"
        self._policies = facts.policies()
        self._gaps.clear()  # they know on which side of another bound they are
        count = max(1, len(self.classes))
        self._cautions = [*self._cautions, *(Caution() for _ in range(count))][:count]
        for one in self.classes:
            self.kept[one.name] += 0
            self.missed[one.name] += 0

    def effect(
        self, live: LiveConfig, prompt: int, lives: Iterable[LiveRequest], stats: EngineStats
    ) -> dict[str, float] | None:
        """What a configuration would do to `lives`: see Engine.predict. Its classes of service are left out."""
        self._take(stats)
        if stats.steps < _LEAST_STEPS or not self._costs:
            return None
        policy = named_policies(live.scheduling_policy, live.slo, live.overtake_ms)
        found = list(lives)
        others = [replace(self._live(one), place=policy.place(one.request, self._lengths)) for one in found]
        rows = min(live.max_num_seqs, sum(one.started for one in others))
        keys = sum(one.work.computed for one in others if one.started and not one.work.prompt)
        probe = Request(
            request_id="",
            prompt_token_ids=TokenIds([0] * prompt),
            params=SamplingParams(),
            arrival=time.monotonic(),
        )
        each, budget, slots = self._costs, live.max_num_batched_tokens, live.max_num_seqs
        predicted = outlook(
            each,
            others,
            Live(policy.place(probe, self._lengths), False, Demand(prompt, 0, self._lengths.output_tokens(probe))),
            budget=budget, slots=slots, tokens=self._tokens, most=_MOST_SECONDS, bends=stats.step_bends,
            turns=self._facts.takes_turns,
        )  # fmt: skip
        if self._facts.takes_turns:
            rows, keys, budget = -(-rows // 2), -(-keys // 2), min(budget, -(-rows // 2) + CHUNK)
        chunk = max(0, budget - rows)
        step = each[0] + each[1] * rows + each[2] * chunk + each[3] * keys + each[4] * chunk * chunk / 2
        return {"largest_step_seconds": step, "ttft_seconds": predicted.ttft, "tpot_seconds": predicted.tpot}

    def _take(self, stats: EngineStats) -> None:
        if (
            stats.step_costs != self._costs
            and len(stats.step_costs) == len(FEATURES)
            and any(stats.step_costs)
        ):
            self._costs = stats.step_costs
            self._lengths.costs = StepCostModel(stats.step_costs)
        steps = stats.steps - self._stats.steps
        if steps > 0:
            recent = (stats.step_seconds - self._stats.step_seconds) / steps
            self._pace += (recent - self._pace) * (1 - (1 - PACE_MEMORY) ** steps if self._pace else 1.0)
        elif steps < 0:  # another engine process
            self._pace = 0.0
        self._stats = stats

    def stepped(self, step: StepReport, now: float, *, busy: bool) -> None:
        """A step has ended; `busy`: the next one began then."""
        gap = step.start - self._since if self._since is not None else -1.0
        if self._woken is not None:
            self._waking = _followed(self._waking, step.start - self._woken, _RARELY)
            if self._costs:
                each = self._costs
                usual = each[0] + each[1] * step.decode_tokens + each[2] * step.prefill_tokens
                usual *= bend_of(self._stats.step_bends, step.decode_tokens, step.prefill_tokens)
                self._cold = _followed(self._cold, step.end - step.start - usual, _RARELY)
            self._woken = None
        elif gap >= 0 and step.started:
            self._joining = _followed(self._joining, gap, _RARELY)
        elif gap >= 0:
            self._gap = _followed(self._gap, gap, _FOLLOW)
        self._delay = _followed(self._delay, now - step.end, _FOLLOW)
        self._since = step.end if busy else None

    def place(self, request: Request) -> tuple[float, float, float]:
        """Where a request waits; see Policy.place."""
        self._lengths.arrived(request)
        return self._policies.place(request, self._lengths)

    def check(
        self, ask: GenerateAsk, lives: Iterable[LiveRequest], now: float, stats: EngineStats
    ) -> Forecast | None:
        """The predicted times of a request, if they are asked for or needed; None before steps have been seen.
        `stats` is the engine's latest report.

        Raises WouldBeLateError, saying what cannot be kept and what is predicted.
        """
        request, service = ask.request, self._class_of(ask.request)
        wishes = (
            ask.deadline is not None or ask.queue_deadline is not None or (service and service.slo.bounds)
        )
        if not (wishes or ask.predicted or self._promises) or stats.steps < _LEAST_STEPS:
            return None
        self._take(stats)
        if not self._costs:
            return None
        found = list(lives)
        others = [self._live(live) for live in found]
        output = self._lengths.new_tokens(request)
        ends = ask.deadline is not None or bool(service and service.slo.e2el)
        prediction = self._predict(request, output, others, now, to_end=ends)
        sure = ends and service is not None and service.guaranteed
        burden, worst = self._burden(request, found, to_end=sure)
        if ask.predicted is not None:
            ask.predicted(now - request.arrival + prediction.ttft)
        broken = check_wishes(
            prediction,
            output,
            service,
            elapsed=now - request.arrival,
            waited=now - (request.arrival if ask.since is None else ask.since),
            start=None if ask.queue_deadline is None else ask.queue_deadline - now,
            finish=None if ask.deadline is None else ask.deadline - now,
            caution=self._cautions[self._index(request)].factor,
            end_caution=self._end_caution.factor,
            worst=worst,
        )
        if broken is None and (over := self._promises.delay(burden)):
            broken = Broken("deadlines of others", 0.0, over, over)
        # A request that would be alone is late for no fault of others, and refusing it frees nothing; but a guarantee
        # is given only where it can be kept.
        if broken is not None and self._refuses and (others or sure):
            if service is not None:
                self.missed[service.name] += 1
            raise WouldBeLateError(self._explain(broken, service), broken.wait, prediction.ttft)
        self._weighed = request.request_id, burden, worst
        return prediction

    def admitted(self, ask: GenerateAsk, prediction: Forecast | None, now: float) -> None:
        """A request was admitted, with this prediction if there is one."""
        request = ask.request
        if self._since is None:
            self._woken, self._since = now, now + self._waking
        if prediction is None or self._weighed[0] != request.request_id:
            return
        _, burden, worst = self._weighed
        self._promises.admitted(burden)
        if ask.deadline is not None:
            output, end, place = burden.expected.output, prediction.finish(burden.expected.output), None
            if worst:
                output, end, place = burden.worst.output, worst, burden.place
            self._promises.make(request.request_id, ask.deadline - now - end, output, place)

    def left(self, name: str, *, late: bool) -> None:
        """A request has ended or was cancelled, `late` if its deadline has passed."""
        self._gaps.pop(name, None)
        if name in self._promises:
            self._promises.ended(name)
            self._end_caution.answered(late=late)

    def _burden(
        self, request: Request, lives: Sequence[LiveRequest], *, to_end: bool
    ) -> tuple[Burden, float]:
        """See Promises.weigh."""
        stats, most = self._stats, self._most(request) - mean_given(request)
        room = StepRoom(
            stats.step_budget or self._facts.max_num_batched_tokens,
            stats.step_slots or self._facts.max_num_seqs,
            self._tokens,
            self._facts.takes_turns,
        )
        burden, end = self._promises.weigh(
            Live(self._policies.place(request, self._lengths), False, Demand(first_tokens(request), 0, most)),
            self._lengths.new_tokens(request),
            (work for live in lives for work in self._worst(live)),
            (self._costs[0] + self._gap, *self._costs[1:]),
            room,
            margin=worst_margin(stats.step_cost_spread, stats.step_bends),
            rows=request.params.n,
            to_end=to_end,
            most=_MOST_SECONDS,
        )
        return burden, end + self._waking + self._cold + 2 * self._delay if to_end else 0.0

    def _worst(self, live: LiveRequest) -> Iterator[Live]:
        """The samples of a request, each with all the tokens that it may get, and nothing from the cache."""
        request, prompt = live.request, first_tokens(live.request)
        most, started = self._most(request) - mean_given(request), bool(live.output.timings.scheduled)
        for index, sample in enumerate(live.output.outputs):
            done = prompt if index else live.prompt_done  # the others share the prompt of the first
            made = new_tokens(request, index, len(sample.token_ids))
            yield Live(live.place, started, worst_demand(prompt, done, made, most))

    def _most(self, request: Request) -> float:
        """The most tokens that a sample may get."""
        return float(request.params.max_tokens or self._facts.max_model_len - len(request.prompt_token_ids))

    def came(
        self, rows: Sequence[int], news: Sequence[Sequence[int]], lives: Mapping[int, LiveRequest], now: float
    ) -> None:
        """Tokens of a step have come. Costs nothing where no class has an ITL."""
        if not any(one.slo.itl for one in self.classes):
            return
        for row, new in zip(rows, news, strict=True):
            live = lives.get(row >> SAMPLE_BITS)
            service = self._class_of(live.request) if live is not None and new else None
            if live is not None and service is not None and service.slo.itl:
                gaps = self._gaps.setdefault(live.request_id, TokenGaps(service.slo.itl / 1e3))
                gaps.came(row & SAMPLE_MASK, len(new), now)

    def ended(self, request: Request, output: RequestOutput) -> None:
        """A request has ended by itself: count whether its class kept its level, by the rule of `quire bench`."""
        gaps = self._gaps.get(request.request_id)
        self.left(request.request_id, late=False)
        tokens, times = output.usage.completion_tokens, output.timings
        self._lengths.ended(request, tokens // max(1, len(output.outputs)))
        service = self._class_of(request)
        if service is None or not times.first_token:
            return
        after = tokens // max(1, len(output.outputs)) - int(mean_given(request)) - 1
        tpot = (times.finished - times.first_token) / after if after > 0 else None
        seen = {
            "ttft": times.first_token - times.arrival,
            "tpot": tpot,
            "itl": gaps.percentile() if gaps is not None else None,
            "e2el": times.finished - times.arrival,
        }
        late = service.slo.missed(seen)
        if service.slo.ttft:
            self._cautions[self._index(request)].answered(late="ttft" in late)
        if late:
            self.missed[service.name] += 1
        else:
            self.kept[service.name] += 1
            self._recent.append((times.finished, service.name))

    def add_to(self, stats: EngineStats) -> EngineStats:
        """The engine's report with how levels were kept; the goodput is that of the last minute."""
        if not self.classes:
            return stats
        return replace(
            stats, level_kept=dict(self.kept), level_missed=dict(self.missed), goodput=self._goodput()
        )

    def _goodput(self) -> dict[str, float]:
        now = time.monotonic()
        while self._recent and self._recent[0][0] < now - _WINDOW_SECONDS:
            self._recent.popleft()
        found = Counter(name for _, name in self._recent)
        return {service.name: found[service.name] / _WINDOW_SECONDS for service in self.classes}

    def _predict(
        self, request: Request, output: float, others: Iterable[Live], now: float, *, to_end: bool
    ) -> Forecast:
        stats = self._stats
        prompt = first_tokens(request)
        left = max(1, prompt - int(prompt * stats.prefix_hit_tokens / max(1, stats.prefix_queried_tokens)))
        work = Demand(left, prompt - left, output)
        # Commands are read between steps: one that is there before the next step begins is still a part of it.
        elapsed = None if self._since is None else now + self._delay - self._since
        begins = 0.0 if elapsed is None else max(0.0, -elapsed if self._woken else self._gap - elapsed)
        found = outlook(
            (self._costs[0] + self._gap, *self._costs[1:]),
            others,
            Live(self._policies.place(request, self._lengths), False, work),
            budget=stats.step_budget or self._facts.max_num_batched_tokens,
            slots=stats.step_slots or self._facts.max_num_seqs,
            tokens=self._tokens,
            most=_MOST_SECONDS,
            pace=self._pace,
            elapsed=None if begins else elapsed,
            to_end=to_end,
            bends=stats.step_bends,
            turns=self._facts.takes_turns,
        )
        beside = begins + 2 * self._delay + self._joining - self._gap  # there and back, and between the steps
        if elapsed is None:
            beside = self._waking + self._delay
        if elapsed is None or self._woken is not None:
            beside += self._cold
        return replace(found, ttft=found.ttft + beside)

    def _live(self, live: LiveRequest) -> Live:
        output, request = live.output, live.request
        made = max(new_tokens(request, i, len(one.token_ids)) for i, one in enumerate(output.outputs))
        prompt = first_tokens(request)
        left = 0 if made else max(1, prompt - live.prompt_done)
        expected = max(1.0, self._lengths.new_tokens(request) - made)
        work = Demand(left, prompt - left + made, expected)
        late = self._since is not None and request.arrival > self._since
        return Live(live.place, bool(output.timings.scheduled), work, late)

    def _index(self, request: Request) -> int:
        return min(request.terms.service_class, len(self._cautions) - 1)

    def _class_of(self, request: Request) -> ServiceClass | None:
        return self.classes[self._index(request)] if self.classes else None

    def _explain(self, broken: Broken, service: ServiceClass | None) -> str:
        wait = f"try again in {math.ceil(broken.wait * 10) / 10:.1f} s"
        if broken.what == "deadlines of others":
            return f"it would make others miss their promised deadlines; {wait}"
        text = f"{broken}; {wait}"
        if "_" in broken.what and math.isfinite(broken.predicted):
            least = (
                math.ceil(broken.predicted * 1e3) + 1
            )  # the same request takes some microseconds more or less
            return f"{text}, or with {broken.what} {least} or more"
        lower = [one.name for one in self.classes[self.classes.index(service) + 1 :]] if service else []
        return f"{text}, or with service_tier {lower[-1]}" if lower else text


def _followed(median: float, seen: float, factor: float) -> float:
    """A running median after one more value."""
    return max(1e-6, median * (factor if seen > median else 1 / factor))
