"""Requests that a page has the engine answer now, to show what they take."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import field

from quire.core.policy import BACKGROUND
from quire.engine.api import GenerateAsk
from quire.logprobs import PositionLogprobs
from quire.objectives import ServiceTerms
from quire.records import dataclass
from quire.server.context import ServerContext
from quire.server.exchange import Exchange
from quire.types import Request, SamplingParams, TokenIds


@dataclass(slots=True)
class TimedAnswer:
    """An answer as it came: a text and a time in ms since the request for each delta, and the tokens of each sample.
    Of `drafted` tokens that steps ran, `accepted` were right."""

    request_id: str
    arrived: float  # of time.monotonic()
    times: list[float] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    samples: dict[int, list[int]] = field(default_factory=dict)
    cached: int = 0
    drafted: int = 0
    accepted: int = 0
    chances: list[PositionLogprobs] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        """Tokens of all samples."""
        return sum(map(len, self.samples.values()))


def likeliest(tokens: int, *, logprobs: int | None = None, to_the_end: bool = False) -> SamplingParams:
    """Parameters of the likeliest answer; with `to_the_end` of so many tokens, whatever they are."""
    return SamplingParams(temperature=0.0, max_tokens=tokens, logprobs=logprobs, ignore_eos=to_the_end)


async def answered(
    context: ServerContext, exchange: Exchange, ids: Sequence[int], params: SamplingParams, *,
    prediction: Sequence[int] | None = None, speculate: bool = True, background: bool = False,
    deadline: float | None = None,
) -> TimedAnswer:  # fmt: skip
    """The answer to a prompt. Counts for the tenant as each of its requests does. `prediction`, `speculate`: those of
    Request; `background`: all other requests come first; `deadline`: a time of time.monotonic(). Raises what the engine
    raises for a request."""
    engine = context.engine
    seen = TimedAnswer(f"learn-{uuid.uuid4().hex}", time.monotonic())
    request = Request(
        request_id=seen.request_id,
        prompt_token_ids=TokenIds(ids),
        params=params,
        arrival=seen.arrived,
        priority=BACKGROUND if background else 0,
        tenant=context.tenants.domain(exchange.tenant),
        eos_token_ids=engine.card.eos_token_ids,
        terms=ServiceTerms(account=exchange.tenant),
        prediction=None if prediction is None else TokenIds(prediction),
        speculate=speculate,
    )
    stream = engine.generate(
        GenerateAsk(request=request, tenant=exchange.tenant, deadline=deadline, keep_output=False)
    )
    async for delta in stream:
        seen.times.append(1e3 * (time.monotonic() - seen.arrived))
        seen.texts.append(delta.text)
        seen.samples.setdefault(delta.index, []).extend(delta.token_ids)
        seen.chances += delta.logprobs or []
    usage = stream.output.usage
    seen.cached, seen.drafted, seen.accepted = (
        usage.cached_tokens,
        usage.draft_tokens,
        usage.accepted_draft_tokens,
    )
    return seen
