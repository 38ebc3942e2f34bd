"""Requests that a page has the engine answer now, to show what they take."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import field

from quire.engine.api import GenerateAsk
from quire.logprobs import PositionLogprobs
from quire.objectives import ServiceTerms
from quire.records import dataclass
from quire.server.context import ServerContext
from quire.server.exchange import Exchange
from quire.types import Request, SamplingParams, TokenIds


@dataclass(slots=True)
class TimedAnswer:
    """An answer as it came: a text and a time in ms since the request for each delta, and its tokens."""

    request_id: str
    arrived: float  # of time.monotonic()
    times: list[float] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    tokens: int = 0
    cached: int = 0
    chances: list[PositionLogprobs] = field(default_factory=list)


async def answered(
    context: ServerContext, exchange: Exchange, ids: Sequence[int], tokens: int, *, logprobs: int | None = None,
    to_the_end: bool = False,
) -> TimedAnswer:  # fmt: skip
    """The likeliest answer to a prompt; with `to_the_end` of so many tokens, whatever they are. Counts for the tenant
    as each of its requests does. Raises what the engine raises for a request."""
    engine = context.engine
    seen = TimedAnswer(f"learn-{uuid.uuid4().hex}", time.monotonic())
    request = Request(
        request_id=seen.request_id,
        prompt_token_ids=TokenIds(ids),
        params=SamplingParams(temperature=0.0, max_tokens=tokens, logprobs=logprobs, ignore_eos=to_the_end),
        arrival=seen.arrived,
        tenant=context.tenants.domain(exchange.tenant),
        eos_token_ids=engine.card.eos_token_ids,
        terms=ServiceTerms(account=exchange.tenant),
    )
    stream = engine.generate(GenerateAsk(request=request, tenant=exchange.tenant, keep_output=False))
    async for delta in stream:
        seen.times.append(1e3 * (time.monotonic() - seen.arrived))
        seen.texts.append(delta.text)
        seen.tokens += len(delta.token_ids)
        seen.chances += delta.logprobs or []
    seen.cached = stream.output.usage.cached_tokens
    return seen
