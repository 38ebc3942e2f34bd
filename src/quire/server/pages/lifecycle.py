"""Simulation 1: the life of a request, run now by the engine that serves, and told by its log."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Mapping

from quire.engine.api import EngineUnavailableError, GenerateAsk
from quire.learn.scene import Chart, ChartSeries, Scene, Table, Value
from quire.objectives import ServiceTerms
from quire.planner.figure import Figure
from quire.server.context import ServerContext
from quire.server.exchange import Exchange
from quire.steplog.explain import PARTS, explain
from quire.steplog.log_files import read_rows
from quire.steplog.log_rows import AnyRow
from quire.text.chat_renderer import ChatAsk
from quire.types import Request, SamplingParams, TokenIds

# Parts of the explanation by stage, in the order of a request; the rest of a step's time is with its decoding.
STAGES = {
    "tokenize": ("receive", "parse", "tokenize"),
    "queue": ("grammar", "memory", "adapter", "handover", "queue", "preempted", "fetch"),
    "prefill": ("prefill", "recompute", "other prompts"),
    "decode": ("decode", "draft", "held back"),
    "report": ("engine",),
    "detokenize": ("detokenize", "write", "slow reader", "cancel"),
}


async def lifecycle(context: ServerContext, exchange: Exchange, values: Mapping[str, Value]) -> Scene:
    """Ask for an answer, and show where its time went: six stages whose sum is the time of the request. Raises
    ValueError if there is none to show."""
    engine, prompt, tokens = context.engine, str(values["prompt"]), int(values["tokens"])
    context.card()
    began = time.monotonic()
    ids = await engine.encode_chat(ChatAsk(messages=[{"role": "user", "content": prompt}]))
    arrived = time.monotonic()
    request = Request(
        request_id=f"learn-{uuid.uuid4().hex}",
        prompt_token_ids=TokenIds(ids),
        params=SamplingParams(temperature=0.0, max_tokens=tokens),
        arrival=arrived,
        tenant=context.tenants.domain(exchange.tenant),
        eos_token_ids=engine.card.eos_token_ids,
        terms=ServiceTerms(account=exchange.tenant),
    )
    times: list[float] = []
    texts: list[str] = []
    async for delta in engine.generate(
        GenerateAsk(request=request, tenant=exchange.tenant, keep_output=False)
    ):
        times.append(1e3 * (time.monotonic() - began))
        texts.append(delta.text)
    try:
        rows = await asyncio.to_thread(_rows, await engine.log())
    except EngineUnavailableError as error:
        raise ValueError(f"prompt: {error}") from None
    found = explain(rows, request.request_id)
    if found is None:
        raise ValueError("prompt: the log of the engine has this request no more; ask for fewer tokens")
    parts = {name: ns / 1e6 for name, ns in found.parts().items()}
    parts["tokenize"] = parts.get("tokenize", 0.0) + 1e3 * (arrived - began)
    told = 1e3 * (arrived - began) + found.total / 1e6
    parts["detokenize"] = parts.get("detokenize", 0.0) + max(0.0, times[-1] - told if times else 0.0)
    stages = {stage: sum(parts.get(name, 0.0) for name in names) for stage, names in STAGES.items()}
    figures = [
        Figure(f"{number}. {stage}", value, "ms") for number, (stage, value) in enumerate(stages.items(), 1)
    ]
    figures += [
        Figure("the request", sum(stages.values()), "ms", f"{found.steps} steps, {len(ids)} prompt tokens"),
        Figure("prompt tokens from the cache", found.cached, "tokens"),
    ]
    answer = [
        (str(n), repr(text), f"{at:.2f} ms") for n, (text, at) in enumerate(zip(texts, times, strict=True), 1)
    ]
    bars = Chart("Time by stage", "bars", "stage", "ms", [ChartSeries("time", [*stages], [*stages.values()])])
    spans = [
        (span.part, PARTS[span.part][0], f"{(span.end - span.start) / 1e6:.3f} ms") for span in found.spans[:200]
    ]  # fmt: skip
    return Scene(
        figures, [bars],
        tables=[
            Table("From the fourth stage it goes round, once a token", ("token", "text", "after"), answer),
            Table("Its life", ("part", "what happened", "time"), spans),
        ],
    )  # fmt: skip


def _rows(log: bytes) -> list[AnyRow]:
    return read_rows(log).rows if log else []
