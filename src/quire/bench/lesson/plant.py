"""A simulated server of the lesson: its cards, what a step takes on them, and what fits into them.

Step times are a roofline with an overhead and all-reduces, so they are what hardware allows, not a measurement.
"""

from __future__ import annotations

import math
import random
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import field
from functools import cache, partial
from pathlib import Path
from typing import Any

from quire.bench.simulated_fleet import SimulatedFleet
from quire.bench.simulated_server import Arrival, SimulatedRun, SimulatedServer, StepTime
from quire.core.scheduler_config import SchedulerConfig
from quire.learn.catalog import size
from quire.planner.devices import Device
from quire.planner.formulas import accepted_length, all_reduce_bytes
from quire.planner.model_size import ModelSize
from quire.planner.step_bound import RankLayout, StepBound
from quire.records import dataclass

BATCHINGS = ("static", "dynamic", "continuous")


@cache
def settings(part: str) -> dict[str, Any]:
    """A part of servers.toml."""
    found: dict[str, Any] = tomllib.loads(Path(__file__).with_name("servers.toml").read_text())[part]
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Plant:
    """Servers: `replicas` of `cards` each. Without `paging` each sequence has room for the longest one set aside.

    Speculation is an expectation: each sequence takes a step of 1 + γ positions for the tokens that the formula says it
    gives, and drafts take their share of its time.
    """

    model: str
    device: Device
    cards: int = 1
    replicas: int = 1
    batching: str = "continuous"
    prefix_cache: bool = False
    speculation: bool = False
    int8: bool = False
    paging: bool = True
    chunking: bool = True
    prefill_replicas: int = 0
    transfer: Callable[[int], float] = field(default=lambda _: 0.0)

    @property
    def bits(self) -> int:
        return 8 if self.int8 else 16

    @property
    def cache_tokens(self) -> int:
        """Tokens that the cache has room for. Raises ValueError if the weights leave none."""
        known, params = size(self.model)
        room = self.device.memory_gb * 1e9 * self.cards * settings("server")["memory_share"]
        left = room - params * 1e9 * self.bits / 8
        tokens = int(left / (known.kv_values * 2))
        if tokens < settings("server")["max_model_len"]:
            raise ValueError(
                f"gpus: the weights of {self.model} leave no room for the cache of a sequence in "
                f"{self.cards} × {self.device.title}"
            )
        return tokens

    def config(self) -> SchedulerConfig:
        """The limits of one server."""
        given, tokens = settings("server"), self.cache_tokens
        seqs: int = given["max_num_seqs"]
        if self.batching != "continuous":
            seqs = given["static_batch"]
        if not self.paging:
            seqs = min(seqs, tokens // given["max_model_len"])
        return SchedulerConfig(
            num_blocks=tokens // 16,
            max_num_seqs=seqs,
            max_num_batched_tokens=given["max_num_batched_tokens"] if self.chunking else 2**14,
            max_model_len=given["max_model_len"],
            enable_prefix_caching=self.prefix_cache,
            enable_chunked_prefill=self.chunking,
        )

    def step_time(self) -> StepTime:
        """Seconds of a step by cost_model.FEATURES."""
        given, (known, _) = settings("server"), size(self.model)
        bound = StepBound(
            model=known, device=self.device, layout=RankLayout(self.cards), bits=self.bits,
            overhead=given["overhead_ms"] / 1e3,
        )  # fmt: skip
        times = _with_links(bound.local_seconds, known, self.device, self.cards, given["all_reduce_us"] / 1e6)
        if not self.speculation:
            return times
        return _speculating(times, **settings("speculation"))

    def serve(
        self,
        arrivals: Sequence[Arrival],
        *,
        seed: int = 0,
        look: Callable[[SimulatedServer], None] | None = None,
    ) -> SimulatedRun:
        """Serve all; `look` sees a server before each of its steps."""
        config, times, given = self.config(), self.step_time(), settings("server")
        wait = {"static": math.inf, "dynamic": given["dynamic_wait_s"], "continuous": None}[self.batching]

        def make(number: int, received: bool) -> SimulatedServer:
            server = SimulatedServer(
                config, times, noise=0.0, seed=seed + number, batch_wait=wait, received=received
            )
            if look is not None:
                server.seen = partial(_tell, look, server)
            return server

        if self.replicas == 1 and not self.prefill_replicas:
            return make(0, False).run(arrivals)
        if self.batching != "continuous":
            raise ValueError("batching: several replicas are simulated with continuous batching alone")
        fleet = SimulatedFleet(make, self.replicas, prefill=self.prefill_replicas, transfer=self.transfer)
        return fleet.run(arrivals)


def _tell(look: Callable[[SimulatedServer], None], server: SimulatedServer, _: Sequence[float]) -> None:
    look(server)


def _with_links(plain: StepTime, model: ModelSize, device: Device, cards: int, latency: float) -> StepTime:
    """A step on cards that share each matrix: two all-reduces a layer."""
    if cards == 1:
        return plain
    if not device.link_gb_s:
        raise ValueError(f"gpus: {device.title} has no link to others")
    reduced = all_reduce_bytes(model.hidden * 2, cards) * 2 * model.layers / (device.link_gb_s * 1e9)

    def seconds(features: Sequence[float]) -> float:
        tokens = features[1] + features[2]
        return plain(features) + 2 * model.layers * latency + tokens * reduced

    return seconds


def _speculating(times: StepTime, alpha: float, gamma: int, draft_share: float) -> StepTime:
    """The part of a step that a token takes when each sequence runs γ drafts. Steps with prompts stay whole."""
    gained = accepted_length(alpha, gamma)

    def seconds(features: Sequence[float]) -> float:
        step, rows, prompt, context, *rest = features
        if prompt:
            return times(features)
        verified = times((step, rows * (1 + gamma), prompt, context, *rest))
        return (verified + gamma * draft_share * times(features)) / gained

    return seconds


def load(rate: float, *, seed: int, seconds: float | None = None) -> list[Arrival]:
    """Requests of a Poisson process whose prompts share a prefix, as servers.toml says."""
    given, rng = settings("load"), random.Random(f"lesson {seed}")
    found: list[Arrival] = []
    at, end = 0.0, given["seconds"] if seconds is None else seconds
    while (at := at + rng.expovariate(rate)) < end or not found:
        own = rng.randint(*given["prompt"])
        first = 10_000 * (len(found) + 1)
        prompt = [*range(given["shared_prefix"]), *range(first, first + own)]
        found.append(Arrival(at, prompt, rng.randint(*given["output"])))
    return found
