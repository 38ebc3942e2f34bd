"""What the chapters of the lesson show in the engine that serves: each runs requests now and tells what they took."""

from __future__ import annotations

import asyncio
import math
import time
import uuid
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from quire.learn.scene import Chart, ChartSeries, Scene, Table
from quire.planner.figure import Figure
from quire.planner.time_sums import latency
from quire.server.context import ServerContext
from quire.server.exchange import Exchange
from quire.server.pages.timed_answers import TimedAnswer, answered

_STORY = "The cat sat on the"


class Sight(NamedTuple):
    """Something to see: its title, what happens, and how it is run. `run` raises ValueError where there is nothing."""

    title: str
    about: str
    run: Callable[[ServerContext, Exchange], Awaitable[Scene]]


async def _ids(context: ServerContext, text: str, tokens: int) -> list[int]:
    """So many tokens that begin with a text, which repeats."""
    ids = await context.engine.encode(text)
    return (ids * -(-tokens // len(ids)))[:tokens]


def _prompt_tokens(context: ServerContext, share: float, most: int) -> int:
    return max(8, min(most, int(context.engine.card.max_model_len * share)))


async def _token(context: ServerContext, exchange: Exchange) -> Scene:
    seen = await answered(context, exchange, await context.engine.encode(_STORY), 1, logprobs=5)
    if not seen.chances:
        raise ValueError("token: the model ended at once")
    _, *likely = seen.chances[0]  # the chosen one comes first, and again among them
    names = [repr(piece) for piece in context.engine.pieces([one.token_id for one in likely])]
    chances = [math.exp(one.logprob) for one in likely]
    figures = [Figure(name, chance) for name, chance in zip(names, chances, strict=True)]
    figures.append(
        Figure("all others", max(0.0, 1 - sum(chances)), "", f"of {context.engine.card.vocab_size:,} tokens")
    )
    chart = Chart(f'After "{_STORY}"', "bars", "token", "probability", [ChartSeries("now", names, chances)])
    return Scene(figures, [chart])


async def _phases(context: ServerContext, exchange: Exchange) -> Scene:
    length = _prompt_tokens(context, 0.5, 1024)
    ids = await _ids(context, f"{uuid.uuid4()} ", length)  # in no cache
    seen = await answered(context, exchange, ids, 16, to_the_end=True)
    first, rest = seen.times[0], seen.times[-1] - seen.times[0]
    each = rest / max(1, seen.tokens - 1)
    figures = [
        Figure("prompt", length, "tokens", f"{seen.cached} from the cache"),
        Figure("time to the first token", first, "ms"),
        Figure("a token of the prompt", first / (length - seen.cached), "ms"),
        Figure("a token of the answer", each, "ms"),
        Figure(
            "an answer's token takes as long as",
            each * (length - seen.cached) / first,
            "tokens of the prompt",
        ),
    ]
    return Scene(figures)


async def _stream(context: ServerContext, exchange: Exchange) -> Scene:
    seen = await answered(context, exchange, await context.engine.encode(_STORY), 33, to_the_end=True)
    gaps = [after - before for before, after in zip(seen.times, seen.times[1:], strict=False)]
    figures = [Figure("TTFT", seen.times[0], "ms")]
    figures += latency(ttft_ms=seen.times[0], total_ms=seen.times[-1], output=seen.tokens)
    figures += [Figure("the longest gap", max(gaps, default=0.0), "ms"), Figure("E2EL", seen.times[-1], "ms")]
    chart = Chart(
        "Gaps between tokens", "lines", "token", "ms", [ChartSeries("ITL", [*range(2, len(gaps) + 2)], gaps)]
    )
    return Scene(figures, [chart])


async def _batch(context: ServerContext, exchange: Exchange) -> Scene:
    ids = await context.engine.encode(_STORY)
    rows, rates = [], []
    for count in (1, 2, 4, 8):
        began = time.monotonic()
        all_seen = await asyncio.gather(
            *(answered(context, exchange, ids, 32, to_the_end=True) for _ in range(count))
        )
        seconds = time.monotonic() - began
        tokens = sum(one.tokens for one in all_seen)
        tpot = sum((one.times[-1] - one.times[0]) / max(1, one.tokens - 1) for one in all_seen) / count
        rates.append(tokens / seconds)
        rows.append((f"{count}", f"{tokens / seconds:.0f}", f"{tpot:.2f} ms"))
    figures = [
        Figure("tokens a second, one request", rates[0], "tokens/s"),
        Figure("tokens a second, eight together", rates[-1], "tokens/s"),
        Figure("as many times", rates[-1] / rates[0], "×"),
    ]
    return Scene(figures, tables=[Table("Requests together", ("requests", "tokens/s of all", "TPOT"), rows)])


async def _prefix(context: ServerContext, exchange: Exchange) -> Scene:
    length = _prompt_tokens(context, 0.5, 1024)
    ids = await _ids(context, f"{uuid.uuid4()} ", length)
    spaced = [*await context.engine.encode(" "), *ids][:length]
    asked = {"the first time": ids, "again": ids, "with a space before it": spaced}
    seen: dict[str, TimedAnswer] = {
        name: await answered(context, exchange, prompt, 2, to_the_end=True) for name, prompt in asked.items()
    }
    rows = [(name, f"{length}", f"{one.cached}", f"{one.times[0]:.2f} ms") for name, one in seen.items()]
    figures = [Figure(f"from the cache, {name}", one.cached, "tokens") for name, one in seen.items()]
    return Scene(
        figures, tables=[Table("The same prompt", ("asked", "prompt tokens", "from the cache", "TTFT"), rows)]
    )


SIGHTS: dict[str, Sight] = {
    "token": Sight(
        "The next token of this model", f'It reads "{_STORY}" and says what may come next.', _token
    ),
    "phases": Sight(
        "Both phases on this machine", "A prompt that is in no cache, and 16 tokens of an answer.", _phases
    ),
    "stream": Sight("A stream on this machine", "33 tokens, and the time at which each one came.", _stream),
    "batch": Sight(
        "A batch on this machine", "The same request alone, and with others at the same time.", _batch
    ),
    "prefix": Sight(
        "The prefix cache of this server",
        "A new prompt, the same again, and with a space before it.",
        _prefix,
    ),
}
