"""What the engine promises, on the real machine: predicted times to the first token, and what swapping wins.

    python -m benchmarks.promises ttft [--load 0.5] [--requests 100] [--traces ../shared/data/traces] [--trace NAME]
    python -m benchmarks.promises swap [--repeat 3]

`ttft`: requests of a trace at their times, scaled as in benchmarks.scheduling, to an engine in a process of its own;
output lengths are known. Each TTFT, from arrival, is compared with what was predicted on arrival. A request has company
if others came before its first token. The first 40 requests teach the cost model and do not count.

`swap`: a prompt is computed, others push it out of the cache into the swap space, and it comes again: its blocks copied
back, computed anew, or as the engine chooses. Seconds to its first token, medians.

The model has random weights in the shape of smollm2-135m, weights in int8.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from threading import Thread

from benchmarks.scheduling import TRACES, arrivals

from quire.bench.random_checkpoint import write_checkpoint
from quire.bench.simulated_server import Arrival
from quire.bench.statistics import percentile
from quire.bench.traces import read_trace
from quire.config.schema import EngineConfig
from quire.engine.api import GenerateAsk
from quire.engine.build.assemble import build
from quire.engine.build.opening import open_model
from quire.engine.front.async_engine import AsyncEngine
from quire.engine.sync_engine import SyncEngine
from quire.planner import shapes
from quire.records import dataclass
from quire.types import Request, SamplingParams, TokenIds

WARM = 40
CONTEXTS = (32, 64, 128, 256, 512, 1024, 2048)
POOL = 2560  # tokens


@dataclass(frozen=True, slots=True)
class Seen:
    """A request: when it arrived, and its predicted and real TTFT, in seconds. 0: there was no prediction."""

    arrival: float
    predicted: float
    real: float


async def ask(engine: AsyncEngine, number: int, one: Arrival, due: asyncio.Event) -> Seen:
    await due.wait()
    params = SamplingParams(temperature=0, max_tokens=one.output, ignore_eos=True)
    said: list[float] = []
    arrival = time.monotonic()
    request = Request(
        request_id=str(number), prompt_token_ids=TokenIds(one.prompt), params=params, arrival=arrival
    )
    first = 0.0
    async for _ in engine.generate(GenerateAsk(request=request, predicted=said.append)):
        first = first or time.monotonic()
    return Seen(arrival, said[0] if said else 0.0, first - arrival)


async def served(model: Path, asked: Sequence[Arrival]) -> list[Seen]:
    """Serve all at their times by a new engine."""
    config = EngineConfig(
        memory=3 * 2**30, quantization="int8", max_num_seqs=32, max_num_batched_tokens=512, max_model_len=4096
    )
    engine = AsyncEngine(model, config)
    await engine.start()
    due = [asyncio.Event() for _ in asked]
    loop, begin = asyncio.get_running_loop(), time.monotonic()

    def arrive() -> None:
        for one, event in zip(asked, due, strict=True):
            time.sleep(max(0.0, begin + one.at - time.monotonic()))
            loop.call_soon_threadsafe(event.set)

    # Timers of the event loop go by milliseconds from the latest step: arrivals would keep time with the steps.
    Thread(target=arrive, daemon=True).start()
    try:
        return await asyncio.gather(*(ask(engine, i, one, due[i]) for i, one in enumerate(asked)))
    finally:
        await engine.stop(0.0)


def show_errors(name: str, load: float, seen: list[Seen]) -> None:
    counted = sorted((one for one in seen if one.predicted), key=lambda one: one.arrival)[WARM:]
    errors: dict[bool, list[float]] = {False: [], True: []}
    for one in counted:
        company = any(one.arrival < other.arrival < one.arrival + one.real for other in seen)
        errors[company].append(abs(one.predicted / one.real - 1))
    groups = [sorted(errors[False] + errors[True]), sorted(errors[False]), sorted(errors[True])]
    cells = [
        f"{len(found)}: {percentile(found, 50):.0%}, {percentile(found, 90):.0%}" if found else "0"
        for found in groups
    ]
    ttft = statistics.median(one.real for one in counted)
    print(f"| {name} | {load:g} | {ttft * 1e3:.0f} ms | {' | '.join(cells)} |", flush=True)


def measure_ttft(model: Path, asked: argparse.Namespace) -> None:
    print("| trace | load | TTFT p50 | requests: error p50, p90 | without company | with company |")
    print("|---|--:|--:|--:|--:|--:|")
    for name in asked.trace or TRACES:
        file, scale, rate = TRACES[name]
        rows = read_trace(asked.traces / file, limit=asked.requests + WARM)
        coming = arrivals(rows, scale, rate * asked.load)
        coming = [
            Arrival(one.at, [token % 49000 for token in one.prompt[:3000]], one.output) for one in coming
        ]
        show_errors(name, asked.load, asyncio.run(served(model, coming)))


class Forced:
    """Costs by which blocks are always copied back, or never."""

    def __init__(self, each: float) -> None:
        self._each = each

    def prompt_seconds(self, tokens: int) -> float:
        return self._each * tokens

    def token_seconds(self) -> float:
        return 1.0


def first_token(engine: SyncEngine, prompt: list[int]) -> float:
    """Seconds from its start to the end of an answer of one token."""
    start = time.perf_counter()
    request = Request(
        request_id=f"{start}", prompt_token_ids=TokenIds(prompt),
        params=SamplingParams(temperature=0, max_tokens=1, ignore_eos=True), arrival=start,
    )  # fmt: skip
    engine.core.add(request)
    while engine.core.has_work():
        time.sleep(engine.core.ready_in() or 0.0)
        engine.core.step()
    return time.perf_counter() - start


def measure_swap(model: Path, asked: argparse.Namespace) -> None:
    config = EngineConfig(
        memory=3 * 2**30, quantization="int8", max_num_seqs=4, max_num_batched_tokens=512, max_model_len=POOL,
        num_kv_blocks=POOL // 16, swap_space=400 * 2**20,
    )  # fmt: skip
    engine, rng = SyncEngine(build(open_model(model), config)), random.Random(0)
    fetches = engine.core.scheduler.fetches
    assert fetches is not None
    chosen = fetches._costs

    def prompt(length: int) -> list[int]:
        return rng.choices(range(100, 40_000), k=length)

    for length in (300, 40, 2000, 700) * 3:
        first_token(engine, prompt(length))
    print("| context, tokens | copied back, ms | computed, ms | as chosen, ms | copied, tokens |")
    print("|--:|--:|--:|--:|--:|")
    for length in CONTEXTS:
        took: dict[str, list[float]] = {}
        copied = 0
        for _ in range(asked.repeat):
            for name, costs in (("copied", Forced(1e3)), ("computed", Forced(0.0)), ("chosen", chosen)):
                mine = prompt(length)
                first_token(engine, mine)
                for _ in range(2):
                    first_token(engine, prompt(POOL - 64))
                fetches._costs = costs
                before = engine.core.swap.blocks_in if engine.core.swap else 0
                took.setdefault(name, []).append(first_token(engine, mine))
                if name == "chosen" and engine.core.swap:
                    copied = (engine.core.swap.blocks_in - before) * 16
        shown = " | ".join(f"{statistics.median(found) * 1e3:.1f}" for found in took.values())
        print(f"| {length} | {shown} | {copied} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("ttft", "swap"))
    parser.add_argument("--traces", type=Path, default=Path("../shared/data/traces"))
    parser.add_argument("--trace", action="append", choices=sorted(TRACES), help="default: all")
    parser.add_argument("--load", type=float, default=0.5)
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--repeat", type=int, default=3)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        model = write_checkpoint(Path(place) / "model", shapes.config("smollm2-135m"))
        if asked.what == "ttft":
            measure_ttft(model, asked)
        else:
            measure_swap(model, asked)


if __name__ == "__main__":
    main()
