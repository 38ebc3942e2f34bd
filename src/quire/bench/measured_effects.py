"""What each technique of serving changes on this machine: an engine with it and one without run the same work in turns.

A figure is the median over rounds, in which both run one after the other, so that a slow moment of the machine is in
both. Prompts are random tokens. Each engine has a cache of its own; both map the same weights where these are packed.
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from quire import _native
from quire.bench.engine_run import BenchEngine, Prompts, open_bench_model
from quire.bench.technique_effects import TechniqueEffect
from quire.config import env
from quire.config.schema import EngineConfig
from quire.core.scheduler_config import SchedulerConfig
from quire.engine.api import Engine, GenerateAsk
from quire.engine.build.budget import options_of
from quire.engine.front.serving_engine import serving_engine
from quire.planner.deployment import LoadDemand
from quire.planner.formulas import attention_traffic_bytes
from quire.planner.shapes import PREFIX
from quire.records import dataclass
from quire.spec.model import MoE
from quire.types import QuireError, Request, SamplingParams, TokenIds
from quire.util.platform import usable_cores

HERE = "measured here"
_STREAMS, _REQUESTS = 4, 12
_LONGEST_PROMPT, _LONGEST_OUTPUT = 512, 48  # more would only take longer
_BLOCK, _TILE, _HEAD_DIM = 16, 64, 64
_SWAP = 256 * 2**20
_NUMBERS = itertools.count()  # of requests


@dataclass(frozen=True, slots=True)
class MeasuredWork:
    """The model (as for `quire bench`), tokens of a prompt and of an answer, those that prompts share, and rounds."""

    model: str
    prompt: int
    output: int
    shared: int
    rounds: int = 3

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence: a prompt and four answers, in whole blocks."""
        return -(-(self.prompt + 4 * self.output + 1) // _BLOCK) * _BLOCK


def work_of(model: str, demand: LoadDemand, shared: int, rounds: int = 3) -> MeasuredWork:
    """The work for a load: its lengths, bounded."""
    prompt = max(2 * _BLOCK, min(demand.prompt, _LONGEST_PROMPT))
    share = shared / demand.prompt if shared else 0.5
    output = max(8, min(demand.output, _LONGEST_OUTPUT))
    return MeasuredWork(model, prompt, output, min(prompt - 1, max(_BLOCK, round(share * prompt))), rounds)


def measured_effects(
    work: MeasuredWork, announce: Callable[[str], None] = lambda _: None
) -> Iterator[TechniqueEffect]:
    """The twelve techniques; `announce` hears the name of each before it is measured. One that this model or machine
    does not have says why, and has no factor."""
    for name, measure in _TECHNIQUES.items():
        announce(name)
        try:
            factor, says = measure(work)
        except (QuireError, ValueError) as error:
            factor, says = None, str(error)
        yield TechniqueEffect(name=name, factor=factor, says=says, source=HERE)


def _asked(work: MeasuredWork, options: dict[str, Any]) -> EngineConfig:
    given: dict[str, Any] = {"blocks": _STREAMS * work.longest // _BLOCK, "block_size": _BLOCK} | options
    limits = SchedulerConfig(
        num_blocks=given.pop("blocks"), block_size=given["block_size"], max_num_seqs=_STREAMS,
        max_model_len=work.longest, enable_prefix_caching=False,
    )  # fmt: skip
    plain = options_of(limits)
    del plain["max_num_batched_tokens"]  # the engine's own
    return EngineConfig(**(plain | given))


def _engine(work: MeasuredWork, options: dict[str, Any]) -> BenchEngine:
    """An engine of the model in this process, with these options and so many `blocks`."""
    return BenchEngine(work.model, _asked(work, options), tokenizer=False)


def _rate(engine: BenchEngine, prompts: list[list[int]], outputs: list[int]) -> float:
    """Output tokens a second, of requests that come together."""
    run = engine.run(prompts, outputs)
    return run.output_tokens / run.seconds


def _first_token(engine: BenchEngine, prompt: list[int]) -> float:
    """Seconds to the first token of a prompt that comes alone."""
    (seconds,) = engine.run([prompt], [2]).first_tokens()
    return seconds


_Measure = Callable[[BenchEngine, Prompts], float]


def _pair(
    work: MeasuredWork, options: dict[str, Any], without: dict[str, Any], measure: _Measure
) -> tuple[float, float]:
    """The medians of a figure with some options and without them. The same prompts, new ones in each round."""
    with _engine(work, options) as one, _engine(work, without) as other:
        found: tuple[list[float], list[float]] = [], []
        for number in range(work.rounds + 1):
            for engine, figures in zip((one, other), found, strict=True):
                figures.append(measure(engine, Prompts(engine.program.vocab, number)))
        return statistics.median(found[0][1:]), statistics.median(found[1][1:])  # the first touches memory


def _rates(
    work: MeasuredWork, options: dict[str, Any], without: dict[str, Any], streams: int, instead: str
) -> tuple[float, str]:
    """What options change about the output tokens a second of so many streams."""

    def measure(engine: BenchEngine, prompts: Prompts) -> float:
        return _rate(engine, prompts.make(streams, work.prompt), [work.output] * streams)

    one, other = _pair(work, options, without, measure)
    return one / other, f"{one:,.1f} tokens/s, not {other:,.1f} {instead}"


def _skewed(engine: BenchEngine, work: MeasuredWork, prompts: Prompts, seed: int = 1) -> float:
    """The rate of answers whose lengths differ: exponential, at most four times the mean."""
    drawn = np.random.default_rng(seed).exponential(work.output, _REQUESTS)
    lengths = [min(4 * work.output, max(1, int(length))) for length in drawn]
    return _rate(engine, prompts.make(_REQUESTS, work.prompt), lengths)


def _batching(work: MeasuredWork) -> tuple[float, str]:
    one, other = _pair(
        work, {}, {"batching": "static"}, lambda engine, prompts: _skewed(engine, work, prompts)
    )
    return (
        one / other,
        f"{one:,.1f} tokens/s, not {other:,.1f} in whole batches, answers of exponential length",
    )


def _tiles(work: MeasuredWork) -> tuple[float, str]:
    rng, tokens = np.random.default_rng(0), work.prompt
    q, k, v = (rng.standard_normal((tokens, _HEAD_DIM), np.float32) for _ in range(3))
    out, core = np.empty_like(q), _native.Executor(env.isa(), 1)
    moved = 4 * _native.attend_tiles(
        core,
        q.ctypes.data,
        k.ctypes.data,
        v.ctypes.data,
        out.ctypes.data,
        tokens,
        _HEAD_DIM,
        min(_TILE, tokens),
    )
    naive = attention_traffic_bytes(1, tokens, 4) + 4 * 4 * tokens * _HEAD_DIM
    return naive / moved, (
        f"the kernel has counted {moved / 2**10:,.0f} KiB that a head moves for {tokens} tokens, not "
        f"{naive / 2**10:,.0f}"
    )


def _paging(work: MeasuredWork) -> tuple[float, str]:
    runs = {"block_size": work.longest, "blocks": _STREAMS, "max_num_seqs": _REQUESTS}
    blocks = {"max_num_seqs": _REQUESTS}
    one, other = _pair(work, blocks, runs, lambda engine, prompts: _skewed(engine, work, prompts))
    return one / other, (
        f"{one:,.1f} tokens/s, not {other:,.1f} with {_STREAMS} runs of {work.longest} tokens in the same memory"
    )


def _speculation(work: MeasuredWork) -> tuple[float, str]:
    factor, says = _rates(work, {"speculate": "ngram"}, {}, 1, "without prompt lookup")
    return factor, f"{says}; drafts of a model: quire bench speculation"


def _quantization(work: MeasuredWork) -> tuple[float, str]:
    return _rates(work, {"quantization": "int8"}, {"quantization": "none"}, 1, "in the weights' own format")


def _divisible_cores() -> int:
    if (cores := usable_cores()) < 2:
        raise ValueError("one processor cannot be divided")
    return cores


def _ranks(work: MeasuredWork, option: str, streams: int, **more: Any) -> tuple[float, str]:
    cores = _divisible_cores()
    half = {"threads": cores // 2, option: 2, **more}
    return _rates(work, half, {"threads": cores}, streams, f"of one rank with all {cores} processors")


def _experts(work: MeasuredWork) -> tuple[float, str]:
    model, _ = open_bench_model(work.model, EngineConfig(), tokenizer=False)
    if not any(isinstance(layer.mlp, MoE) for layer in model.facts.spec.layers):
        raise ValueError("the model has no experts")
    cut = {"threads": max(1, usable_cores() // 2), "tensor_parallel_size": 2}
    return _rates(work, cut | {"enable_expert_parallel": True}, cut, _STREAMS, "with each expert cut in two")


def _replicas(work: MeasuredWork) -> tuple[float, str]:
    """Engines in processes of their own, as a server has them."""
    cores = _divisible_cores()
    if work.model.startswith(PREFIX):
        raise ValueError("an engine of another process has no random weights: name a checkpoint")
    two, one = asyncio.run(_replica_rates(work))
    return two / one, f"{two:,.1f} tokens/s, not {one:,.1f} of one engine with all {cores} processors"


async def _replica_rates(work: MeasuredWork) -> tuple[float, float]:
    found: tuple[list[float], list[float]] = [], []
    places = {
        "max_num_seqs": 2 * _STREAMS,
        "blocks": 2 * _STREAMS * work.longest // _BLOCK,
    }  # as both together
    each = {"data_parallel_size": 2}, places
    engines = [serving_engine(work.model, _asked(work, options)) for options in each]
    try:
        for engine in engines:
            await engine.start()
        for number in range(work.rounds + 1):
            for engine, rates in zip(engines, found, strict=True):
                prompts = Prompts(engine.card.vocab_size, number).make(_REQUESTS, work.prompt)
                began = time.perf_counter()
                await asyncio.gather(*(_answered(engine, prompt, work.output) for prompt in prompts))
                rates.append(_REQUESTS * work.output / (time.perf_counter() - began))
    finally:
        for engine in engines:
            await engine.stop(drain_seconds=0)
    return statistics.median(found[0][1:]), statistics.median(found[1][1:])  # the first touches memory


async def _answered(engine: Engine, prompt: list[int], length: int) -> None:
    params = SamplingParams(temperature=0, max_tokens=length, ignore_eos=True)
    request = Request(
        request_id=f"measured-{next(_NUMBERS)}", prompt_token_ids=TokenIds(prompt), params=params,
        arrival=time.monotonic(),
    )  # fmt: skip
    stream = engine.generate(GenerateAsk(request=request))
    try:
        async for _ in stream:
            pass
    finally:
        stream.cancel()


def _prefixes(work: MeasuredWork) -> tuple[float, str]:
    def measure(engine: BenchEngine, prompts: Prompts) -> float:
        (start,) = prompts.make(1, work.shared)
        own = prompts.make(4, work.prompt - work.shared)
        return statistics.median([_first_token(engine, start + rest) for rest in own][1:])

    found, computed = _pair(work, {"enable_prefix_caching": True}, {}, measure)
    return computed / found, (
        f"TTFT {1e3 * found:.2f} ms, not {1e3 * computed:.2f}, with {work.shared} of {work.prompt} tokens shared"
    )


def _interference(work: MeasuredWork) -> tuple[float, str]:
    with _engine(work, {}) as engine:
        prompts, lengths = Prompts(engine.program.vocab, 0), [4 * work.output, *[1] * (_STREAMS - 1)]
        quiet, held = [], []
        for _ in range(work.rounds + 1):
            mixed = [*prompts.make(1, _BLOCK), *prompts.make(_STREAMS - 1, work.prompt)]
            steps = engine.run(mixed, lengths, ahead=4).steps[1:]
            quiet.append(statistics.median(step.wall for step in steps if step.kind == "decode"))
            held.append(max(step.wall for step in steps if step.kind != "decode"))
    gap, longest = statistics.median(quiet[1:]), statistics.median(held[1:])
    return longest / gap, (
        f"a stream waits at most {1e3 * longest:.2f} ms for a token where {1e3 * gap:.2f} ms is usual: prompts are "
        "computed in its steps. What moving a cache costs: quire plan --details"
    )


def _offloading(work: MeasuredWork) -> tuple[float, str]:
    """The second time of a prompt whose blocks gave way: out of the swap space, and computed again."""
    room = {"blocks": work.longest // _BLOCK + 1, "enable_prefix_caching": True}

    def measure(engine: BenchEngine, prompts: Prompts) -> float:
        mine, *others = prompts.make(4, work.prompt)
        for prompt in (mine, *others):
            _first_token(engine, prompt)
        return _first_token(engine, mine)

    back, again = _pair(work, room | {"swap_space": _SWAP}, room, measure)
    return again / back, (
        f"TTFT {1e3 * back:.2f} ms, not {1e3 * again:.2f}, of a prompt of {work.prompt} tokens that gave way"
    )


_TECHNIQUES: dict[str, Callable[[MeasuredWork], tuple[float, str]]] = {
    "continuous batching": _batching,
    "FlashAttention": _tiles,
    "PagedAttention": _paging,
    "speculative decoding": _speculation,
    "quantization": _quantization,
    "tensor parallelism": lambda work: _ranks(work, "tensor_parallel_size", 1),
    "pipeline parallelism": lambda work: _ranks(work, "pipeline_parallel_size", _STREAMS),
    "data parallelism": _replicas,
    "expert parallelism": _experts,
    "prefix caching": _prefixes,
    "PD disaggregation": _interference,
    "KV offloading": _offloading,
}
