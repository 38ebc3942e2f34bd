"""The counts of a router, and their text for Prometheus."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from quire.router.backends import Backends
from quire.router.dividing import FALLBACKS, Dividing
from quire.routing.difficulty import DifficultyJudgement
from quire.server.exchange import Exchange
from quire.server.fleet.shadows import Shadows
from quire.server.histogram import Histogram
from quire.server.metrics import FINE
from quire.server.tenant_access import TenantDirectory
from quire.server.tenant_metrics import limit_families

if TYPE_CHECKING:
    from quire.router.semantic_cache import SemanticCache

_LEARNING = 0.02  # weight of the newest answer in the confidence


class RouterMetrics(Collector):
    """Requests by outcome, servers by state, and how well the prediction of caches holds."""

    def __init__(
        self,
        backends: Backends,
        dividing: Dividing,
        shadows: Shadows,
        tenants: TenantDirectory,
        semantic: SemanticCache | None = None,
    ) -> None:
        self._backends, self._dividing, self._shadows, self._tenants = backends, dividing, shadows, tenants
        self._semantic = semantic
        self.http: Counter[tuple[str, str]] = Counter()  # by route and status
        self.first_byte = Histogram(FINE)
        self.retried = self.cut_off = self.resumed = self.resumed_by_ids = self.hedged = self.hedges_won = 0
        self.other_weights = 0
        self.fallbacks: Counter[tuple[str, str]] = (
            Counter()
        )  # by model that failed, and model that was asked then
        self.judged: Counter[tuple[str, str]] = Counter()  # by name, and model that was chosen
        self.suffices: defaultdict[tuple[str, str], float] = defaultdict(float)
        self._prompt = self._cached = self._predicted = 0.0  # tokens of answers that say what was cached
        self.confidence = 0.0  # until answers say what was cached, nothing is known
        self._registry = CollectorRegistry()
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    def count(self, exchange: Exchange) -> None:
        """Count a request that has ended."""
        self.http[exchange.handler or "other", str(exchange.status)] += 1

    def judge(self, judged: DifficultyJudgement) -> None:
        """Count a request whose model was chosen by its difficulty."""
        self.judged[judged.rule, judged.target] += 1
        self.suffices[judged.rule, judged.target] += judged.suffices

    def compare(self, predicted: float, usage: dict[str, int]) -> None:
        """Compare the predicted cached tokens of a prompt with those that its answer reports."""
        prompt = usage["prompt_tokens"]
        cached, predicted = float(usage.get("cached_tokens", 0)), min(predicted, float(prompt))
        self._prompt += prompt
        self._cached += cached
        self._predicted += predicted
        if prompt:
            right = 1.0 - min(abs(predicted - cached) / prompt, 1.0)
            self.confidence += (_LEARNING if self.confidence else 1.0) * (right - self.confidence)

    def render(self) -> bytes:
        """The text of all metrics."""
        return generate_latest(self._registry)

    def describe(self) -> Iterator[Metric]:
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """The current value of every metric family."""
        now = time.monotonic()
        requests = CounterMetricFamily(
            "quire_router_requests", "requests by route and status", labels=["route", "status"]
        )
        for labels, count in self.http.items():
            requests.add_metric(labels, count)
        yield requests
        yield from (*self._servers(now), self._rests(), *self._reports())
        family = HistogramMetricFamily(
            "quire_router_first_byte_seconds", "time until a server begins its answer"
        )
        family.add_metric([], self.first_byte.buckets(FINE), self.first_byte.total)
        yield family
        for name, value, text in (
            ("retries", self.retried, "requests sent to another server after one failed"),
            ("hedged", self.hedged, "requests sent to a second server because the first one was late"),
            ("hedges_won", self.hedges_won, "of them answered by the second server"),
            ("resumed", self.resumed, "streams that went on with another server"),
            ("resumed_by_ids", self.resumed_by_ids, "of them behind the token ids of their output so far"),
            (
                "other_weights",
                self.other_weights,
                "answers that were not passed on, of other weights than the rest",
            ),
            (
                "weights_changes",
                self._backends.settled.changes,
                "times that a model got other weights for its clients",
            ),
            ("cut_off", self.cut_off, "answers that ended because their server was lost"),
            ("prompt_tokens", self._prompt, "prompt tokens of answers that report their usage"),
            ("cached_tokens", self._cached, "of them cached, as the servers report"),
            ("predicted_cached_tokens", self._predicted, "of them cached, as predicted"),
        ):
            yield CounterMetricFamily(f"quire_router_{name}", text, value=value)
        yield from (
            *self._divided(),
            *self._ruled(),
            *self._scaling(now),
            *self._by_questions(),
            self._skewed(),
        )
        yield from limit_families(self._tenants, {})
        yield GaugeMetricFamily(
            "quire_router_routing_confidence",
            "share of prompt tokens whose caching was known right, times the share of the servers with events whose "
            "events are not lost; 0: nothing is known",
            value=self.confidence * self._backends.reporting,
        )

    def _servers(self, now: float) -> Iterator[Metric]:
        """Of each server: what it has to do, and what became of that."""
        up = GaugeMetricFamily(
            "quire_router_backend_up", "1 for a server that may get requests", labels=["backend"]
        )
        running = GaugeMetricFamily(
            "quire_router_backend_requests", "requests that a server has", labels=["backend"]
        )
        work = GaugeMetricFamily(
            "quire_router_backend_work",
            "predicted work that a server has, in prompt tokens",
            labels=["backend"],
        )
        answers = CounterMetricFamily(
            "quire_router_backend_answers",
            "requests by what became of them on a server",
            labels=["backend", "outcome"],
        )
        for each in self._backends.all:
            up.add_metric([each.name], float(each.is_available(now)))
            running.add_metric([each.name], each.requests)
            work.add_metric([each.name], each.work)
            for outcome in ("answered", "refused", "failed"):
                answers.add_metric([each.name, outcome], each.answers[outcome])
        yield from (up, running, work, answers)

    def _rests(self) -> Metric:
        """Of servers that fail, or are far worse than others."""
        rests = CounterMetricFamily(
            "quire_router_backend_rests",
            "times that a server was to get no requests for a while, by why",
            labels=["backend", "why"],
        )
        for each in self._backends.all:
            for why in ("failures", "failing", "slow"):
                rests.add_metric([each.name, why], each.rested[why])
        return rests

    def _skewed(self) -> Metric:
        """Of models with several versions of their weights."""
        family = GaugeMetricFamily(
            "quire_router_skewed_models", "versions of the weights of a model that servers have, if several",
            labels=["model"],
        )  # fmt: skip
        for model, versions in self._backends.skewed().items():
            family.add_metric([model], len(versions))
        return family

    def _scaling(self, now: float) -> Iterator[Metric]:
        """Of servers that come and go."""
        for name, level, text in (
            ("held_requests", float(self._backends.held), "requests that wait until a server is available"),
            ("replicas_needed", self._backends.replicas_needed(now),
             "servers that the load needs for its service level, by forecast; the sum over routers, rounded up"),
            ("prefill_backlog_seconds", self._backends.backlog_seconds(),
             "time until the prompts that wait are computed by the servers that there are"),
        ):  # fmt: skip
            yield GaugeMetricFamily(f"quire_router_{name}", text, value=level)

    def _by_questions(self) -> Iterator[Metric]:
        """Of answers to questions that are nearly the same."""
        if (cache := self._semantic) is None:
            return
        requests = CounterMetricFamily(
            "quire_router_semantic_requests", "chats by what the semantic cache did", labels=["outcome"]
        )
        for outcome in cache.OUTCOMES:
            requests.add_metric([outcome], cache.outcomes[outcome])
        yield requests
        yield GaugeMetricFamily(
            "quire_router_semantic_answers", "answers that are kept", value=len(cache.answers)
        )
        yield GaugeMetricFamily(
            "quire_router_semantic_bytes", "bytes that they and their vectors take", value=cache.answers.held
        )
        yield CounterMetricFamily(
            "quire_router_semantic_evicted", "answers that made room for others", value=cache.answers.evicted
        )

    def _ruled(self) -> Iterator[Metric]:
        """Of requests for names with rules."""
        fallbacks = CounterMetricFamily(
            "quire_router_fallbacks",
            "requests sent to another model after one failed",
            labels=["model", "next"],
        )
        for models, count in self.fallbacks.items():
            fallbacks.add_metric(models, count)
        shadows = CounterMetricFamily(
            "quire_router_shadow_requests",
            "copies of requests for a shadow, by what came of the comparison",
            labels=["model", "shadow", "outcome"],
        )
        for pair, report in self._shadows.reports.items():
            counts = {"equal": report.equal, "different": report.compared - report.equal,
                      "failed": report.failed, "skipped": report.skipped}  # fmt: skip
            for outcome, count in counts.items():
                shadows.add_metric([*pair, outcome], count)
        judged = CounterMetricFamily(
            "quire_router_difficulty_requests",
            "requests whose model was chosen by their difficulty",
            labels=["model", "target"],
        )
        suffices = CounterMetricFamily(
            "quire_router_difficulty_suffices",
            "sum of the probabilities that the small model suffices, of these requests",
            labels=["model", "target"],
        )
        for names, count in self.judged.items():
            judged.add_metric(names, count)
            suffices.add_metric(names, self.suffices[names])
        yield from (fallbacks, shadows, judged, suffices)

    def _divided(self) -> Iterator[Metric]:
        """Of prompts that one server computed and another one answered."""
        dividing = self._dividing
        for name, value, text in (
            ("divided_requests", dividing.divided, "requests whose prompt another server has computed"),
            ("divided_prompt_tokens", dividing.tokens, "tokens of these prompts"),
            ("prefill_seconds", dividing.seconds, "time until such prompts were computed"),
        ):
            yield CounterMetricFamily(f"quire_router_{name}", text, value=value)
        fallbacks = CounterMetricFamily(
            "quire_router_prefill_fallbacks", "prompts that could not be computed elsewhere", labels=["why"]
        )
        for why in FALLBACKS:
            fallbacks.add_metric([why], dividing.fallbacks[why])
        yield fallbacks
        costs = GaugeMetricFamily(
            "quire_router_prompt_token_seconds",
            "what a token of a prompt takes to be computed, and to be moved, as answers have shown",
            labels=["what"],
        )
        costs.add_metric(["compute"], dividing.costs.compute)
        costs.add_metric(["move"], dividing.costs.move)
        yield costs

    def _reports(self) -> Iterator[Metric]:
        current = GaugeMetricFamily(
            "quire_router_backend_reports",
            "1 for a server of which it is known what it has cached, by its events; 0: they are lost",
            labels=["backend"],
        )
        resyncs = CounterMetricFamily(
            "quire_router_backend_resyncs", "times that events of a server were lost", labels=["backend"]
        )
        for each in self._backends.all:
            if each.follower is not None and each.follower.offered:
                current.add_metric([each.name], float(each.follower.current))
                resyncs.add_metric([each.name], each.follower.resyncs)
        yield from (current, resyncs)
