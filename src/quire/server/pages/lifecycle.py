"""Simulation 1: the life of a request, run now by the engine that serves, and told by its log."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence

from quire.engine.api import EngineUnavailableError
from quire.learn.scene import Chart, ChartSeries, Flow, Scene, Table, Value
from quire.planner.figure import Figure
from quire.server.context import ServerContext
from quire.server.exchange import Exchange
from quire.server.pages.timed_answers import answered, likeliest
from quire.steplog.explain import PARTS, explain
from quire.steplog.log_files import read_rows
from quire.steplog.log_rows import AnyRow, Step
from quire.text.chat_renderer import ChatAsk

# Parts of the explanation by stage, in the order of a request. The time of sampling is taken out of "compute".
STAGES = {
    "tokenize": ("receive", "parse", "tokenize"),
    "queue": ("grammar", "memory", "adapter", "handover", "queue", "preempted", "fetch"),
    "compute": ("prefill", "recompute", "other prompts", "decode", "draft", "held back"),
    "sample": (),
    "report": ("engine",),
    "detokenize": ("detokenize", "write", "slow reader", "cancel"),
}
_COMPUTE, _SAMPLE, _REPORT, _DETOKENIZE = range(2, 6)


async def lifecycle(context: ServerContext, exchange: Exchange, values: Mapping[str, Value]) -> Scene:
    """Ask for an answer, and show where its time went: six stages whose sum is the time of the request. Raises
    ValueError if there is none to show."""
    engine, prompt, tokens = context.engine, str(values["prompt"]), int(values["tokens"])
    context.card()
    began = time.monotonic()
    ids = await engine.encode_chat(ChatAsk(messages=[{"role": "user", "content": prompt}]))
    arrived = time.monotonic()
    seen = await answered(context, exchange, ids, likeliest(tokens))
    times, texts = [1e3 * (arrived - began) + at for at in seen.times], seen.texts
    try:
        rows = await asyncio.to_thread(_rows, await engine.log(seen.request_id))
    except EngineUnavailableError as error:
        raise ValueError(f"prompt: {error}") from None
    found = explain(rows, seen.request_id)
    if found is None:
        raise ValueError("prompt: the log of the engine has this request no more; ask for fewer tokens")
    parts = {name: ns / 1e6 for name, ns in found.parts().items()}
    parts["tokenize"] = parts.get("tokenize", 0.0) + 1e3 * (arrived - began)
    told = 1e3 * (arrived - began) + found.total / 1e6
    parts["detokenize"] = parts.get("detokenize", 0.0) + max(0.0, times[-1] - told if times else 0.0)
    stages = {stage: sum(parts.get(name, 0.0) for name in names) for stage, names in STAGES.items()}
    steps = _steps(found.took_part)
    stages["sample"] = min(stages["compute"], sum(end - sampling for _, sampling, end in steps))
    stages["compute"] -= stages["sample"]
    figures = [
        Figure(f"{number}. {stage}", value, "ms") for number, (stage, value) in enumerate(stages.items(), 1)
    ]
    figures += [
        Figure("the request", sum(stages.values()), "ms", f"{found.steps} steps, {len(ids)} prompt tokens"),
        Figure("prompt tokens from the cache", found.cached, "tokens"),
        Figure("of the third stage, the prompt", parts.get("prefill", 0.0), "ms", "prefill, with sampling"),
        Figure("of the third stage, the answer", parts.get("decode", 0.0), "ms", "decode, with sampling"),
    ]
    answer = [
        (str(n), repr(text), f"{at:.2f} ms") for n, (text, at) in enumerate(zip(texts, times, strict=True), 1)
    ]
    bars = Chart("Time by stage", "bars", "stage", "ms", [ChartSeries("time", [*stages], [*stages.values()])])
    spans = [
        (span.part, PARTS[span.part][0], f"{(span.end - span.start) / 1e6:.3f} ms") for span in found.spans[:200]
    ]  # fmt: skip
    line = Chart(
        "Tokens as they come",
        "lines",
        "ms",
        "tokens",
        [ChartSeries("tokens", times, [*range(1, len(times) + 1)])],
    )
    return Scene(
        figures, [bars, line],
        tables=[
            Table("From the third stage it goes round, once a token", ("token", "text", "after"), answer),
            Table("Its life", ("part", "what happened", "time"), spans),
        ],
        flows=[_round(1e3 * began, 1e3 * (arrived - began), steps, times)],
    )  # fmt: skip


def _steps(took_part: Sequence[Step]) -> list[tuple[float, float, float]]:
    """Of each step the times in ms at which it began, began to sample, and ended; they do not overlap."""
    found, before = [], 0.0
    for step in took_part:
        begin, end = max(before, step.at / 1e6), (step.at + step.updated) / 1e6
        found.append((begin, max(begin, end - step.sample / 1e3), end))
        before = end
    return found


def _round(
    zero: float, arrived: float, steps: Sequence[tuple[float, float, float]], times: Sequence[float]
) -> Flow:
    """The stages with their loop, and when each was entered; `arrived` and `times` in ms after `zero`."""
    entered = [(0.0, 0), (arrived, 1)]
    for begin, sampling, end in steps:
        entered += [(begin - zero, _COMPUTE), (sampling - zero, _SAMPLE), (end - zero, _REPORT)]
    entered += [(at, _DETOKENIZE) for at in times]
    arrows = [(at, at + 1, "") for at in range(_DETOKENIZE)]
    return Flow(
        "From the third stage it goes round",
        [f"{number}. {stage}" for number, stage in enumerate(STAGES, 1)],
        [*arrows, (_DETOKENIZE, _COMPUTE, f"once a token: {len(times)} times")],
        sorted(entered),
    )


def _rows(log: bytes) -> list[AnyRow]:
    return read_rows(log).rows if log else []
