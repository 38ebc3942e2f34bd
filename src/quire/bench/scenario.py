"""What a simulation runs: requests, the limits of a scheduler, what steps take, and how many replicas there are."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import field, replace
from typing import Any

from quire.bench.recorded_drafts import RecordedDrafts
from quire.bench.shared_cpus import CpuUse, alone, slower_at_worst
from quire.bench.simulated_arrivals import RecordedLoad, SimulationError
from quire.bench.simulated_fleet import SimulatedFleet
from quire.bench.simulated_server import (
    Arrival,
    Handover,
    SimulatedRun,
    SimulatedServer,
    StepNoise,
    StepTime,
)
from quire.core.capacity import least_blocks
from quire.core.scheduler_config import SchedulerConfig
from quire.objectives import ServiceClass, parse_classes
from quire.records import dataclass
from quire.routing.router_policies import policy_named

_COUNTS = ("num_blocks", "block_size", "max_num_seqs", "max_num_batched_tokens", "max_model_len")
_FLAGS = {"true": True, "on": True, "1": True, "false": False, "off": False, "0": False}
# Options that change what a step costs: a log without them does not say by how much.
_NOT_SIMULATED = {
    "kv_cache_dtype": "how many blocks such a cache has, and what its steps cost",
    "speculative_config": "how many drafts are right, and what they cost",
    "threads": "what steps cost with other threads",
    "quantization": "what steps cost with other weights",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A load, and the servers that it meets. `costs` are seconds of a step by cost_model.FEATURES and `noise` what they
    vary by, as SimulatedServer takes them; `transfer` are seconds to move the cache of so many tokens. `cpus` are
    those of the machine that was recorded, `slower` by how much a step takes longer while so many replicas run one.
    """

    arrivals: Sequence[Arrival]
    config: SchedulerConfig
    costs: StepTime
    noise: float | StepNoise = 0.0
    handover: Handover = Handover()
    between: float = 0.0
    drafts: RecordedDrafts | None = None
    classes: tuple[ServiceClass, ...] = ()
    replicas: int = 1
    router: str = "prefix"
    prefill_replicas: int = 0
    transfer: Callable[[int], float] = field(default=lambda _: 0.0)
    cpus: CpuUse | None = None
    slower: Callable[[int], float] = field(default=alone)

    def run(
        self, seed: int = 0, seen: Callable[[Sequence[float]], None] | None = None
    ) -> tuple[SimulatedRun, int]:
        """Serve all requests that fit; returns how many are left out. `seen` gets what is in each step.

        Raises SimulationError if none fits.
        """
        turns = self.config.takes_turns
        drafts = 0 if self.drafts is None else self.config.max_draft_tokens
        limits = replace(self.config, max_draft_tokens=drafts, steps_in_flight=2 if turns else 1)
        longest = min(limits.max_model_len, limits.num_blocks * limits.block_size // len(limits.groups) - 1)
        arrivals = [one for one in self.arrivals if len(one.prompt) + one.output <= longest]
        if not arrivals:
            raise SimulationError("no request fits max_model_len and the cache")

        limits = replace(limits, num_blocks=_blocks(limits, arrivals))
        learns = bool(self.classes) or limits.policy not in {"fcfs", "priority"}

        def make(number: int, received: bool) -> SimulatedServer:
            server = SimulatedServer(
                limits, self.costs, self.classes, admits=bool(self.classes), controls=bool(self.classes),
                noise=self.noise, seed=seed + number, received=received, learns=learns,
                handover=self.handover, between=self.between, drafts=self.drafts,
            )  # fmt: skip
            server.seen = seen
            return server

        fleet = SimulatedFleet(
            make,
            self.replicas,
            policy_named(self.router, seed),
            prefill=self.prefill_replicas,
            transfer=self.transfer,
            slower=self.slower,
        )
        return fleet.run(arrivals), len(self.arrivals) - len(arrivals)

    def at_pace(self, factor: float) -> Scenario:
        """On a machine whose steps take so many times as long."""
        costs = self.costs
        return replace(self, costs=lambda features: factor * costs(features))

    def extremes(self, levels: Iterable[float]) -> list[Scenario]:
        """What it may turn out to be: at some paces of the machine all the time, and with replicas that slow each other
        down as much as they can."""
        found = [self.at_pace(level) for level in levels if level != 1]
        if self.shares_machine:
            found.append(replace(self, slower=slower_at_worst))
        return found

    @property
    def shares_machine(self) -> bool:
        """Whether its replicas are on one machine."""
        return self.replicas > 1 and self.slower is not alone

    def faster(self, rate: float) -> Scenario:
        """The same requests, `rate` times as fast."""
        return replace(self, arrivals=[replace(one, at=one.at / rate) for one in self.arrivals])

    def beside(self, replicas: int) -> Scenario:
        """With so many replicas on the machine that was recorded, whose memory they share. Raises ValueError if the log
        does not say enough."""
        if replicas > 1 and self.cpus is None:
            raise ValueError(
                "set: data_parallel_size: the log does not say what its processors did; "
                "replicas=2 has each replica on a machine of its own"
            )
        slower = self.slower if self.cpus is None else self.cpus.slower
        blocks = max(1, self.config.num_blocks // replicas)
        return replace(self, replicas=replicas, slower=slower, config=replace(self.config, num_blocks=blocks))

    def changed(self, settings: Mapping[str, str]) -> Scenario:
        """With other settings, by the names of the server's options. Raises ValueError naming the one that is wrong."""
        found, limits = self, {}
        for given, text in settings.items():
            name = given.removeprefix("--").replace("-", "_")
            if name in _NOT_SIMULATED:
                raise ValueError(
                    f"set: {name}: {_NOT_SIMULATED[name]} is in a log of such a server: quire whatif --like"
                )
            if name in _COUNTS:
                limits[name] = _number(name, text, int)
            elif name in {"enable_prefix_caching", "enable_chunked_prefill"}:
                if text.lower() not in _FLAGS:
                    raise ValueError(f"set: {name}: {text!r} is not on or off")
                limits[name] = _FLAGS[text.lower()]
            elif name == "scheduling_policy":
                limits["policy"] = text
            elif name == "rate":
                found = found.faster(_number(name, text, float))
            elif name in {"replicas", "prefill_replicas"}:
                least = 1 if name == "replicas" else 0
                values: dict[str, Any] = {name: _number(name, text, int, least)}
                found = replace(found, **values)
            elif name == "data_parallel_size":
                found = found.beside(_number(name, text, int, 1))
            elif name == "router":
                policy_named(text)
                found = replace(found, router=text)
            elif name == "slo":
                found = replace(found, classes=parse_classes(tuple(text.split())))
            else:
                known = [*_COUNTS, *_OTHERS]
                raise ValueError(f"set: {name} cannot be simulated; known are {', '.join(known)}")
        return replace(found, config=replace(found.config, **limits)) if limits else found


_OTHERS = (
    "enable_prefix_caching", "enable_chunked_prefill", "scheduling_policy", "rate", "replicas", "prefill_replicas",
    "data_parallel_size", "router", "slo",
)  # fmt: skip


def _blocks(limits: SchedulerConfig, arrivals: Sequence[Arrival]) -> int:
    """The blocks of a cache, at most what all requests together could fill: more change nothing, and take memory."""
    if limits.floors:
        return limits.num_blocks
    size, groups = limits.block_size, limits.groups
    most = sum((len(one.prompt) + one.output) // size + 2 for one in arrivals) * len(groups)
    spare = least_blocks(groups, limits.max_model_len, limits.max_num_batched_tokens, size)
    return min(limits.num_blocks, most + spare)


def scenario_of_log(load: RecordedLoad) -> Scenario:
    """What was recorded, under its own limits."""
    classes = parse_classes(tuple(load.classes.split()))
    return Scenario(
        arrivals=load.arrivals, config=load.config, costs=load.fit.formula(),
        noise=load.fit.walk if load.fit.steps else 0.03, handover=load.handover,
        between=load.fit.between, drafts=load.drafts, classes=classes, cpus=load.cpus,
    )  # fmt: skip


def scenario_like(load: RecordedLoad, like: RecordedLoad) -> Scenario:
    """The load of one log before the server of another: its limits and blocks, what its steps take, its drafts."""
    return replace(
        scenario_of_log(like), arrivals=load.arrivals, classes=parse_classes(tuple(load.classes.split()))
    )


def parse_settings(texts: Sequence[str]) -> dict[str, str]:
    """NAME=VALUE words. Raises ValueError for another form."""
    found = {}
    for text in texts:
        name, sign, value = text.partition("=")
        if not sign or not name or not value:
            raise ValueError(f"set: {text!r} does not have the form max_num_seqs=32")
        found[name] = value
    return found


def _number(name: str, text: str, kind: Callable[[str], Any], least: float = 0) -> Any:
    try:
        value = kind(text)
    except ValueError:
        raise ValueError(f"set: {name}: {text!r} is not a number") from None
    if not (value > 0 if least == 0 and kind is float else value >= least) or value > 2**31:
        raise ValueError(f"set: {name}: {text} is out of range")
    return value
