"""The counts behind /metrics: quire_* names, and vLLM's and TGI's names for dashboards and gateways that know those.

Definitions (docs/server.md): times of a request count from the arrival of its headers; an inter-token gap is the time
between two deliveries of tokens of one sample to this process. Label sets are fixed: routes, HTTP methods, status
codes, finish reasons.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence

from quire.engine.api import Engine, GenerateAsk
from quire.outputs import RequestOutput
from quire.records import dataclass
from quire.server.exchange import Exchange
from quire.server.histogram import Histogram
from quire.server.tenant_access import TenantDirectory
from quire.types import FinishReason

FINE = (0.0001, 0.00025, 0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1,
         0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0)  # fmt: skip
_VLLM_TTFT = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0,
              80.0, 160.0, 640.0, 2560.0)  # fmt: skip
_VLLM_GAP = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0,
             80.0)  # fmt: skip
_VLLM_REQUEST = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0,
                 960.0, 1920.0, 7680.0)  # fmt: skip
_SAMPLES = (1.0, 2.0, 5.0, 10.0, 20.0)
_METHODS = frozenset(("GET", "HEAD", "POST", "OPTIONS", "PUT", "DELETE", "PATCH"))


def _decades(top: int = 10**6) -> tuple[float, ...]:
    """1, 2, 5, 10, 20, 50, … up to `top`."""
    return tuple(float(m * 10**e) for e in range(7) for m in (1, 2, 5) if m * 10**e <= top)


@dataclass(frozen=True, slots=True)
class Named:
    """One histogram under its two names, each with its own buckets."""

    histogram: Histogram
    quire: tuple[str, Sequence[float]]
    vllm: tuple[str, Sequence[float]]
    text: str
    older: str = ""  # its former name in vLLM


def _named(
    quire: str, vllm: str, fine: Sequence[float], coarse: Sequence[float], text: str, older: str = ""
) -> Named:
    return Named(Histogram(sorted({*fine, *coarse})), (quire, fine), (vllm, coarse), text, older)


COMPILE = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)


class GrammarCounts:
    """Requests with structured output by kind: enforced, refused, and what compiling took."""

    def __init__(self) -> None:
        self.requests: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self.hits = 0  # of the cache of compiled grammars
        self.seconds = Histogram(COMPILE)

    def count(self, kind: str, seconds: float) -> None:
        """Count a grammar that was compiled in `seconds`, or was known: 0."""
        self.requests[kind] += 1
        if seconds:
            self.seconds.observe(seconds)
        else:
            self.hits += 1


class ToolServerCounts:
    """Requests to tool servers, by server, kind and what became of them: "failed" says the tool, "error" its server.
    Their time, by server.
    """

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, str, str]] = Counter()
        self.seconds: dict[str, Histogram] = {}

    def count(self, server: str, what: str, outcome: str, seconds: float) -> None:
        """Count a request that has ended."""
        self.requests[server, what, outcome] += 1
        self.seconds.setdefault(server, Histogram(FINE)).observe(seconds)


@dataclass(frozen=True, slots=True)
class SimulatorCheck:
    """How far the simulator was from what was measured, by the figure, for so many requests; `at` by time.time()."""

    errors: Mapping[str, float]
    requests: int
    at: float


# What an output hook made of a chunk; the last two failed.
HOOK_OUTCOMES = ("kept", "changed", "ended", "timeout", "error")


class ServerMetrics:
    """All that /metrics reports. An observation takes well under a microsecond; sums are computed when scraped."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.tenants: TenantDirectory | None = None  # once there is a context
        named = self.histograms = _request_histograms()
        self.first_token = named["ttft"].histogram
        self.observe_gap = named["itl"].histogram.observe  # one object for all streams
        self.mean_per_token = Histogram(FINE)  # TGI's: of all tokens, with the prefill in the first
        self.validation = Histogram(FINE)  # TGI's: from the body to the tokens of the prompt
        self.finished: Counter[str] = Counter()
        self.hooked: Counter[str] = Counter()  # chunks by what the output hook made of them
        self.tokens: Counter[str] = Counter()
        self.refused_tickets = 0  # of prompts that other servers computed
        self.adapter_tokens: Counter[tuple[str, str]] = Counter()  # by name and kind
        self.grammars = GrammarCounts()
        self.tools = ToolServerCounts()
        self.simulator: SimulatorCheck | None = None  # the latest one, if there was enough to check
        self.http: Counter[tuple[str, str, str]] = Counter()
        self.http_seconds: dict[tuple[str, str], Histogram] = {}
        self.http_bytes: Counter[tuple[str, str]] = Counter()

    def count(
        self, exchange: Exchange, asks: Sequence[GenerateAsk], outputs: Sequence[RequestOutput]
    ) -> None:
        """Count a generation that has ended, for whatever reason."""
        adapter = exchange.served.name if exchange.served is not None and exchange.served.digest else ""
        for ask, output in zip(asks, outputs, strict=False):
            if adapter:
                self.adapter_tokens[adapter, "prompt"] += output.usage.prompt_tokens
                self.adapter_tokens[adapter, "generation"] += output.usage.completion_tokens
            for sample in output.outputs:
                self.finished[str(sample.finish_reason or FinishReason.ABORT)] += 1
            self.tokens["prompt"] += output.usage.prompt_tokens
            self.tokens["cached"] += output.usage.cached_tokens
            self.tokens["generation"] += output.usage.completion_tokens
            self.tokens["reasoning"] += output.usage.reasoning_tokens
            self._observe_request(exchange, ask, output)

    def _observe_request(self, exchange: Exchange, ask: GenerateAsk, output: RequestOutput) -> None:
        seen: dict[str, float] = {
            "prompt_tokens": output.usage.prompt_tokens,
            "generation_tokens": output.usage.completion_tokens,
            "max_generation_tokens": max((len(s.token_ids) for s in output.outputs), default=0),
            "n": ask.request.params.n,
        }
        if ask.request.params.max_tokens is not None:
            seen["max_tokens"] = ask.request.params.max_tokens
        if exchange.received:
            self.validation.observe(max(0.0, exchange.compiled - exchange.received))
        times = output.timings
        if output.finished and times.first_token and times.finished:
            decoded = output.usage.completion_tokens - len(output.outputs)
            decode = times.finished - times.first_token
            seen |= {
                "e2e": times.finished - exchange.turn,
                "queue": times.scheduled - times.arrival,
                "prefill": times.first_token - times.scheduled,
                "decode": decode,
                "inference": times.finished - times.scheduled,
            }
            if output.usage.completion_tokens:
                self.mean_per_token.observe(max(0.0, seen["inference"]) / output.usage.completion_tokens)
            if decoded > 0:
                seen["tpot"] = decode * len(output.outputs) / decoded
        for name, value in seen.items():
            self.histograms[name].histogram.observe(max(0.0, value))

    def count_http(self, exchange: Exchange) -> None:
        """Count a request that was answered or whose client left (status 499)."""
        method = exchange.method if exchange.method in _METHODS else "OTHER"
        handler = exchange.handler or "none"
        self.http[handler, method, str(exchange.status or 499)] += 1
        if (handler, method) not in self.http_seconds:
            self.http_seconds[handler, method] = Histogram(FINE)
        self.http_seconds[handler, method].observe(time.monotonic() - exchange.arrival)
        self.http_bytes[handler, "request"] += exchange.bytes_in
        self.http_bytes[handler, "response"] += exchange.bytes_out


def _request_histograms() -> dict[str, Named]:
    decades = _decades()
    return {
        "ttft": _named("quire_time_to_first_token_seconds", "vllm:time_to_first_token_seconds", FINE, _VLLM_TTFT,
                       "headers received to first token"),
        "itl": _named("quire_inter_token_latency_seconds", "vllm:inter_token_latency_seconds", FINE, _VLLM_GAP,
                      "time between two tokens of one sample", "vllm:time_per_output_token_seconds"),
        "tpot": _named("quire_request_time_per_output_token_seconds", "vllm:request_time_per_output_token_seconds",
                       FINE, _VLLM_GAP, "mean time per token after the first"),
        "e2e": _named("quire_e2e_request_latency_seconds", "vllm:e2e_request_latency_seconds", FINE, _VLLM_REQUEST,
                      "headers received to last token"),
        "queue": _named("quire_request_queue_time_seconds", "vllm:request_queue_time_seconds", FINE, _VLLM_REQUEST,
                        "admission to first step"),
        "prefill": _named("quire_request_prefill_time_seconds", "vllm:request_prefill_time_seconds", FINE,
                          _VLLM_REQUEST, "first step to first token"),
        "decode": _named("quire_request_decode_time_seconds", "vllm:request_decode_time_seconds", FINE,
                         _VLLM_REQUEST, "first token to last"),
        "inference": _named("quire_request_inference_time_seconds", "vllm:request_inference_time_seconds", FINE,
                            _VLLM_REQUEST, "first step to last token"),
        "prompt_tokens": _named("quire_request_prompt_tokens", "vllm:request_prompt_tokens", decades, decades,
                                "prompt tokens per request"),
        "generation_tokens": _named("quire_request_generation_tokens", "vllm:request_generation_tokens", decades,
                                    decades, "generated tokens per request"),
        "max_generation_tokens": _named("quire_request_max_num_generation_tokens",
                                        "vllm:request_max_num_generation_tokens", decades, decades,
                                        "generated tokens of the longest sample of a request"),
        "max_tokens": _named("quire_request_params_max_tokens", "vllm:request_params_max_tokens", decades, decades,
                             "requested max_tokens"),
        "n": _named("quire_request_params_n", "vllm:request_params_n", _SAMPLES, _SAMPLES, "requested samples"),
    }  # fmt: skip
