"""What the chapters of the lesson show in the engine that serves: each runs requests now and tells what they took."""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

from quire.learn.next_token import STORY
from quire.learn.scene import Chart, ChartSeries, Scene, Table
from quire.planner.figure import Figure
from quire.planner.time_sums import latency
from quire.server.context import ServerContext
from quire.server.exchange import Exchange
from quire.server.pages.timed_answers import TimedAnswer, answered, likeliest

_NO_LOG = 2**62  # rows of the log that are not wanted


class Sight(NamedTuple):
    """Something to see: its title, what happens, and how it is run. `run` raises ValueError where there is nothing."""

    title: str
    about: str
    run: Callable[[ServerContext, Exchange], Awaitable[Scene]]


async def _stream(context: ServerContext, exchange: Exchange) -> Scene:
    seen = await answered(
        context, exchange, await context.engine.encode(STORY), likeliest(33, to_the_end=True)
    )
    gaps = [after - before for before, after in zip(seen.times, seen.times[1:], strict=False)]
    figures = [Figure("TTFT", seen.times[0], "ms")]
    figures += latency(ttft_ms=seen.times[0], total_ms=seen.times[-1], output=seen.tokens)
    figures += [Figure("the longest gap", max(gaps, default=0.0), "ms"), Figure("E2EL", seen.times[-1], "ms")]
    chart = Chart(
        "Gaps between tokens", "lines", "token", "ms", [ChartSeries("ITL", [*range(2, len(gaps) + 2)], gaps)]
    )
    return Scene(figures, [chart])


async def _batch(context: ServerContext, exchange: Exchange) -> Scene:
    ids = await context.engine.encode(STORY)
    rows, rates = [], []
    for count in (1, 2, 4, 8):
        began = time.monotonic()
        all_seen = await asyncio.gather(
            *(answered(context, exchange, ids, likeliest(32, to_the_end=True)) for _ in range(count))
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


async def _arrivals(context: ServerContext, exchange: Exchange) -> Scene:
    """Requests that come on their own, half a second of them at each rate."""
    ids = await context.engine.encode(STORY)
    rng, rows = random.Random(0), []
    for rate in (4, 16, 64):
        gaps = [rng.expovariate(rate) for _ in range(rate // 2)]
        began = time.monotonic()
        seen = await asyncio.gather(
            *(_after(sum(gaps[: n + 1]), context, exchange, ids) for n in range(rate // 2))
        )
        seconds = time.monotonic() - began
        first = sorted(one.times[0] for one in seen)
        tpot = statistics.fmean((one.times[-1] - one.times[0]) / max(1, one.tokens - 1) for one in seen)
        rows.append(
            (f"{rate}", f"{sum(one.tokens for one in seen) / seconds:.0f}", f"{statistics.fmean(first):.2f} ms",
             f"{first[-1]:.2f} ms", f"{tpot:.2f} ms")
        )  # fmt: skip
    columns = ("requests a second", "tokens/s", "TTFT, mean", "TTFT, longest", "TPOT")
    limit = Figure("requests that run at once, at most", context.engine.card.max_num_seqs)
    return Scene([limit], tables=[Table("Half a second of arrivals, 24 tokens each", columns, rows)])


async def _after(
    seconds: float, context: ServerContext, exchange: Exchange, ids: Sequence[int]
) -> TimedAnswer:
    await asyncio.sleep(seconds)
    return await answered(context, exchange, ids, likeliest(24, to_the_end=True))


async def _blocks(context: ServerContext, exchange: Exchange) -> Scene:
    """The blocks of one request while it runs."""
    engine = context.engine
    ids = await engine.encode(STORY)
    most = min(400, engine.card.max_model_len - len(ids))
    task = asyncio.create_task(answered(context, exchange, ids, likeliest(most, to_the_end=True)))
    seen: dict[int, int] = {}
    while not task.done():
        view = await engine.view(_NO_LOG)
        # Lessons take turns: it is the only one of its kind.
        seen |= {one.tokens: one.blocks for one in view.sequences if one.request_id.startswith("learn-")}
        await asyncio.sleep(0.002)
    await task
    if not seen:
        raise ValueError("blocks: the answer was there before anybody looked; ask again")
    size = engine.stats.block_size
    tokens, blocks = [*seen.items()][-1]
    figures = [
        Figure("a block", size, "tokens"), Figure("tokens, at the last look", tokens), Figure("its blocks", blocks),
        Figure("held and unused", max(0, blocks * size - tokens), "tokens"),  # the latest tokens have no place yet
        Figure("the longest answer set aside", engine.card.max_model_len, "tokens", "as contiguous memory would"),
    ]  # fmt: skip
    chart = Chart(
        "Blocks as the answer grows",
        "lines",
        "tokens",
        "blocks",
        [ChartSeries("held", [*seen], [*seen.values()])],
    )
    return Scene(figures, [chart])


async def _memory(context: ServerContext, _: Exchange) -> Scene:
    """The plan of this server's memory."""
    stats = context.engine.stats
    parts = {name: size for name, size in stats.memory_parts.items() if size}
    if not parts:
        raise ValueError("memory: the engine has not reported its plan yet; ask again")
    figures = [Figure(name.replace("_", " "), size / 2**20, "MiB") for name, size in parts.items()]
    cache = parts.get("kv", 0)
    if cache and stats.blocks:
        figures.append(
            Figure(
                "a token of the cache", cache / stats.blocks / stats.block_size / 1024, "KiB", "all layers"
            )
        )
    chart = Chart(
        "Memory of this server", "bars", "part", "MiB",
        [ChartSeries("planned", [*parts], [size / 2**20 for size in parts.values()])],
    )  # fmt: skip
    return Scene([Figure("planned", sum(parts.values()) / 2**20, "MiB"), *figures], [chart])


SIGHTS: dict[str, Sight] = {
    "stream": Sight("A stream on this machine", "33 tokens, and the time at which each one came.", _stream),
    "batch": Sight("A batch on this machine", "The same request alone, and with others at the same time.", _batch),
    "blocks": Sight("Blocks of a sequence on this server", "An answer grows, and takes blocks as it does.", _blocks),
    "memory": Sight("The memory of this server", "What weights, caches and all else take, as planned.", _memory),
    "arrivals": Sight(
        "Load on this server", "Requests come by chance, half a second long at each of three rates.", _arrivals
    ),
}  # fmt: skip
