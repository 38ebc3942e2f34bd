"""Routing kinds on published traces of conversations: what they find cached, TTFT, goodput and balance, simulated.

    python -m benchmarks.routing_policies conversation [--rates 1,2,3] [--kinds round-robin session] [--limit 3000]
    python -m benchmarks.routing_policies synthetic

Four servers of a model of 8 billion parameters on an H100 each: the real scheduler and prefix cache, with steps of
twice the time of the roofline and 3 ms. Requests come `--rates` times as fast as in the trace of Mooncake. A
conversation is what shares two blocks (of 512 tokens) or more with an earlier request. "predicted" knows what it sent
to each server (routing.prefix_index), "reported" what each server has, "hybrid" that and what it is computing; lengths
of answers are the mean of the trace for all. The most that can be cached is that of one server with room for
everything; beside it, of one with the memory of all four. That of the devices alone holds what came in the last minute
of these traces: so each server has a tier in the memory of its host, from which blocks come in no time.
"""

from __future__ import annotations

import argparse
import gc
import math
import statistics
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

from quire.bench.simulated_arrivals import arrivals_of_trace
from quire.bench.simulated_fleet import SimulatedFleet
from quire.bench.simulated_server import Arrival, SimulatedRun, SimulatedServer
from quire.bench.traces import TraceRow, read_trace
from quire.cli.calc import named_size
from quire.config.routing import RouterConfig
from quire.core.scheduler_config import SchedulerConfig
from quire.planner.devices import device
from quire.planner.step_bound import StepBound
from quire.records import dataclass
from quire.routing.prefix_index import PIECE_BYTES, PrefixIndex
from quire.routing.router_policies import RoutedPrompt, Server, policy_named

SERVERS, BLOCK, LONGEST = 4, 512, 131_072  # the blocks of the traces; tokens
RESERVED_GB = 8.0
LATE_TTFT, LATE_TPOT = 4.0, 0.1  # seconds
BYTES_A_TOKEN = 4  # of text, for the size of the index
# By name: the policy, and how it knows what is cached.
KINDS = {
    "round-robin": ("round-robin", ""), "least-work": ("least-work", ""), "power-of-two": ("power-of-two", ""),
    "session": ("session", ""),
    "prefix, predicted": ("prefix", "predicted"), "prefix, reported": ("prefix", "reported"),
    "prefix, hybrid": ("prefix", "hybrid"),
}  # fmt: skip


def sessions_of(rows: Sequence[TraceRow]) -> list[str]:
    """The conversation of each request: that of the last one with its first two blocks or more."""
    last: dict[int, str] = {}  # by block
    found = []
    for number, row in enumerate(rows):
        shared = [last[block] for block in row.blocks[1:] if block in last]
        name = shared[-1] if shared else str(number)
        last |= dict.fromkeys(row.blocks[1:], name)
        found.append(name)
    return found


def most_cached(rows: Sequence[TraceRow], blocks: float) -> float:
    """The share of all tokens that one cache of so many blocks finds, each request being done before the next comes."""
    kept: OrderedDict[int, None] = OrderedDict()
    hit = asked = 0
    for row in rows:
        there = 0
        while there < len(row.blocks) and row.blocks[there] in kept:
            there += 1
        hit += min(there * BLOCK, row.input_tokens - 1)
        asked += row.input_tokens
        for block in reversed(row.blocks):  # the beginning is used last, and stays longest
            kept[block] = None
            kept.move_to_end(block)
        while len(kept) > blocks:
            kept.popitem(last=False)
    return hit / asked


def _common(one: Sequence[bytes], other: Sequence[bytes]) -> int:
    """How many elements two have in common from their beginning on."""
    return next(
        (index for index, (a, b) in enumerate(zip(one, other, strict=False)) if a != b),
        min(len(one), len(other)),
    )


class Routing:
    """A policy that sees of each request what a router knows, and notes where it went."""

    def __init__(self, kind: str, rows: Sequence[TraceRow]) -> None:
        policy, self._source = KINDS[kind]
        self._policy = policy_named(policy, 0)
        self._rows, self._sessions = rows, sessions_of(rows)
        self._answer = statistics.fmean(row.output_tokens for row in rows)
        pieces = RouterConfig(backend=("http://127.0.0.1:9",)).prefix_index_size
        self._index = PrefixIndex(pieces * PIECE_BYTES // BYTES_A_TOKEN // BLOCK)
        self._digests: list[bytes] = []
        self.is_computing: Callable[[int], bool] = lambda _: False  # whether a request has no token yet
        self._number = 0  # of the request that is placed now
        self._coming: dict[str, dict[int, list[bytes]]] = {}  # by server and request
        self.placed: Counter[str] = Counter()  # requests
        self.work: Counter[str] = Counter()  # tokens as the policies count them
        self.crowding: list[float] = []  # requests of the server with most of them, over the mean

    def known(self, number: int, prompt: RoutedPrompt) -> RoutedPrompt:
        """What a router knows of a request: before it is sent, also where that is asked for afterwards."""
        row, self._number = self._rows[number], number
        self._digests = [block.to_bytes(8, "big") for block in row.blocks]

        @cache
        def cached(server: str) -> float:
            match self._source:
                case "reported":
                    return prompt.cached(server)
                case "hybrid":
                    return max(prompt.cached(server), self._comes(server))
                case "predicted":
                    return float(self._index.matched(server, self._digests) * BLOCK)
            return 0.0

        return replace(prompt, session=self._sessions[number], answer_tokens=self._answer, cached=cached)

    def _comes(self, server: str) -> float:
        """Tokens at the beginning of the prompt that a server is computing for others."""
        coming = self._coming.setdefault(server, {})
        for computed in [number for number in coming if not self.is_computing(number)]:
            del coming[computed]
        return BLOCK * max((_common(each, self._digests) for each in coming.values()), default=0)

    def choose(self, prompt: RoutedPrompt, servers: Sequence[Server]) -> Server:
        """The server of the policy."""
        chosen = self._policy.choose(prompt, servers)
        self.work[chosen.name] += int(prompt.work(chosen.name))
        self._index.add(chosen.name, self._digests)
        self._coming.setdefault(chosen.name, {})[self._number] = self._digests
        self.placed[chosen.name] += 1
        counts = [each.requests + (each is chosen) for each in servers]
        if sum(counts) >= 4 * len(servers):  # fewer cannot be spread evenly
            self.crowding.append(max(counts) / statistics.fmean(counts))
        return chosen


@dataclass(frozen=True, slots=True)
class Row:
    """What came of a kind at a rate."""

    hit: float
    ttft: tuple[float, float]  # p50 and p90, seconds
    kept: float  # share of the requests
    goodput: float  # requests a second
    spread: float  # work of the server with most of it, over the mean
    crowding: float


def _row(rows: Sequence[TraceRow], run: SimulatedRun, routing: Routing) -> Row:
    firsts, good = [], 0
    for record in run.records:
        first = record.times[0] - record.scheduled
        rest = (record.times[-1] - record.times[0]) / max(1, (record.output_tokens or 0) - 1)
        firsts.append(first)
        good += first <= LATE_TTFT and rest <= LATE_TPOT
    cuts = statistics.quantiles(firsts, n=10)
    seconds = max(record.closed for record in run.records) - run.records[0].scheduled
    work = [routing.work[f"replica {number}"] for number in range(SERVERS)]
    return Row(
        sum(run.cached.values()) / sum(row.input_tokens for row in rows), (cuts[4], cuts[8]), good / len(firsts),
        good / seconds, max(work) / statistics.fmean(work), statistics.fmean(routing.crowding or [math.nan]),
    )  # fmt: skip


def _bound() -> StepBound:
    return StepBound(model=named_size("llama-3-8b"), device=device("h100"))


def _blocks(bound: StepBound, tier_gb: float) -> int:
    """Of a server's cache with a tier of so many GB in the memory of its host."""
    return int((bound.room(RESERVED_GB) + tier_gb * 1e9) / bound.token_bytes / BLOCK)


def simulate(
    kind: str, rows: Sequence[TraceRow], arrivals: Sequence[Arrival], rate: float, tier_gb: float
) -> Row:
    """Serve all requests, `rate` times as fast."""
    bound = _bound()
    config = SchedulerConfig(
        num_blocks=_blocks(bound, tier_gb),
        block_size=BLOCK,
        max_num_batched_tokens=2048,
        max_model_len=LONGEST,
    )

    def make(number: int, received: bool) -> SimulatedServer:
        return SimulatedServer(
            config, lambda features: 0.003 + 2 * bound.seconds(features), seed=number, received=received,
            learns=False,
        )  # fmt: skip

    routing = Routing(kind, rows)
    fleet = SimulatedFleet(make, SERVERS, routing, known=routing.known)
    routing.is_computing = fleet.is_computing
    return _row(rows, fleet.run([replace(one, at=one.at / rate) for one in arrivals]), routing)


def main() -> None:
    """Print a row for each kind and rate."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trace", choices=("conversation", "synthetic"))
    parser.add_argument("--traces", type=Path, default=Path("../shared/data/traces"))
    parser.add_argument("--rates", default="1,2,3,4")
    parser.add_argument("--kinds", nargs="+", default=[*KINDS], choices=KINDS)
    parser.add_argument("--limit", type=int, default=3000)
    parser.add_argument(
        "--tier", type=float, default=300.0, metavar="GB", help="of each host's memory, for blocks"
    )
    args = parser.parse_args()
    gc.set_threshold(100_000, 20, 100)  # a simulation makes many objects and hardly a cycle
    rows = [
        row for row in read_trace(args.traces / f"mooncake_{args.trace}_trace.jsonl", limit=args.limit)
        if row.input_tokens + row.output_tokens < LONGEST and row.output_tokens
    ]  # fmt: skip
    arrivals = arrivals_of_trace(rows)
    blocks = SERVERS * _blocks(_bound(), args.tier)
    most, pooled = most_cached(rows, math.inf), most_cached(rows, blocks)
    span = arrivals[-1].at - arrivals[0].at
    print(f"{len(rows)} requests, {len(rows) / span:.2f} a second at rate 1; cached at most {most:.3f} of all tokens, "
          f"{pooled:.3f} with {blocks} blocks in one place")  # fmt: skip
    print(
        "| | requests/s | cached, of the most | of one place | TTFT p50, p90, s | kept | goodput | work | in flight |"
    )
    print("|---|--:|--:|--:|--:|--:|--:|--:|--:|")
    for rate in map(float, args.rates.split(",")):
        for kind in args.kinds:
            row = simulate(kind, rows, arrivals, rate, args.tier)
            print(
                f"| {kind} | {rate * len(rows) / span:.1f} | {row.hit / most:.2f} | {row.hit / pooled:.2f} "
                f"| {row.ttft[0]:.2f}, {row.ttft[1]:.2f} | {row.kept:.3f} | {row.goodput:.2f} | {row.spread:.2f} "
                f"| {row.crowding:.2f} |", flush=True,
            )  # fmt: skip


if __name__ == "__main__":
    main()
