"""What simulations show of the engine that serves, behind what lessons print: each runs requests now."""

from __future__ import annotations

import asyncio
import random
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from quire.learn.next_token import STORY, Likely, of_this_model
from quire.learn.scene import Chart, ChartSeries, Scene, Simulation, Table, Value
from quire.learn.this_machine import this_machine
from quire.planner.figure import Figure
from quire.server.context import ServerContext
from quire.server.exchange import Exchange
from quire.server.pages.lifecycle import lifecycle
from quire.server.pages.real_lanes import real_lanes
from quire.server.pages.timed_answers import TimedAnswer, answered, likeliest
from quire.types import MAX_LOGPROBS, QuireError, SamplingParams

_DRAWS = 64
_ANSWER = 64  # tokens
Values = Mapping[str, Value]
Show = Callable[[ServerContext, Exchange, Values], Awaitable[Scene]]


async def shown(context: ServerContext, exchange: Exchange, one: Simulation, values: Values) -> Scene:
    """What a simulation shows on this server. Where its engine takes no requests, what lessons print is there all the
    same. Raises ValueError as `run` of the simulation, or if there is nothing to show."""
    if one.name == "lifecycle":
        return await lifecycle(context, exchange, values)
    show = ON_ENGINE.get(one.name)
    printed = await asyncio.to_thread(one.run, **{**values, **_OFF.get(one.name, {})})
    if show is None:
        return printed
    try:
        context.check_ready()
        async with exchange.watch():  # nobody looks any more: nothing more is run
            seen = await show(context, exchange, values)
    except QuireError as error:
        seen = Scene([], remark=f"This server shows nothing of its own now: {error}.")
    return printed.beside(seen)


async def _next_token(context: ServerContext, exchange: Exchange, values: Values) -> Scene:
    engine = context.engine
    ids = await engine.encode(STORY)
    seen = await answered(context, exchange, ids, likeliest(1, logprobs=MAX_LOGPROBS, to_the_end=True))
    _, *likely = seen.chances[0]  # the chosen one comes first, and again among them
    numbers = [one.token_id for one in likely]
    chosen: dict[str, Any] = dict(values)  # its controls are parameters, by their names
    drawing = SamplingParams(**chosen, max_tokens=1, n=_DRAWS, seed=0, ignore_eos=True)
    drawn = Counter(one[0] for one in (await answered(context, exchange, ids, drawing)).samples.values())
    listed = Likely(
        [repr(piece) for piece in engine.pieces(numbers)],
        [one.logprob for one in likely],
        engine.card.vocab_size,
    )
    counts = [drawn.pop(number, 0) for number in numbers]
    return await asyncio.to_thread(of_this_model, listed, SamplingParams(**chosen), [*counts, drawn.total()])


async def _drafts(context: ServerContext, exchange: Exchange, values: Values) -> Scene:
    """The same answer plainly, with the server's own drafts, and with its own text as a prediction, of which a share of
    1 − α is wrong."""
    if not values["real"]:
        return Scene([])
    ids = await context.engine.encode(STORY)
    params = likeliest(_room(context, len(ids), _ANSWER), to_the_end=True)
    plain = await answered(context, exchange, ids, params, speculate=False)
    rng = random.Random(int(values["seed"]))
    said = plain.samples[0]
    guessed = [
        token if rng.random() < float(values["alpha"]) else (token + 1) % context.engine.card.vocab_size
        for token in said
    ]
    ways = {"plain": plain, "drafts of this server": await answered(context, exchange, ids, params)}
    ways["its text as a prediction"] = await answered(context, exchange, ids, params, prediction=guessed)
    if not ways["drafts of this server"].drafted:
        del ways["drafts of this server"]
    figures, rows = [], []
    for name, one in ways.items():
        steps = one.tokens - one.accepted
        rows.append(
            (name, f"{one.drafted}", f"{one.accepted}", f"{one.drafted - one.accepted}", f"{steps}",
             f"{one.tokens / steps:.2f}", "yes" if one.samples == plain.samples else "no")
        )  # fmt: skip
        figures += [
            Figure(f"this server, {name}: tokens a step", one.tokens / steps),
            Figure(f"this server, {name}: speed-up", plain.times[-1] / one.times[-1], "×", f"{one.times[-1]:.1f} ms"),
        ]  # fmt: skip
    table = Table(
        f"{len(said)} tokens on this server",
        ("way", "drafted", "accepted", "rejected", "steps", "tokens a step", "equal to the plain text"),
        rows,
    )
    return Scene(figures, tables=[table])


async def prefix_hits(
    context: ServerContext, exchange: Exchange, prefix: int, new: int
) -> dict[str, TimedAnswer]:
    """A prefix that no cache has with new tokens behind it, then other new tokens, then all with a space before it."""
    engine = context.engine
    start = await engine.encode(f"{uuid.uuid4()} {STORY}")
    first, second = await engine.encode("What is TTFT?"), await engine.encode("Tell me more.")
    begin = _repeated(start, prefix)
    asked = {
        "a miss": [*begin, *_repeated(first, new)],
        "a hit": [*begin, *_repeated(second, new)],
        "one space before it": [*await engine.encode(" "), *begin, *_repeated(second, new)],
    }
    return {
        name: await answered(context, exchange, ids, likeliest(2, to_the_end=True)) for name, ids in asked.items()
    }  # fmt: skip


async def _cached_prefix(context: ServerContext, exchange: Exchange, values: Values) -> Scene:
    most = _room(context, 8, 2**20)
    new = min(int(values["new"]), most // 4)
    prefix = min(int(values["prefix"]), most - new)
    seen = await prefix_hits(context, exchange, prefix, new)
    miss, hit = seen["a miss"], seen["a hit"]
    chosen = hit if values["cached"] else miss
    figures = [
        Figure("this server: time to the first token", chosen.times[0], "ms", f"prefix of {prefix}, {new} new tokens"),
        Figure("this server: saved", 100 * (1 - hit.times[0] / miss.times[0]), "%"),
    ]  # fmt: skip
    figures += [
        Figure(f"this server: from the cache, {name}", one.cached, "tokens") for name, one in seen.items()
    ]
    chart = Chart(
        "Time to the first token on this server", "bars", "request", "ms",
        [ChartSeries("measured", [*seen], [one.times[0] for one in seen.values()])],
    )  # fmt: skip
    return Scene(figures, [chart])


async def _both_phases(context: ServerContext, exchange: Exchange, values: Values) -> Scene:
    most = _room(context, 8, 2**20)
    output = max(2, min(int(values["output"]), _ANSWER, most // 2))
    prompt = max(8, min(int(values["prompt"]), most - output))
    return await phases_here(context, exchange, prompt, output)


async def phases_here(context: ServerContext, exchange: Exchange, prompt: int, output: int) -> Scene:
    """What a prompt that is in no cache and an answer take on this server."""
    ids = _repeated(await context.engine.encode(f"{uuid.uuid4()} {STORY}"), prompt)
    seen = await answered(context, exchange, ids, likeliest(output, to_the_end=True))
    first, computed = seen.times[0], prompt - seen.cached
    each = (seen.times[-1] - first) / max(1, seen.tokens - 1)
    figures = [
        Figure("this server: prompt", prompt, "tokens", f"{seen.cached} from the cache"),
        Figure("this server: TTFT", first, "ms"),
        Figure("this server: TPOT", each, "ms"),
        Figure("this server: whole request", seen.times[-1], "ms", f"TTFT + {seen.tokens - 1} · TPOT"),
        Figure("this server: a token of the prompt", first / computed, "ms"),
        Figure("this server: an answer's token takes as long as", each * computed / first, "tokens of the prompt"),
    ]  # fmt: skip
    return Scene(figures)


def _room(context: ServerContext, prompt: int, most: int) -> int:
    """Tokens that fit behind a prompt, at most so many."""
    return max(2, min(most, context.engine.card.max_model_len - prompt))


def _repeated(ids: Sequence[int], tokens: int) -> list[int]:
    """So many tokens that repeat these."""
    return [*ids, *[*ids] * (tokens // len(ids))][:tokens]


async def _machine(_: ServerContext, __: Exchange, ___: Values) -> Scene:
    return await asyncio.to_thread(this_machine)


ON_ENGINE: dict[str, Show] = {
    "decode-loop": _next_token, "phases": _both_phases, "memory-hierarchy": _machine, "speculation": _drafts,
    "prefix-cache": _cached_prefix, "batching": real_lanes,
}  # fmt: skip
_OFF: dict[str, Values] = {"speculation": {"real": False}}  # what the engine shows is no matter of the rest
